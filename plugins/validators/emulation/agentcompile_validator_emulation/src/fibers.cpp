// Fibers and the order in which threads run. A thread takes a fiber (a stack) only when it starts; a fiber whose thread ends
// goes on with the next unstarted thread, so a block without barriers costs one function call per thread. A thread that waits
// switches straight to the next runnable one; the scheduler is entered only when none is left.
#include <pthread.h>
#include <ucontext.h>

#include <algorithm>

#include "runtime.h"

namespace emu {

ThreadCoordinates* current = nullptr;

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack_low = nullptr;
  ucontext_t context;  // only where there is no assembly switch
  void* sanitizer_stack = nullptr;
};

// The caller gives one piece of memory for all stacks, shared by the modules of the process: a mapping for each fiber of
// each module would run into the kernel's limit on mappings. There are no guard pages between the stacks.
static char* stack_memory;
static size_t stack_bytes;
static Fiber scheduler_fiber;
static std::vector<Fiber*> all_fibers, free_fibers;
static KernelTrampoline running_kernel;
static void** kernel_arguments;

#if defined(__x86_64__)
extern "C" __attribute__((visibility("hidden"))) void emu_switch_stack(void** save, void* load);
asm(R"(
.text
.globl emu_switch_stack
.hidden emu_switch_stack
.type emu_switch_stack,@function
emu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#endif

#if EMU_ADDRESS_SANITIZER
static void* scheduler_stack;  // the sanitizer wants to know every stack that is switched to
static size_t scheduler_stack_bytes;
static void find_scheduler_stack() {
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &scheduler_stack, &scheduler_stack_bytes);
  pthread_attr_destroy(&attributes);
}
#else
static void find_scheduler_stack() {}
#endif

static EMU_RAW void switch_fiber(Fiber* from, Fiber* to) {
#if EMU_ADDRESS_SANITIZER
  if (to == &scheduler_fiber)
    __sanitizer_start_switch_fiber(&from->sanitizer_stack, scheduler_stack, scheduler_stack_bytes);
  else
    __sanitizer_start_switch_fiber(&from->sanitizer_stack, to->stack_low, stack_bytes);
#endif
#if defined(__x86_64__)
  emu_switch_stack(&from->stack_pointer, to->stack_pointer);
#else
  swapcontext(&from->context, &to->context);
#endif
#if EMU_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(from->sanitizer_stack, nullptr, nullptr);
#endif
}

// --- run order -----------------------------------------------------------------------------------------------------
static struct {
  unsigned warps[max_threads / warp_lanes];
  unsigned position;
  unsigned lanes;  // of the warp at `position`: still to run in this pass
} pass;

static void start_pass() {
  const unsigned count = block.warp_count;
  for (unsigned i = 0; i < count; ++i) pass.warps[i] = options.order == LaneOrder::descending ? count - 1 - i : i;
  if (options.order == LaneOrder::random) std::shuffle(pass.warps, pass.warps + count, random_source);
  pass.position = 0;
  pass.lanes = block.warps[pass.warps[0]].runnable;
}
void reset_run_order() { start_pass(); }

static unsigned pick_lane(unsigned lanes) {
  if (options.order == LaneOrder::ascending) return unsigned(__builtin_ctz(lanes));
  if (options.order == LaneOrder::descending) return 31 - unsigned(__builtin_clz(lanes));
  for (unsigned skip = unsigned(random_source() % unsigned(__builtin_popcount(lanes))); skip > 0; --skip) lanes &= lanes - 1;
  return unsigned(__builtin_ctz(lanes));
}

static Thread* next_runnable() {
  bool wrapped = false;
  for (;;) {
    Warp& warp = block.warps[pass.warps[pass.position]];
    if (unsigned lanes = pass.lanes & warp.runnable) {
      const unsigned lane = pick_lane(lanes);
      pass.lanes = lanes & ~(1u << lane);
      return &block.threads[pass.warps[pass.position] * warp_lanes + lane];
    }
    if (options.warp_skewed && warp.runnable) {
      pass.lanes = warp.runnable;
      continue;
    }
    if (++pass.position < block.warp_count) {
      pass.lanes = block.warps[pass.warps[pass.position]].runnable;
      continue;
    }
    if (wrapped) return nullptr;
    wrapped = true;
    start_pass();
  }
}

