// Messages of a cluster (st.async): a pair of floats goes into another block's shared memory, and its bytes are counted on an
// mbarrier there. Its sender need not stay. With `options.lazy_copies` a message lands when nothing else can run in the block that
// it goes to, else when that block runs next; until it lands, its destination is garbage in the former case.
#include "runtime.h"

namespace emu {

Mbarrier* barrier_of(const char* what, unsigned rank, unsigned long long* address) {
  if (rank == cluster_rank()) return find_mbarrier(address);
  const bool is_static = static_region.contains(address);
  Block& target = block_of(rank);
  char* place = reinterpret_cast<char*>(address);
  if (!is_static) place = shared_memory_of(rank, false) + (place - dynamic_region.low);
  auto found = target.mbarriers.find(reinterpret_cast<unsigned long long*>(place));
  if (found == target.mbarriers.end()) {
    fail("%s: block %u of the cluster has no mbarrier there; it calls ac::mbarrier_init first", what, rank);
    return nullptr;
  }
  if (!target.barriers_published || self()->cluster_seen <= target.published_after)
    fail("%s: no cluster barrier lies between ac::mbarrier_init_fence() in block %u and this", what, rank);
  return found->second.get();
}

void send_to_cluster(float* shared, unsigned rank, float2 value, unsigned long long* address) {
  RuntimeScope scope;
  RemoteStore message = remote_store("send_to_cluster", shared, sizeof value, rank);
  message.values[0] = value.x;
  message.values[1] = value.y;
  if (reinterpret_cast<uintptr_t>(shared) % sizeof value) return fail("send_to_cluster: the address must be aligned to 8 bytes");
  Mbarrier* barrier = barrier_of("send_to_cluster", rank, address);
  const bool active = rank == cluster_rank();
  check_remote_store(active, block_of(rank).linear, message, barrier, self(), __builtin_return_address(0));
  barrier->message_phase = barrier->phase + 1;
  barrier->messages.push_back(message);
  if (active && !options.lazy_copies) return land_message(*barrier, barrier->messages.size() - 1);
  if (!options.lazy_copies) return;
  std::memset(message.values, poison, sizeof message.values);
  perform(message);
}

// Counts when the other block runs next; what this thread knows goes with it.
void arrive_in_cluster(unsigned long long* address, unsigned rank) {
  RuntimeScope scope;
  if (rank == cluster_rank()) return arrive(find_mbarrier(address), 0);
  remote_store("arrive_in_cluster", reinterpret_cast<float*>(address), 8, rank);
  RemoteArrival arrival{cluster_rank(), {}};
  release_to(arrival.clock, self());
  barrier_of("arrive_in_cluster", rank, address)->arrivals.push_back(std::move(arrival));
}

void land_message(Mbarrier& barrier, size_t which) {
  const RemoteStore message = barrier.messages[which];
  barrier.messages.erase(barrier.messages.begin() + long(which));
  perform(message);
  barrier.pending_bytes -= message.bytes;
  complete_phase_if_done(barrier);
}

void land_all_messages() {
  for (auto& [address, barrier] : block.mbarriers)
    while (!barrier->messages.empty()) land_message(*barrier, 0);
}

bool message_in_flight() {
  for (unsigned rank = 0; rank < cluster_size(); ++rank) {
    const Block& target = block_of(rank);
    bool alive = false, waits = false;
    for (const Thread& thread : target.threads) alive |= thread.state != State::done;
    for (const auto& [address, barrier] : target.mbarriers)
      waits |= !barrier->messages.empty() || !barrier->in_flight.empty() || !barrier->arrivals.empty();
    if (alive && waits) return true;
  }
  return false;
}

}  // namespace emu
