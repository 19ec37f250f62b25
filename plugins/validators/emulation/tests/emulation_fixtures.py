"""Builds and launches the kernels of ``kernels/`` for the tests."""

import ctypes
import functools
import re
from pathlib import Path

import numpy as np
from agentcompile_validator_emulation.engine import Mode, build
from agentcompile_validator_emulation.module import Access, Buffer, EmulatedModule, LaunchOptions, Scalar

KERNELS = Path(__file__).parent / "kernels"


def entries_of(code: str) -> list[str]:
    """Names of the extern "C" kernels in the text, also of those made by the X_KERNEL(name, ...) macros."""
    named = re.findall(r'^extern "C" __global__ void (\w+)\(', code, flags=re.MULTILINE)
    made = re.findall(r"^[A-Z]+_KERNEL\((\w+),", code, flags=re.MULTILINE)
    return sorted({*named, *made})


@functools.cache
def module(file: str, mode: Mode) -> EmulatedModule:
    """The module of ``kernels/<file>``, built once per test session."""
    code = (KERNELS / file).read_text(encoding="utf-8")
    return EmulatedModule(build(code, {}, entries_of(code), mode), checked=mode is Mode.CHECKED)


def buffer(name: str, array: np.ndarray, access: Access = Access.READ, *, constant: bool = False) -> Buffer:
    """An argument over a numpy array; ``constant``: no earlier kernel writes it."""
    return Buffer(name=name, address=array.ctypes.data, nbytes=array.nbytes, access=access, written_by_the_chain=not constant)


def launch(loaded: EmulatedModule, entry: str, arguments: list[Buffer | Scalar], *, grid: int = 1, block: int = 64,
           dynamic_shared_bytes: int = 0, options: LaunchOptions | None = None) -> None:
    """Run one launch of one-dimensional shape."""
    loaded.launch(entry, (grid,), (block,), arguments, dynamic_shared_bytes, options or LaunchOptions())


def integer(value: int) -> ctypes.c_int:
    """An int argument."""
    return ctypes.c_int(value)
