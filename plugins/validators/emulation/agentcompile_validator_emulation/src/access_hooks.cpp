// The functions that g++ -fsanitize=thread,bounds calls at every load and store of kernel code and at an index beyond its array.
// The sanitizers' own libraries are not linked: these are the only definitions.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

using emu::Access;

static inline void on_access(const void* address, size_t bytes, Access access, bool aligned, const void* code) {
  emu::RuntimeScope scope;
  emu::check_access(address, bytes, {access, false, aligned && bytes > 1}, code);
}

extern "C" {
#define EMU_HOOKS(bytes)                                                                                                       \
  void __tsan_read##bytes(void* p) { on_access(p, bytes, Access::read, true, __builtin_return_address(0)); }                   \
  void __tsan_write##bytes(void* p) { on_access(p, bytes, Access::write, true, __builtin_return_address(0)); }                 \
  void __tsan_unaligned_read##bytes(void* p) { on_access(p, bytes, Access::read, false, __builtin_return_address(0)); }        \
  void __tsan_unaligned_write##bytes(void* p) { on_access(p, bytes, Access::write, false, __builtin_return_address(0)); }
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
#undef EMU_HOOKS
void __tsan_read_range(void* p, long bytes) {
  if (bytes > 0) on_access(p, size_t(bytes), Access::read, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, long bytes) {
  if (bytes > 0) on_access(p, size_t(bytes), Access::write, false, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

#ifndef __SANITIZE_ADDRESS__  // whose own library says it there
// What g++ says of an index: the line, the array's type, the index's type.
struct BoundsType {
  uint16_t kind, info;
  char name[1];
};
struct BoundsData {
  const char* file;
  uint32_t line, column;
  const BoundsType *array, *index;
};
void __ubsan_handle_out_of_bounds_abort(BoundsData* data, uintptr_t index) {
  emu::RuntimeScope scope;
  const char* slash = data->file ? strrchr(data->file, '/') : nullptr;
  emu::fail("out of bounds: index %ld of an array %s (%s:%u)", long(int32_t(index)), data->array->name,
            slash ? slash + 1 : data->file ? data->file : "?", data->line);
  abort();
}
#endif
}
