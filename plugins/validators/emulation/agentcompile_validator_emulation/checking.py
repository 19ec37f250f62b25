"""Runs all launches of a StepSource on given tensors with every check on."""

import ctypes
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from agentcompile_core.plugin_api import Access as Touch
from agentcompile_core.plugin_api import ArgumentKind, KernelArgument, Launch, Role, StepSource, UsageError

from .backend import build_source, check_emulated
from .engine import Mode
from .module import Access, Argument, Buffer, EmulatedModule, EmulationError, LaunchOptions
from .tiles import tiles_of
from .toolchain import GXX

if TYPE_CHECKING:
    import torch

_BYTE_OF = re.compile(r"(?:at byte (?P<byte>\d+) of |(?P<outside>\d+) bytes (?P<side>before|past the end of) )?argument '(?P<name>\w+)'"
                      r"(?: at byte (?P<behind>\d+))?")
POSITION = "position"  # the operand of every kind that other kernels may read as a hint, before their dependency wait
_CONSTANT_ROLES = (Role.WEIGHT, Role.CONSTANT)
_ACCESS = {Touch.READ: Access.READ, Touch.WRITE: Access.WRITE, Touch.READ_WRITE: Access.READ_WRITE}


@lru_cache(maxsize=64)
def checked_module(source: StepSource, cache_folder: Path | None = None, compiler: str = GXX) -> EmulatedModule:
    """The instrumented build of ``source``. Raises BuildError."""
    check_emulated(source)
    return EmulatedModule(build_source(source, Mode.CHECKED, cache_folder, compiler=compiler), checked=True)


def run_checked(source: StepSource, tensors: "Mapping[str, torch.Tensor]", options: LaunchOptions | None = None,
                cache_folder: Path | None = None, compiler: str = GXX) -> None:
    """Run ``source`` once in checked mode; outputs and states are written in place.

    Args:
        source: its launches run in order, each under the dependency rules if it declares ``pdl``.
        tensors: contiguous CPU tensors by operand name; workspaces are made here.
        options: thread order and copies; ``programmatic_launch`` is taken from each launch.
        compiler: the g++ that builds it.

    Raises:
        EmulationError: a race, an access out of bounds or without the right, a barrier or dependency error, a hang.
        BuildError: the source does not compile or needs what the emulator lacks.
        UsageError: a tensor is missing or cannot be used.
    """
    import torch

    module = checked_module(source, cache_folder, compiler)
    fills = {w.name: 0 if w.zeroed else 0xFF for w in source.workspaces}
    workspaces = {w.name: torch.full((w.nbytes,), fills[w.name], dtype=torch.uint8) for w in source.workspaces}
    written = {w.name for w in source.workspaces if w.zeroed}
    for launch in source.launches:
        arguments = [_argument(argument, {**tensors, **workspaces}, written) for argument in launch.arguments]
        sizes = {a.name: a.nbytes for a in arguments if isinstance(a, Buffer)}
        chosen = attrs.evolve(options or LaunchOptions(lazy_copies=True), programmatic_launch=launch.pdl)
        try:
            module.launch(launch.entry, launch.grid, launch.block, arguments, launch.shared_bytes, chosen, launch.cluster)
        except EmulationError as exc:
            raise EmulationError(f"kernel {launch.entry}, {located(str(exc), launch, sizes)}") from exc
        written |= _written_by(launch)


def located(message: str, launch: Launch, nbytes: Mapping[str, int]) -> str:
    """The emulator's message with the index of the element, where it counts bytes of an argument of ``nbytes``."""
    at = next((found for found in _BYTE_OF.finditer(message) if found["byte"] or found["outside"] or found["behind"]), None)
    if at is None:
        return message
    name = at["name"]
    size = next((a.dtype.bytes for a in launch.arguments if a.name == name and a.dtype is not None), 0)
    if not size:
        return message
    count = int(at["byte"] or at["behind"] or at["outside"])
    byte = count if at["side"] is None else -count if at["side"] == "before" else nbytes[name] + count
    return f"{message[:at.end()]} (element {byte // size}){message[at.end():]}"


def _written_by(launch: Launch) -> set[str]:
    return {a.operand for a in launch.arguments if a.operand and (a.access is not Touch.READ or a.role is Role.WORKSPACE)}


def _argument(argument: KernelArgument, tensors: "Mapping[str, torch.Tensor]", written: set[str]) -> Argument:
    if argument.kind is ArgumentKind.F32:
        return ctypes.c_float(argument.value)
    if not argument.addressed:
        return ctypes.c_int(int(argument.value)) if argument.kind is ArgumentKind.I32 else ctypes.c_longlong(int(argument.value))
    if not argument.operand:
        return Buffer(name=argument.name, address=0, nbytes=0)
    tensor = tensors.get(argument.operand)
    if tensor is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        seen = "missing" if tensor is None else f"on {tensor.device}, strides {tensor.stride()}"
        raise UsageError(f"argument {argument.name} needs a contiguous CPU tensor {argument.operand!r}, which is {seen}")
    access = _ACCESS[argument.access]
    if argument.role is Role.WORKSPACE:
        access = Access.WRITE
    if access is Access.WRITE and argument.operand in written:
        access = Access.READ_WRITE  # an earlier launch, or zeroing, has given it its contents
    buffer = Buffer(name=argument.name, address=tensor.data_ptr(), nbytes=tensor.numel() * tensor.element_size(), access=access,
                    written_by_the_chain=argument.role not in _CONSTANT_ROLES, published=argument.operand == POSITION)
    return buffer if argument.kind is ArgumentKind.POINTER else tiles_of(argument, buffer)
