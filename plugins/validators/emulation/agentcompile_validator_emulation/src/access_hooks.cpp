// The functions that g++ -fsanitize=thread,bounds,alignment calls at every load and store of kernel code, at an index beyond its array
// and at a type that needs another address than it has.
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
// What g++ says of a type, of an index (the line, the array's type, the index's type) and of an address (the line, the type).
struct Type {
  uint16_t kind, info;
  char name[1];
};
struct Line {
  const char* file;
  uint32_t line, column;

  const char* name() const {
    const char* slash = file ? strrchr(file, '/') : nullptr;
    return slash ? slash + 1 : file ? file : "?";
  }
};
struct BoundsData {
  Line at;
  const Type *array, *index;
};
struct AddressData {
  Line at;
  const Type* type;
  unsigned char log_alignment, use;
};
void __ubsan_handle_out_of_bounds_abort(BoundsData* data, uintptr_t index) {
  emu::RuntimeScope scope;
  emu::fail("out of bounds: index %ld of an array %s (%s:%u)", long(int32_t(index)), data->array->name, data->at.name(), data->at.line);
  abort();
}
// The loads and stores of a vector may be those of its elements once g++ has seen that nothing else is asked of it.
void __ubsan_handle_type_mismatch_v1_abort(AddressData* data, uintptr_t) {
  emu::RuntimeScope scope;
  emu::fail("misaligned %d-byte access to %s (%s:%u)", 1 << data->log_alignment, data->type->name, data->at.name(), data->at.line);
  abort();
}
#endif
}
