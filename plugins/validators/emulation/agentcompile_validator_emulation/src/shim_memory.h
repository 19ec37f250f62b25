// Cache-hinted loads and stores, fences and atomics. Threads are switched only inside runtime calls, so an atomic is a plain
// read and write; it is kept out of the access checks and reported to them as one atomic operation instead.
#pragma once

template <class T> EMU_INLINE T __ldg(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldca(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldcg(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldcs(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldcv(const T* p) { return ::emu::load_relaxed(p); }
template <class T> EMU_INLINE void __stcg(T* p, T value) { *p = value; }
template <class T> EMU_INLINE void __stcs(T* p, T value) { *p = value; }
template <class T> EMU_INLINE void __stwt(T* p, T value) { *p = value; }

EMU_INLINE void __threadfence() { ::emu::device_fence(); }
EMU_INLINE void __threadfence_system() { ::emu::device_fence(); }
EMU_INLINE void __threadfence_block() {}
EMU_INLINE void __nanosleep(unsigned) {}
EMU_INLINE void __trap() { ::emu::trap("__trap() was called"); }
EMU_INLINE size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }

#define EMU_ATOMIC(name, expression)                                                            \
  template <class T>                                                                            \
  EMU_UNCHECKED __attribute__((noinline)) T name(T* address, ::emu::identity_t<T> operand) {   \
    ::emu::note_atomic(address, sizeof(T));                                                     \
    const T old = *address;                                                                     \
    *address = static_cast<T>(expression);                                                      \
    return old;                                                                                 \
  }
EMU_ATOMIC(atomicAdd, old + operand)
EMU_ATOMIC(atomicSub, old - operand)
EMU_ATOMIC(atomicMax, old > operand ? old : operand)
EMU_ATOMIC(atomicMin, old < operand ? old : operand)
EMU_ATOMIC(atomicExch, operand)
EMU_ATOMIC(atomicAnd, old & operand)
EMU_ATOMIC(atomicOr, old | operand)
EMU_ATOMIC(atomicXor, old ^ operand)
EMU_ATOMIC(atomicInc, old >= operand ? T(0) : T(old + 1))
EMU_ATOMIC(atomicDec, (old == T(0) || old > operand) ? operand : T(old - 1))
#undef EMU_ATOMIC

template <class T>
EMU_UNCHECKED __attribute__((noinline)) T atomicCAS(T* address, ::emu::identity_t<T> compare, ::emu::identity_t<T> value) {
  ::emu::note_atomic(address, sizeof(T));
  const T old = *address;
  if (old == compare) *address = value;
  return old;
}
