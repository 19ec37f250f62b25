// Products of warpgroups (wgmma). A warp's products are made when its wait covers them or, without `options.lazy_copies`, when they are
// asked for; until the wait their sums hold NaN, and with lazy copies they read shared memory at the last moment: what is read too
// early, or a place that is filled again too early, gives wrong results in every build. A checked build also has their reads in the
// history of shared memory, from the product until the wait. Each warp makes its 16 of the 64 rows.
// Layouts and descriptors: PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate instructions". Sums are in fp32, ascending.
#include "runtime.h"

namespace emu {

constexpr unsigned window_start = 1024;  // of dynamic shared memory, as on a GPU, which keeps the first bytes for itself
constexpr unsigned band = 16;            // rows of a warp, and terms of a product

unsigned shared_window_address(const void* shared) {
  if (!dynamic_region.contains(shared)) fail("a descriptor of an address outside dynamic shared memory");
  return window_start + unsigned(static_cast<const char*>(shared) - dynamic_region.low);
}

// --- steps of a whole warp -----------------------------------------------------------------------------------------
enum class Step : uint64_t { multiply, fence, commit, wait };
struct WarpStep {
  Step step;
  int pending_groups;
  WarpgroupProduct product;
};

static void run_step(void* const* inputs, void* const*);
static void step(const WarpStep& said) {
  activate_clocks();
  whole_warp(Collective::warpgroup, &said, nullptr, run_step);
}
void warpgroup_multiply(const WarpgroupProduct& product) { step({Step::multiply, 0, product}); }
// A block has as many registers as it is launched with, each thread as many as the launch bounds leave it; a warpgroup that asks for more
// than the others give back waits for ever.
static unsigned launched_registers() { return std::min(65536 / block.thread_count / 8 * 8, 255u); }

static void set_registers(unsigned count) {
  RuntimeScope scope;
  constexpr unsigned fewest = 24;
  block.warps[self()->warp].registers = count;
  unsigned asked = 0;
  for (const Warp& warp : block.warps) asked += warp.registers ? warp.registers : fewest;
  if (asked > launched_registers() * block.warp_count)
    fail("the warps of the block ask for %u registers a lane together, and it is launched with %u: they never come free", asked,
         launched_registers() * block.warp_count);
}
void shrink_registers(int count) {
  if (unsigned(count) > launched_registers()) fail("a warpgroup that has %u registers cannot shrink to %d", launched_registers(), count);
  set_registers(unsigned(count));
}
void grow_registers(int count) {
  if (unsigned(count) < launched_registers()) fail("a warpgroup that has %u registers cannot grow to %d", launched_registers(), count);
  set_registers(unsigned(count));
}

void proxy_fence() {
  RuntimeScope scope;
  Thread* thread = self();
  thread->proxy_fences.push_back({thread->time, thread->block_epoch});
  ++thread->time;  // what is stored hereafter is behind it
}
void warpgroup_fence() { step({Step::fence, 0, {}}); }
void warpgroup_commit() { step({Step::commit, 0, {}}); }
void warpgroup_wait(int pending_groups) { step({Step::wait, pending_groups, {}}); }

// What every lane of a warp and every warp of a warpgroup says alike.
static uint64_t digest_of(const WarpStep& said) {
  const WarpgroupProduct& product = said.product;
  const uint64_t flags = uint64_t(product.half) | product.adds << 1 | product.a_by_terms << 2 | product.b_by_terms << 3;
  uint64_t digest = 0;
  for (uint64_t part : {uint64_t(said.step), uint64_t(said.pending_groups), uint64_t(product.a), uint64_t(product.b),
                        uint64_t(product.columns), flags | uint64_t(product.rows != nullptr) << 4})
    digest = (digest ^ part) * 0x9e3779b97f4a7c15ull + (digest >> 29);
  return digest;
}

// --- what a descriptor says ----------------------------------------------------------------------------------------
struct Slice {
  unsigned start, panels, groups;  // bytes
  bool by_terms;

