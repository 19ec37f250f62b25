// Tiles that the copy engine fetches (cp.async.bulk.tensor): boxes of a view of up to four axes, zero behind the end of every axis,
// swizzled, for this block or for several of the cluster. They land as bulk copies do.
#include "access_order.h"

namespace emu {

constexpr unsigned most_axes = 4;
constexpr unsigned swizzle_chunk = 16;  // bytes that a swizzle keeps together

struct TileView {  // mirrored by module.py: what a CUtensorMap says
  const char* address;
  unsigned element_bytes, swizzle_bytes, axes, unused;
  unsigned extents[most_axes], tile[most_axes];  // elements
  unsigned long long steps[most_axes];           // bytes
  const char* operand;
  unsigned long long operand_bytes;
  char name[24];

  // The view is the launch's word, which no device compares with what lies there.
  void check(const char* first, const char* end, const void* code) const {
    const long long before = operand - first, behind = end - (operand + operand_bytes);
    if (options.checks && (before > 0 || behind > 0))
      fail("out of bounds: read of %lld bytes by a tile, %lld bytes %s argument '%s'%s", (long long)(end - first),
           before > 0 ? before : std::min<long long>(behind, end - first), before > 0 ? "before" : "past the end of", name,
           place(code).c_str());
    check_access(first, size_t(end - first), {Access::read}, code);
  }
};
static_assert(sizeof(TileView) == 128, "a CUtensorMap");

// Where a line of a tile begins in memory; `first` and `end` are the bytes of it that exist.
struct Line {
  const char* address;
  long long first, end;
};

static Line line_of(const TileView& view, const int (&at)[most_axes], unsigned number) {
  long long offset = 0;
  bool inside = true;
  for (unsigned axis = 1; axis < most_axes; ++axis) {
    const long long place = at[axis] + (long long)(number % view.tile[axis]);
    number /= view.tile[axis];
    inside &= place >= 0 && place < (long long)view.extents[axis];
    offset += place * (long long)view.steps[axis];
  }
  const long long first = std::max(0ll, -(long long)at[0]), end = std::min<long long>(view.tile[0], (long long)view.extents[0] - at[0]);
  if (!inside || end <= first) return {nullptr, 0, 0};
  return {view.address + offset + at[0] * (long long)view.element_bytes, first * view.element_bytes, end * view.element_bytes};
}

// Chunk by chunk: a swizzle exchanges these by the address, bits 4 to 6 by bits 7 to 9.
static CopyRequest request_of(const TileView& view, const int (&at)[most_axes], char* shared, unsigned bytes, const void* code) {
  CopyRequest copies;
  copies.reserve(bytes / swizzle_chunk);
  const unsigned line_bytes = view.tile[0] * view.element_bytes;
  for (unsigned offset = 0; offset < bytes; offset += line_bytes) {
    const Line line = line_of(view, at, offset / line_bytes);
    if (line.end) view.check(line.address + line.first, line.address + line.end, code);
    for (long long inside = 0; inside < line_bytes; inside += swizzle_chunk) {
      uintptr_t place = reinterpret_cast<uintptr_t>(shared) + offset + size_t(inside);
      if (view.swizzle_bytes) place ^= (place >> 7 & 7) << 4;
      char* const to = reinterpret_cast<char*>(place);
      const unsigned zeros = unsigned(std::min<long long>(swizzle_chunk, std::max(0ll, line.first - inside)));
      const unsigned rest = swizzle_chunk - zeros;
      const long long there = std::min<long long>(rest, std::max(0ll, line.end - inside - zeros));
      if (zeros) copies.push_back({to, nullptr, zeros, 0});
      if (rest) copies.push_back({to + zeros, line.address + inside + zeros, rest, unsigned(there)});
    }
  }
  return copies;
}

// The same at the same place of block `rank` of the cluster, which is not this one.
static void send_tile(const CopyRequest& copies, char* shared, unsigned bytes, unsigned long long* address, unsigned rank,
                      const void* code) {
  const RemoteStore there = remote_store("a tile for the cluster", reinterpret_cast<float*>(shared), bytes, rank);
  Mbarrier* barrier = barrier_of("a tile for the cluster", rank, address);
  check_tile_for(rank, block_of(rank).linear, there.offset, bytes, *barrier, code);
  CopyRequest moved = copies;
  for (PendingCopy& copy : moved) {
    copy.destination += shared_memory_of(rank, false) - dynamic_region.low;
    std::memset(copy.destination, poison, copy.bytes);
  }
  barrier->in_flight.push_back(std::move(moved));
}

void fetch_tile(void* to, const void* tiles, const int (&at)[4], unsigned long long* address, unsigned blocks) {
  RuntimeScope scope;
  const void* code = __builtin_return_address(0);
  char* shared = static_cast<char*>(to);
  TileView view;
  std::memcpy(&view, tiles, sizeof view);
  if (view.axes != most_axes) return fail("a tile is fetched at %u places, its view has %u axes", most_axes, view.axes);
  Mbarrier* own = find_mbarrier(address);
  const unsigned lines = view.tile[1] * view.tile[2] * view.tile[3], bytes = view.tile[0] * view.element_bytes * lines;
  const unsigned alignment = view.swizzle_bytes ? 8 * view.swizzle_bytes : 128;
  if (reinterpret_cast<uintptr_t>(shared) % alignment) return fail("a tile is fetched to no multiple of %u bytes", alignment);
  if (!dynamic_region.contains(shared) || !dynamic_region.contains(shared + bytes - 1))
    return fail("a tile of %u bytes: the destination is not inside dynamic shared memory", bytes);
  if (blocks >> cluster_size()) return fail("a tile for blocks 0x%x of a cluster of %u", blocks, cluster_size());
  const CopyRequest copies = request_of(view, at, shared, bytes, code);
  for (unsigned rank = 0; rank < cluster_size(); ++rank)
    if (rank != cluster_rank() && blocks >> rank & 1) send_tile(copies, shared, bytes, address, rank, code);
  if (blocks && !(blocks >> cluster_rank() & 1)) return;
  check_access(shared, bytes, {Access::write}, code);
  mark_bulk_landing(shared, bytes, *own);
  ask(*own, copies);
}

}  // namespace emu
