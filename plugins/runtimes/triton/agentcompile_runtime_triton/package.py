"""Whether Triton is here and has something to run on, and the element types that the kernels take."""

import functools
import importlib.util
import os

from agentcompile_core.plugin_api import KERNEL_TYPES, DType, Operand

PACKAGE = "triton"
ABSENT = "the package triton is not installed; install it (torch's wheels for CUDA bring it along)"


@functools.cache
def is_installed() -> bool:
    """Whether the package can be imported, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None


@functools.cache
def has_device() -> bool:
    """Whether kernels can run: on a GPU that torch sees, or on the host by Triton's interpreter, which is asked for by a variable."""
    import torch

    return torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"


def absent() -> str:
    """Why no kernel can be bound here; empty where one can."""
    if not is_installed():
        return ABSENT
    return "" if has_device() else "Triton compiles for a GPU, and torch sees none here"


def unserved(*operands: Operand | None, also: tuple[DType, ...] = ()) -> str:
    """Why the types of operands are not served: one of float16, bfloat16 and float32 for all, or one of ``also``; empty if they are."""
    found = {operand.name: operand.spec.dtype for operand in operands if operand is not None}
    if set(found.values()) <= set(KERNEL_TYPES) and len(set(found.values()) - set(also)) <= 1:
        return ""
    named = ", ".join(f"{name} in {dtype.value}" for name, dtype in found.items())
    return f"{named}; the kernel takes one of {', '.join(dtype.value for dtype in KERNEL_TYPES)}"


def warps_for(elements: int, each: int) -> int:
    """A power of two of warps from 1 to 16 whose threads have about ``each`` of so many elements."""
    return 1 << max(0, min(4, (elements // (32 * each)).bit_length() - 1))