// --- running threads -----------------------------------------------------------------------------------------------
static void finish_thread(Thread* thread) {
  Warp& warp = warp_of(thread);
  thread->state = State::done;
  warp.alive &= ~(1u << thread->lane);
  warp.runnable &= ~(1u << thread->lane);
  if (options.programmatic_launch && !thread->dependency_waited)
    fail("the thread exits without ac::grid_dependency_wait(), though the kernel is launched with programmatic dependency");
  if (copies_on_their_way(thread)) fail("the thread exits while a copy of its cp.async into shared memory is in flight");
  check_no_product_in_flight(thread);
  for (const Warp::Group& group : warp.groups)
    if (group.mask & (1u << thread->lane))
      fail("the thread exits while other lanes wait for it in a warp %s with mask 0x%08x", name_of(group.kind), group.mask);
}

static void fiber_main(Fiber* fiber);
static EMU_RAW void fiber_entry() {
#if EMU_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  fiber_main(self()->fiber);
}

static Fiber* take_fiber() {
  if (free_fibers.empty()) {
    Fiber* fiber = new Fiber();
    fiber->stack_low = stack_memory + all_fibers.size() * stack_bytes;
    all_fibers.push_back(fiber);
    free_fibers.push_back(fiber);
  }
  Fiber* fiber = free_fibers.back();
  free_fibers.pop_back();
#if EMU_ADDRESS_SANITIZER
  __asan_unpoison_memory_region(fiber->stack_low, stack_bytes);
#endif
#if defined(__x86_64__)
  // Stacks start at different offsets within a page, else the tops of all of them would share a few cache sets.
  const size_t stagger = (all_fibers.size() - free_fibers.size()) % 61 * 64;
  void** top = reinterpret_cast<void**>((uintptr_t(fiber->stack_low) + stack_bytes - stagger) & ~uintptr_t(15));
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&fiber_entry);
  for (int callee_saved = 0; callee_saved < 6; ++callee_saved) *--top = nullptr;
  fiber->stack_pointer = top;
#else
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack_low;
  fiber->context.uc_stack.ss_size = stack_bytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, &fiber_entry, 0);
#endif
  return fiber;
}

// Leaves `from` for the thread `next` (or the scheduler if there is none).
static void switch_to(Fiber* from, Thread* next) {
  current = next;
  if (!next) {
    switch_fiber(from, &scheduler_fiber);
    return;
  }
  if (!next->fiber) {
    next->fiber = take_fiber();
    next->state = State::ready;
  }
  if (next->fiber != from) switch_fiber(from, next->fiber);
}

static void fiber_main(Fiber* fiber) {
  for (;;) {
    Thread* thread = self();
    in_runtime = false;
    running_kernel(kernel_arguments);
    in_runtime = true;
    finish_thread(thread);
    Thread* next = failed ? nullptr : next_runnable();
    if (next && next->state == State::unstarted) {
      next->fiber = fiber;
      next->state = State::ready;
      current = next;
      continue;
    }
    free_fibers.push_back(fiber);  // taken again only after this fiber is left for good
    switch_to(fiber, next);
    abort();
  }
}

void suspend() {
  Thread* thread = self();
  switch_to(thread->fiber, failed ? nullptr : next_runnable());
}

void abandon_thread() {
  switch_to(self()->fiber, nullptr);
  abort();
}

void make_ready(Thread* thread) {
  thread->state = State::ready;
  warp_of(thread).runnable |= 1u << thread->lane;
}

void run_until_nothing_is_runnable() {
  if (Thread* next = next_runnable()) switch_to(&scheduler_fiber, next);
}

bool on_stack(const Thread* thread, const void* address) {
  return size_t(static_cast<const char*>(address) - thread->fiber->stack_low) < stack_bytes;
}

void discard_fibers() {
  free_fibers = all_fibers;  // threads of a failed block are never resumed
}

void set_stacks(char* memory, size_t bytes_per_stack) {
  if (memory == stack_memory && bytes_per_stack == stack_bytes) return;
  for (Fiber* fiber : all_fibers) delete fiber;
  all_fibers.clear();
  free_fibers.clear();
  stack_memory = memory;
  stack_bytes = bytes_per_stack;
}

void set_kernel(KernelTrampoline kernel, void** arguments) {
  find_scheduler_stack();
  running_kernel = kernel;
  kernel_arguments = arguments;
}

}  // namespace emu
