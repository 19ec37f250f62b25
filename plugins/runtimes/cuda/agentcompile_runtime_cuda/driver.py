"""The few functions of the CUDA driver that launching needs, called through ctypes.

A prepared launch is then one foreign call on structures made once, about a microsecond, and this module can be tested
against any library with these functions. Structures and numbers are those of ``cuda.h``, whose binary interface NVIDIA
keeps; a test compares them with the header.
"""

import ctypes
import functools
from typing import Any

from agentcompile_core.plugin_api import DType, Tiling

MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
PROGRAMMATIC_STREAM_SERIALIZATION = 6
TENSOR_MAP_TYPES = {DType.U8: 0, DType.I32: 3, DType.I64: 5, DType.F16: 6, DType.F32: 7, DType.F64: 8, DType.BF16: 9}  # CUtensorMapDataType
TENSOR_MAP_SWIZZLES = {0: 0, 128: 3}  # bytes: CUtensorMapSwizzle
TENSOR_MAP_L2_PROMOTION_256B = 3
TENSOR_MAP_ALIGNMENT = 64  # bytes

TensorMap = ctypes.c_char * 128  # CUtensorMap


class AttributeValue(ctypes.Union):
    """CUlaunchAttributeValue, the two members used here."""

    _fields_ = (("cluster", ctypes.c_uint * 3), ("programmatic", ctypes.c_int), ("pad", ctypes.c_char * 64))


class Attribute(ctypes.Structure):
    """CUlaunchAttribute; the value starts at byte 8."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", AttributeValue))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint), ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)), ("attribute_count", ctypes.c_uint),
    )


class CudaError(RuntimeError):
    """The driver refused a call, or an earlier kernel failed; a RuntimeError as torch's own.

    The message holds the driver's words ("an illegal memory access was encountered"), ``code`` is the CUresult.
    """

    def __init__(self, doing: str, code: int, name: str, words: str) -> None:
        super().__init__(f"{doing} failed: {words} ({name}, {code})")
        self.code = code
        self.name = name


class Driver:
    """The functions used, of one loaded library."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.launch = library.cuLaunchKernelEx  # (const CUlaunchConfig*, CUfunction, void** arguments, void** extra)
        self.launch.restype = ctypes.c_int
        self._load = library.cuModuleLoadData
        self._load.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
        self._function = library.cuModuleGetFunction
        self._function.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p)
        self._set_attribute = library.cuFuncSetAttribute
        self._set_attribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        self._encode = library.cuTensorMapEncodeTiled
        self._encode.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, *(ctypes.c_void_p,) * 5, *(ctypes.c_int,) * 4)
        self._texts = (library.cuGetErrorName, library.cuGetErrorString)
        for function in self._texts:
            function.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

    def load_module(self, binary: bytes) -> int:
        """Load a cubin into the current context and return its CUmodule."""
        module = ctypes.c_void_p()
        self.check("loading a kernel binary", self._load(ctypes.byref(module), ctypes.c_char_p(binary)))
        return module.value or 0

    def function(self, module: int, entry: str) -> int:
        """The CUfunction of an entry."""
        function = ctypes.c_void_p()
        self.check(f"looking up kernel {entry}", self._function(ctypes.byref(function), module, entry.encode()))
        return function.value or 0

    def read_symbol(self, module: int, name: str) -> bytes:
        """What a module's variable holds, when everything before has run."""
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        find, copy = self._library.cuModuleGetGlobal_v2, self._library.cuMemcpyDtoH_v2
        find.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p, ctypes.c_char_p)
        copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self.check(f"looking up {name}", find(ctypes.byref(address), ctypes.byref(size), module, name.encode()))
        found = ctypes.create_string_buffer(size.value)
        self.check(f"reading {name}", copy(found, address, size))
        return found.raw

    def set_attribute(self, function: int, attribute: int, value: int) -> None:
        """Set an attribute of a function."""
        self.check("setting a kernel attribute", self._set_attribute(function, attribute, value))

    def tensor_map(self, address: int, dtype: DType, tiling: Tiling) -> Any:
        """The CUtensorMap (an aligned ``TensorMap``) of a view of the operand at ``address``, of elements of ``dtype``."""
        room = (ctypes.c_char * (ctypes.sizeof(TensorMap) + TENSOR_MAP_ALIGNMENT))()
        made = TensorMap.from_buffer(room, -ctypes.addressof(room) % TENSOR_MAP_ALIGNMENT)
        axes, nbytes = len(tiling.extents), dtype.bytes
        strides = (ctypes.c_uint64 * axes)(*(step * nbytes for step in tiling.steps[1:]))
        self.check("encoding a tensor map", self._encode(
            ctypes.addressof(made), TENSOR_MAP_TYPES[dtype], axes, address + tiling.offset * nbytes,
            (ctypes.c_uint64 * axes)(*tiling.extents), strides, (ctypes.c_uint32 * axes)(*tiling.tile),
            (ctypes.c_uint32 * axes)(*(1,) * axes), 0, TENSOR_MAP_SWIZZLES[tiling.swizzle], TENSOR_MAP_L2_PROMOTION_256B, 0))
        return made

    def check(self, doing: str, code: int) -> None:
        """Raise CudaError if ``code`` is not success."""
        if code:
            name, words = (self._text(function, code) for function in self._texts)
            raise CudaError(doing, code, name, words)

    @staticmethod
    def _text(function: Any, code: int) -> str:
        text = ctypes.c_char_p()
        function(code, ctypes.byref(text))
        return (text.value or b"unknown error").decode()


@functools.cache
def driver() -> Driver:
    """The driver of this machine.

    Raises:
        OSError: there is none.
    """
    return Driver(ctypes.CDLL("libcuda.so.1"))
