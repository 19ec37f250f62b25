// A libcuda that launches nothing: it checks the binary interface against cuda.h and writes down what it was given.
#include <cuda.h>

#include <cstring>

struct Seen {
  unsigned grid[3], block[3], shared_bytes, attribute_count, attribute_ids[4], cluster[3];
  int programmatic, attribute, attribute_value, launches, loads;
  unsigned long long stream, function, pointer;
  int i32;
  long long i64;
  float f32;
  unsigned long long tiles[16];
};

static Seen seen;
static int next_error;
static bool encoded;  // the next launch has a fifth argument: the tensor map that was made last

extern "C" {
Seen* seen_by_fake() { return &seen; }
void fail_next_launch(int code) { next_error = code; }

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  if (std::memcmp(image, "\x7f" "ELF", 4) != 0) return CUDA_ERROR_INVALID_IMAGE;
  ++seen.loads;
  *module = reinterpret_cast<CUmodule>(0x1000);
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  if (reinterpret_cast<unsigned long long>(module) != 0x1000 || std::strcmp(name, "entry") != 0) return CUDA_ERROR_NOT_FOUND;
  *function = reinterpret_cast<CUfunction>(0xFFFF800000002000ull);
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  seen.attribute = attribute;
  seen.attribute_value = value;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_NOT_FOUND ? "CUDA_ERROR_NOT_FOUND"
          : error == CUDA_ERROR_INVALID_IMAGE ? "CUDA_ERROR_INVALID_IMAGE" : "CUDA_ERROR_ILLEGAL_ADDRESS";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  if (error != CUDA_ERROR_ILLEGAL_ADDRESS) return CUDA_ERROR_INVALID_VALUE;  // as a driver does for a code it does not know
  *text = "an illegal memory access was encountered";
  return CUDA_SUCCESS;
}
// Writes down what it was given, so that who reads the map that a launch got knows.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* extents,
                                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if (reinterpret_cast<unsigned long long>(map) % 64 || reinterpret_cast<unsigned long long>(address) % 16) return CUDA_ERROR_INVALID_VALUE;
  static_assert(sizeof(CUtensorMap) == sizeof seen.tiles, "as driver.py has it");
  std::memset(map, 0, sizeof *map);
  map->opaque[0] = reinterpret_cast<unsigned long long>(address);
  map->opaque[1] = (type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) | rank << 1 | (swizzle == CU_TENSOR_MAP_SWIZZLE_128B) << 4 |
                   (interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) << 5 |
                   (promotion == CU_TENSOR_MAP_L2_PROMOTION_L2_256B) << 6;
  for (unsigned i = 0; i < rank && i < 4; ++i) {
    map->opaque[2 + i] = extents[i];
    if (i + 1 < rank) map->opaque[6 + i] = strides[i];
    map->opaque[10 + i] = box[i] + 1000ull * steps[i];
  }
  encoded = true;
  return CUDA_SUCCESS;
}
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice*, int) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(0x3000);
  return CUDA_SUCCESS;
}
// The arguments are always: a pointer, an int, a long long, a float; and the tensor map that was made since the last launch.
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void** extra) {
  if (extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (next_error) {
    const int code = next_error;
    next_error = 0;
    return static_cast<CUresult>(code);
  }
  const unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  const unsigned block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
  std::memcpy(seen.grid, grid, sizeof grid);
  std::memcpy(seen.block, block, sizeof block);
  seen.shared_bytes = config->sharedMemBytes;
  seen.stream = reinterpret_cast<unsigned long long>(config->hStream);
  seen.function = reinterpret_cast<unsigned long long>(function);
  seen.attribute_count = config->numAttrs;
  seen.programmatic = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& attribute = config->attrs[i];
    seen.attribute_ids[i] = attribute.id;
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      const unsigned cluster[3] = {attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z};
      std::memcpy(seen.cluster, cluster, sizeof cluster);
    } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      seen.programmatic = attribute.value.programmaticStreamSerializationAllowed;
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  seen.pointer = *static_cast<unsigned long long*>(arguments[0]);
  seen.i32 = *static_cast<int*>(arguments[1]);
  seen.i64 = *static_cast<long long*>(arguments[2]);
  seen.f32 = *static_cast<float*>(arguments[3]);
  if (encoded) std::memcpy(seen.tiles, arguments[4], sizeof seen.tiles);
  encoded = false;
  ++seen.launches;
  return CUDA_SUCCESS;
}
}