  static Slice of(uint64_t descriptor, bool by_terms) {
    const auto bytes = [descriptor](unsigned bit) { return unsigned(descriptor >> bit & 0x3fff) << 4; };
    const Slice slice{bytes(0), bytes(16), bytes(32), by_terms};
    if (descriptor >> 62 != 1) fail("a descriptor without the swizzle of 128 bytes: no other one is emulated");
    if (descriptor & 0x3fffc000c000c000ull) fail("a descriptor 0x%016llx whose unused bits are not 0", (unsigned long long)descriptor);
    if (slice.start >> 7 & 7) fail("a descriptor of byte %u: swizzled panels begin at multiples of 1,024", slice.start);
    return slice;
  }
  // The 16 bytes that begin at this line and term; neighbours are terms or lines.
  const char* chunk(unsigned line, unsigned term) const {
    unsigned address = by_terms ? start + line / 8 * groups + line % 8 * 128 + term * 2
                                : start + line / 64 * panels + line % 64 * 2 + term / 8 * groups + term % 8 * 128;
    address ^= (address >> 7 & 7) << 4;
    const char* found = dynamic_region.low + address - window_start;
    if (address < window_start || !dynamic_region.contains(found) || !dynamic_region.contains(found + 15))
      fail("a descriptor leaves dynamic shared memory: line %u, term %u", line, term);
    return found;
  }
  template <class Visit>
  void each_chunk(unsigned first_line, unsigned lines, Visit visit) const {
    const unsigned line_step = by_terms ? 1 : 8, term_step = by_terms ? 8 : 1;
    for (unsigned line = first_line; line < first_line + lines; line += line_step)
      for (unsigned term = 0; term < band; term += term_step) visit(line, term, chunk(line, term));
  }
};

// --- values --------------------------------------------------------------------------------------------------------
static const float* halves() {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (unsigned bits = 0; bits < values.size(); ++bits) values[bits] = half_to_float(bits);
    return values;
  }();
  return table.data();
}
static float value_of(unsigned bits, bool half) { return half ? halves()[bits & 0xffff] : bfloat16_to_float(bits); }

// Element 4 j + 2 h + e of a lane is that of row 8 h + lane / 4 of its warp's and column 8 j + 2 (lane % 4) + e.
template <class Visit>
static void each_sum(unsigned columns, Visit visit) {
  for (unsigned lane = 0; lane < warp_lanes; ++lane)
    for (unsigned i = 0; i < columns / 2; ++i)
      visit(lane, i, (i / 2 % 2 * 8 + lane / 4) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2);
}

template <unsigned Columns>
__attribute__((optimize("O3"))) static void add_products(float* sums, const float (&a)[band][band], const float* b) {
  for (unsigned row = 0; row < band; ++row)
    for (unsigned term = 0; term < band; ++term) {
      const float factor = a[row][term];
      for (unsigned column = 0; column < Columns; ++column) sums[row * Columns + column] += factor * b[term * Columns + column];
    }
}

static void make(Products& products, Products::Product& product, unsigned warp) {
  if (product.made) return;
  product.made = true;
  const WarpgroupProduct& said = product.said;
  float a[band][band];
  static float b[band * 256];
  const auto read = [&](const Slice& slice, unsigned first, unsigned lines, auto&& put) {
    slice.each_chunk(first, lines, [&](unsigned line, unsigned term, const char* from) {
      unsigned short bits[8];
      std::memcpy(bits, from, sizeof bits);
      for (unsigned i = 0; i < 8; ++i)
        put(slice.by_terms ? line : line + i, slice.by_terms ? term + i : term, value_of(bits[i], said.half));
    });
  };
  if (said.rows) {
    for (unsigned lane = 0; lane < warp_lanes; ++lane)
      for (unsigned pair = 0; pair < 4; ++pair)
        for (unsigned e = 0; e < 2; ++e)
          a[pair % 2 * 8 + lane / 4][pair / 2 * 8 + lane % 4 * 2 + e] = value_of(product.rows_of_lane[lane][pair] >> 16 * e, said.half);
  } else {
    const unsigned first = warp % warpgroup_warps * band;
    read(Slice::of(said.a, said.a_by_terms), first, band,
         [&](unsigned line, unsigned term, float value) { a[line - first][term] = value; });
  }
  read(Slice::of(said.b, said.b_by_terms), 0, said.columns,
       [&](unsigned line, unsigned term, float value) { b[term * said.columns + line] = value; });
  for (const auto& sums : products.sums) {
    if (sums->of_lane[0] != said.sums) continue;
    if (!said.adds) std::fill(sums->values.begin(), sums->values.end(), 0.0f);
    if (said.columns == 64) add_products<64>(sums->values.data(), a, b);
    if (said.columns == 128) add_products<128>(sums->values.data(), a, b);
    if (said.columns == 192) add_products<192>(sums->values.data(), a, b);
    if (said.columns == 256) add_products<256>(sums->values.data(), a, b);
  }
}

// --- the steps -----------------------------------------------------------------------------------------------------
static Products::Sums& sums_of(Products& products, const WarpStep* const* lanes) {
  const WarpgroupProduct& said = lanes[0]->product;
  for (const auto& sums : products.sums) {
    bool same = true;
    for (unsigned lane = 0; lane < warp_lanes; ++lane) same &= sums->of_lane[lane] == lanes[lane]->product.sums;
    if (same && sums->columns == said.columns) return *sums;
    const float *old = sums->of_lane[0], *fresh = said.sums;
    if (old < fresh + said.columns / 2 && fresh < old + sums->columns / 2)
      fail("wgmma: its sums are partly those of another product that was not waited for");
  }
  if (!products.fenced) fail("wgmma on registers that no wg::fence() follows: one belongs between their last use and the product");
  auto sums = std::make_unique<Products::Sums>();
  sums->columns = said.columns;
  sums->pending = 0;
  sums->values.resize(band * said.columns);
  for (unsigned lane = 0; lane < warp_lanes; ++lane) sums->of_lane[lane] = lanes[lane]->product.sums;
  each_sum(said.columns, [&](unsigned lane, unsigned i, unsigned place) { sums->values[place] = sums->of_lane[lane][i]; });
  for (float* of_lane : sums->of_lane) std::memset(of_lane, poison, said.columns / 2 * sizeof(float));
  products.sums.push_back(std::move(sums));
  return *products.sums.back();
}

