"""Products of at most eight rows with a matrix that is read once, and gated ones with two, by the kernels of ``skinny.cu``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentcompile_cuda_kit import c_type, make_source
from attrs import evolve, frozen

from agentcompile_core.plugin_api import Access, Backend, DType, Feature, Launch, Role, StepSource, Target, i32, pointer

from .gates import Gate
from .own_kernels import OwnKernels

if TYPE_CHECKING:
    import torch

TEMPLATE = Path(__file__).with_name("skinny.cu")
FEATURES = (Feature.BULK_COPY, Feature.MBARRIER)
ROWS = 8  # of x, at most
WARP, PADDING = 32, 32  # threads of a warp; elements between two lines of a slot
VECTOR = 8  # elements of 16 bytes, of which lines are whole ones
PLAIN, GATED = "skinny_rows", "skinny_gated"


@frozen(kw_only=True)
class Schedule:
    """Lines of the matrices and terms of a slot, slots, and warps that multiply."""

    lines: int
    terms: int = 1024
    stages: int = 2
    warps: int = 8

    @property
    def threads(self) -> int:
        """The warp that copies among them."""
        return WARP * (self.warps + 1)

    def shared_bytes(self, count: int) -> int:
        """Dynamic shared memory of a launch with ``count`` rows: the ring."""
        return 2 * self.stages * (self.lines + count) * (self.terms + PADDING)

    def fits(self, target: Target) -> bool:
        """Whether a block of ``target`` holds the ring, sums of two groups of lines by each warp, and barriers."""
        sums = 2 * self.warps * ROWS * (self.lines + 4) * 4 + 16 * self.stages
        return self.shared_bytes(ROWS) + sums <= target.shared_bytes_per_block


SHORT, LONG = Schedule(lines=16), Schedule(lines=32)  # for blocks of at most 16 columns, and of more
SMALL = Schedule(lines=16, terms=512)  # for all of them, where there is less shared memory


def source(dtype: DType, schedule: Schedule) -> StepSource:
    """Both kernels for one element type; grid, shared memory and scalars are those of a call."""
    def launch(entry: str, matrices: tuple[str, ...], *more: str) -> Launch:
        given = (pointer("x", Role.INPUT, dtype), *(pointer(name, Role.WEIGHT, dtype) for name in matrices))
        scalars = (i32(name, 0) for name in ("count", "columns", "terms", *more))
        return Launch(entry=entry, grid=(1, 1, 1), block=(schedule.threads, 1, 1), shared_bytes=schedule.shared_bytes(ROWS), pdl=True,
                      arguments=(*given, pointer("out", Role.OUTPUT, dtype, Access.WRITE), *scalars))

    plan = {"T": c_type(dtype), "threads": schedule.threads, "stages": schedule.stages, "lines": schedule.lines, "terms": schedule.terms}
    launches = launch(PLAIN, ("weight", "bias")), launch(GATED, ("gate", "up"), "activation")
    return make_source(TEMPLATE, plan=plan, launches=launches, features=FEATURES)


def called(launch: Launch, schedule: Schedule, x: "torch.Tensor", matrix: "torch.Tensor", *more: int) -> tuple[Launch, tuple[int, ...]]:
    """A launch of ``source`` with the ring of a call, and its scalars: rows, columns, terms, and ``more``."""
    columns, terms = matrix.shape
    count = x.numel() // terms
    return evolve(launch, shared_bytes=schedule.shared_bytes(count)), (count, columns, terms, *more)


class SkinnyProduct:
    """The kernels by element type, which ``backend`` builds for the target that is live on first use."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None]) -> None:
        self._kernels = {one: OwnKernels(backend, target, partial(source, schedule=one)) for one in (SHORT, LONG, SMALL)}

    def start(self, like: "torch.Tensor") -> None:
        """Begin to build the kernels for the element type of ``like``, where they may be asked for."""
        if like.dtype.itemsize == 2:
            for kernels in self._kernels.values():
                kernels.start(like)

    def takes(self, x: "torch.Tensor", *matrices: "torch.Tensor") -> bool:
        """Whether the device has what the kernels need, the tensors are and lie as they read them, and rows are few."""
        if not x.dim() or any(one.dim() != 2 for one in matrices):
            return False
        columns, terms = matrices[0].shape
        if x.shape[-1] != terms or terms % VECTOR or not 0 < x.numel() <= ROWS * terms or not columns:
            return False
        if x.dtype.itemsize != 2 or not x.is_floating_point() or any(one.dtype is not x.dtype for one in matrices):
            return False
        if any(one.shape != matrices[0].shape for one in matrices):
            return False
        if not all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in (x, *matrices)):
            return False
        return self._kernels[SHORT].may_serve(x) and self._schedules(x) is not None

    def plain(self, x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None", out: "torch.Tensor") -> None:
        """Write x weight^T + bias of rows x [.., K], a weight [N, K] and a bias [N] to out [.., N].

        Raises:
            BuildError: the device has no preset, or nothing builds the kernel.
        """
        self._run(PLAIN, (x, weight, bias, out))

    def gated(self, x: "torch.Tensor", gate: "torch.Tensor", up: "torch.Tensor", out: "torch.Tensor", by: Gate) -> None:
        """Write by(x gate^T) * (x up^T) of rows x [.., K] and weights [I, K] to out [.., I].

        Raises:
            BuildError: as ``plain``.
        """
        self._run(GATED, (x, gate, up, out), by.number)

    def _run(self, entry: str, tensors: "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]", *more: int) -> None:
        (x, matrix), lines_each = tensors[:2], 2 if entry == GATED else 1
        target = self._kernels[SHORT].target(x)
        assert target is not None
        blocks, schedules = min(target.sm_count, matrix.shape[0]), self._schedules(x)
        assert schedules is not None
        schedule = schedules[lines_each * matrix.shape[0] > SHORT.lines * blocks]
        kernels = self._kernels[schedule]
        launch = next(one for one in kernels.launches(x) if one.entry.startswith(entry))
        launch, scalars = called(launch, schedule, x, matrix, *more)
        kernels.run(x, launch, blocks, tensors, scalars)

    def _schedules(self, x: "torch.Tensor") -> tuple[Schedule, Schedule] | None:
        """That of blocks of few columns, and of more, on the device of ``x``; None: there is not enough shared memory for either."""
        target = self._kernels[SHORT].target(x)
        if target is None or not SMALL.fits(target):
            return None
        return (SHORT, LONG) if LONG.fits(target) else (SMALL, SMALL)
