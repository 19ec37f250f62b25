"""For the tests of template families: runs a source on the CPU as unchanged CUDA text, checked for races, bounds and early reads."""

import ctypes
import os
import random
from collections.abc import Iterable, Sequence
from functools import lru_cache

import attrs
import torch

from agentcompile_core.plugin_api import (
    Access,
    ArgumentKind,
    DType,
    KernelArgument,
    Launch,
    Match,
    Operand,
    Role,
    StepSource,
    Target,
    TensorSpec,
    check_source,
)

from .checking import run_checked
from .engine import Mode, build
from .module import Access as BufferAccess
from .module import Argument, Buffer, EmulatedModule, LaunchOptions
from .tiles import tiles_of

TORCH = {DType.F16: torch.float16, DType.BF16: torch.bfloat16, DType.F32: torch.float32, DType.I64: torch.int64}
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-149}
SCALARS = {ArgumentKind.I32: ctypes.c_int, ArgumentKind.I64: ctypes.c_longlong, ArgumentKind.F32: ctypes.c_float}


def operand(name: str, role: Role, shape: tuple[int, ...], dtype: DType, access: Access = Access.READ) -> Operand:
    """An operand as the core's rules make them."""
    return Operand(name=name, role=role, access=access, values=(name,), spec=TensorSpec(shape=shape, dtype=dtype))


def aligned(values: torch.Tensor, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """A copy of ``values`` whose first element lies ``offset`` elements behind a multiple of 16 bytes."""
    storage = torch.zeros(values.numel() + offset + 16, dtype=dtype)
    start = offset + (-storage.data_ptr() % 16) // storage.element_size()
    return storage[start:start + values.numel()].view(values.shape).copy_(values)


@lru_cache(maxsize=64)
def _module(code: str, headers: tuple[tuple[str, str], ...], entries: tuple[str, ...]) -> EmulatedModule:
    return EmulatedModule(build(code, dict(headers), entries, Mode.CHECKED), checked=True)


class Emulated:
    """One source with its workspaces, which live from run to run as they do in a session."""

    def __init__(self, source: StepSource, match: Match, target: Target) -> None:
        check_source(match, source, target)
        self.source = source
        self.module = _module(source.code, source.headers, tuple(launch.entry for launch in source.launches))
        self.zeroed = {w.name for w in source.workspaces if w.zeroed}
        self.workspaces = {w.name: torch.full((w.nbytes,), 0 if w.zeroed else 255, dtype=torch.uint8) for w in source.workspaces}

    def run(self, tensors: dict[str, torch.Tensor], options: LaunchOptions | None = None) -> None:
        """Run every launch on ``tensors`` in place. Raises EmulationError for anything a GPU might not forgive."""
        written: set[str] = set()
        for launch in self.source.launches:
            arguments = [self._argument(argument, tensors, written) for argument in launch.arguments]
            how = attrs.evolve(options or LaunchOptions(), programmatic_launch=launch.pdl)
            self.module.launch(launch.entry, launch.grid, launch.block, arguments, launch.shared_bytes, how, launch.cluster)
            written.update(a.operand for a in launch.arguments if a.operand and a.access is not Access.READ)

    def clean(self) -> bool:
        """Whether the zeroed workspaces are zero again."""
        return all(bool((self.workspaces[name] == 0).all()) for name in self.zeroed)

    def _argument(self, argument: KernelArgument, tensors: dict[str, torch.Tensor], written: set[str]
                  ) -> Argument:
        if not argument.addressed:
            return SCALARS[argument.kind](argument.value)
        if not argument.operand:
            return Buffer(name=argument.name, address=0, nbytes=0)
        tensor = {**self.workspaces, **tensors}[argument.operand]
        if argument.role is Role.WORKSPACE:  # a fresh workspace must be written before it is read
            access = BufferAccess.READ_WRITE if argument.operand in self.zeroed | written else BufferAccess.WRITE
        else:
            access = {Access.READ: BufferAccess.READ, Access.WRITE: BufferAccess.WRITE}.get(argument.access, BufferAccess.READ_WRITE)
        buffer = Buffer(name=argument.name, address=tensor.data_ptr(), nbytes=tensor.numel() * tensor.element_size(), access=access,
                        written_by_the_chain=argument.role not in (Role.WEIGHT, Role.CONSTANT))
        return buffer if argument.kind is ArgumentKind.POINTER else tiles_of(argument, buffer)


def run_several(several: StepSource, kernels: Sequence[Emulated], tensors: Sequence[dict[str, torch.Tensor]],
                options: LaunchOptions | None = None) -> None:
    """Run ``several``, made by ``several_runs`` of the source of ``kernels``, with one run for each of them, on its own tensors in place.

    Raises:
        EmulationError: for anything a GPU might not forgive.
    """
    module, written = _module(several.code, several.headers, tuple(launch.entry for launch in several.launches)), set[str]()
    for launch, of_one in zip(several.launches, kernels[0].source.launches, strict=True):
        buffers = [[kernel._argument(argument, given, written) for argument in of_one.arguments if argument.addressed]
                   for kernel, given in zip(kernels, tensors, strict=True)]
        addresses = torch.tensor([[one.address for one in of_run if isinstance(one, Buffer)] for of_run in buffers])
        table = Buffer(name=launch.arguments[0].name, address=addresses.data_ptr(), nbytes=addresses.nbytes, access=BufferAccess.READ,
                       written_by_the_chain=False)
        scalars = [SCALARS[argument.kind](argument.value) for argument in launch.arguments[1:]]
        known = {one.address: one for of_run in buffers for one in of_run if isinstance(one, Buffer)}  # what is behind the addresses
        width, height, depth = launch.grid
        module.launch(launch.entry, (width, height, depth * len(kernels)), launch.block, [table, *scalars, *known.values()],
                      launch.shared_bytes, attrs.evolve(options or LaunchOptions(), programmatic_launch=launch.pdl), launch.cluster)
        written.update(a.operand for a in of_one.arguments if a.operand and a.access is not Access.READ)


def run_called(source: StepSource, call: tuple[Launch, tuple[int | float, ...]], blocks: int, tensors: dict[str, torch.Tensor],
               options: LaunchOptions) -> None:
    """Run one launch of a source with the values of its last arguments, as the runtime calls kernels of its own: ``call`` is both.

    ``tensors``: flat, by operand.

    Raises:
        EmulationError: for anything a GPU might not forgive.
    """
    launch, values = call
    first = len(launch.arguments) - len(values)
    valued = (attrs.evolve(argument, value=value) for argument, value in zip(launch.arguments[first:], values, strict=True))
    launch = attrs.evolve(launch, grid=(blocks, 1, 1), arguments=(*launch.arguments[:first], *valued))
    run_checked(attrs.evolve(source, launches=(launch,)), tensors, options)


def some(wrong: Iterable[str]) -> list[str]:
    """A quarter of the names of wrong kernels, drawn by a seed, since each is a build of seconds; all where the variable EVERY_WRONG_KERNEL
    is set."""
    names = sorted(wrong)
    return names if os.environ.get("EVERY_WRONG_KERNEL") else sorted(random.Random(1).sample(names, -(-len(names) // 4)))