static void multiply(Products& products, const WarpStep* const* lanes) {
  const Thread* thread = self();
  if (block.warp_count % warpgroup_warps || block.thread_count % warp_lanes) fail("wgmma in a block that is not all warpgroups");
  Products::Product product{lanes[0]->product, {}, false};
  for (unsigned lane = 0; lane < warp_lanes; ++lane) product.rows_of_lane[lane] = lanes[lane]->product.rows;
  const WarpgroupProduct& said = product.said;
  ++sums_of(products, lanes).pending;
  const auto check = [thread, &products](unsigned, unsigned, const char* from) {
    check_product_read(from, 16, thread, products.committed + 1, nullptr);
  };
  if (!said.rows) Slice::of(said.a, said.a_by_terms).each_chunk(thread->warp % warpgroup_warps * band, band, check);
  Slice::of(said.b, said.b_by_terms).each_chunk(0, said.columns, check);
  if (!options.lazy_copies) make(products, product, thread->warp);
  products.open.push_back(product);
}

// Gives the sums of a product back where no other product makes them.
static void give_back(Products& products, const Products::Product& product) {
  for (size_t i = 0; i < products.sums.size(); ++i) {
    Products::Sums& sums = *products.sums[i];
    if (sums.of_lane[0] != product.said.sums || --sums.pending) continue;
    uint32_t poisoned;
    std::memset(&poisoned, poison, sizeof poisoned);
    each_sum(sums.columns, [&](unsigned lane, unsigned element, unsigned place) {
      if (std::memcmp(sums.of_lane[lane] + element, &poisoned, sizeof poisoned))
        fail("wgmma: sum %u of lane %u was written before the product that makes it was waited for", element, lane);
      sums.of_lane[lane][element] = sums.values[place];
    });
    products.sums.erase(products.sums.begin() + long(i));
    return;
  }
}

static void wait(Products& products, int pending_groups) {
  Thread* lanes = self() - self()->lane;
  while (int(products.groups.size()) > pending_groups) {
    for (Products::Product& product : products.groups.front()) {
      make(products, product, self()->warp);
      give_back(products, product);
    }
    products.groups.erase(products.groups.begin());
  }
  products.fenced = false;
  if (!block.clocks_active) return;
  for (unsigned lane = 0; lane < warp_lanes; ++lane)
    lanes[lane].clock[block.thread_count + max_mbarriers + self()->warp] = products.committed - uint32_t(products.groups.size());
}

// Called once per warp, by the last of its lanes.
static void run_step(void* const* inputs, void* const*) {
  const WarpStep* const* lanes = reinterpret_cast<const WarpStep* const*>(inputs);
  Products& products = warp_of(self()).products;
  const uint64_t digest = digest_of(*lanes[0]);
  for (unsigned lane = 1; lane < warp_lanes; ++lane)
    if (digest_of(*lanes[lane]) != digest) fail("wgmma: lanes 0 and %u of a warp differ in the step or its descriptors", lane);
  products.said_so_far = (products.said_so_far ^ digest) * 0xff51afd7ed558ccdull + 1;
  switch (lanes[0]->step) {
    case Step::multiply: return multiply(products, lanes);
    case Step::fence: products.fenced = true; return;
    case Step::wait: return wait(products, lanes[0]->pending_groups);
    case Step::commit:
      ++products.committed;
      products.groups.push_back(std::move(products.open));
      products.open.clear();
  }
}

void warpgroup_settle(const float* sums) {
  RuntimeScope scope;
  for (const auto& pending : warp_of(self()).products.sums)
    if (pending->of_lane[self()->lane] == sums) fail("wgmma: sums are used before the product that makes them was waited for");
}

void check_no_product_in_flight(const Thread* thread) {
  const Warp& warp = warp_of(thread);
  if (!warp.products.sums.empty()) fail("the thread exits without a wait for its warpgroup's products");
  const unsigned first = thread->warp / warpgroup_warps * warpgroup_warps;
  if (first + warpgroup_warps > block.warp_count) return;
  for (unsigned w = first; w < first + warpgroup_warps; ++w)
    if (block.warps[w].alive) return;
  for (unsigned w = first + 1; w < first + warpgroup_warps; ++w)
    if (block.warps[w].products.said_so_far != block.warps[first].products.said_so_far)
      fail("wgmma: warps %u and %u of a warpgroup did different steps", first, w);
}

}  // namespace emu
