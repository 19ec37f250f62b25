"""Attention of prompt chunks over what is cached by the kernel of ``attend.cu``, in one launch over any length."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentcompile_cuda_kit import c_type, make_source
from attrs import evolve, frozen

from agentcompile_core.plugin_api import (
    Access,
    Backend,
    DType,
    Feature,
    Launch,
    Role,
    StepSource,
    Target,
    Tiling,
    f32,
    i32,
    i64,
    pointer,
    tiles,
)

from .own_kernels import OwnKernels

if TYPE_CHECKING:
    import torch

    Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys, values, results

TEMPLATE = Path(__file__).with_name("attend.cu")
FEATURES = (Feature.WGMMA, Feature.BULK_COPY, Feature.MBARRIER)
LOG2_E = 1.4426950408889634
SMALLEST = 1e-30  # scale: times log2(e), scores and their differences, it is a number of fp32
SPAN = 64  # channels that the copy engine fetches side by side
VECTOR = 8  # elements of 16 bytes, of which steps from row to row and from head to head are multiples
TILES = 4  # which of the scalars is the number of tiles
HISTORY, FEW = 1024, 4  # from so many rows before the chunk on flash attention, which splits them, is faster where an SM has 1/FEW tile


@frozen(kw_only=True)
class Shape:
    """How a block works."""

    groups: int  # warpgroups that multiply, 64 rows each
    registers: int  # of a thread that multiplies
    copier_registers: int
    stages: int = 2  # blocks of keys, and of values, that are on their way
    keys: int = 128  # of a block

    @property
    def rows(self) -> int:
        """Of a tile of queries."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Those of the warpgroup that copies among them."""
        return 128 * (self.groups + 1)

    def shared_bytes(self, dim: int) -> int:
        """Of a block: queries, keys and values of two bytes each, and barriers."""
        return 2 * dim * (self.rows + 2 * self.stages * self.keys) + 8 * (2 + 4 * self.stages)


TWO, THREE = Shape(groups=2, registers=240, copier_registers=24), Shape(groups=3, registers=160, copier_registers=32)
SHAPES = {64: ((0, TWO), (4096, THREE)), 128: ((0, TWO),)}  # by the channels of a head: from so many rows on


def shape_of(dim: int, count: int) -> Shape:
    """How the blocks of a chunk of ``count`` rows work."""
    return next(shape for least, shape in reversed(SHAPES[dim]) if count >= least)


def source(dtype: DType, dim: int, shape: Shape) -> StepSource:
    """The kernel for one element type and width of heads; grid, scalars and tilings are those of a call."""
    tensors = (*(pointer(name, Role.INPUT, dtype) for name in "qkv"), pointer("out", Role.OUTPUT, dtype, Access.WRITE))
    scalars = (*(i32(name, 0) for name in ("count", "start", "heads", "share", "tiles")), f32("scale", 0.0),
               i64("out_row", 0), i64("out_head", 0))
    launch = Launch(entry="attend_rows", grid=(1, 1, 1), block=(shape.threads, 1, 1), shared_bytes=shape.shared_bytes(dim),
                    arguments=(*tensors, *scalars))
    plan = {"T": c_type(dtype), "dim": dim, "keys": shape.keys, "stages": shape.stages, "groups": shape.groups, "threads": shape.threads,
            "registers": shape.registers, "copier_registers": shape.copier_registers}
    return make_source(TEMPLATE, plan=plan, launches=(launch,), features=FEATURES)


def called(launch: Launch, operands: "Operands", shape: Shape, scale: float) -> tuple[Launch, tuple[int | float, ...]]:
    """A launch of ``source`` with the tilings of a call, and the scalars of it. ``scalars[TILES]`` is the number of tiles."""
    q, k, v, out = operands
    heads, count = q.shape[1:3]
    boxes = (("q", q, shape.rows), ("k", k, shape.keys), ("v", v, SPAN))
    fetched = (tiles(name, Role.INPUT, DType(str(q.dtype).removeprefix("torch.")), _tiling(tensor, rows)) for name, tensor, rows in boxes)
    number = -(-count // shape.rows) * heads
    scalars = (count, k.shape[2] - count, heads, heads // k.shape[1], number, scale * LOG2_E, out.stride(2), out.stride(1))
    return evolve(launch, arguments=(*fetched, *launch.arguments[len(boxes):])), scalars


def _tiling(tensor: "torch.Tensor", rows: int) -> Tiling:
    """Tiles of 64 channels by ``rows`` rows of one head."""
    _, heads, count, dim = tensor.shape
    row, head = tensor.stride(2), tensor.stride(1)
    return Tiling(extents=(dim, count, heads, 1), steps=(1, row, head, max(row * count, head * heads)), tile=(SPAN, rows, 1, 1),
                  swizzle=SPAN * tensor.element_size())


class OwnAttention:
    """The kernels, which ``backend`` builds for the target that is live on first use."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None]) -> None:
        self._kernels = {(dim, shape): OwnKernels(backend, target, partial(source, dim=dim, shape=shape))
                         for dim, shapes in SHAPES.items() for _, shape in shapes}

    def start(self, like: "torch.Tensor") -> None:
        """Begin to build the kernels for the element type of ``like``, where they may be asked for."""
        if like.dtype.itemsize == 2:
            for (_, shape), kernels in self._kernels.items():
                if shape is TWO:
                    kernels.start(like)

    def takes(self, operands: "Operands", scale: float) -> bool:
        """Whether the device has what the kernel needs, and the tensors are, and lie, as it reads and writes them."""
        q, k, v, out = operands
        if q.shape[3] not in SHAPES or not scale > SMALLEST:
            return False
        if q.dtype.itemsize != 2 or not q.is_floating_point() or len({one.dtype for one in operands}) > 1:
            return False
        if not self._of(q).may_serve(q):
            return False
        if k.shape != v.shape or out.shape != q.shape or q.shape[0] != 1 or k.shape[0] != 1 or k.shape[3] != q.shape[3]:
            return False
        if not q.numel() or not k.numel() or q.shape[1] % k.shape[1] or k.shape[2] < q.shape[2]:
            return False
        return all(one.stride(3) == 1 and one.data_ptr() % 16 == 0 and not any(one.stride(axis) % VECTOR for axis in (1, 2))
                   for one in operands)

    def wins(self, q: "torch.Tensor", k: "torch.Tensor") -> bool:
        """Whether it is faster than the libraries on a device that has what it needs; the figures are in docs/decisions/0038."""
        target, (heads, count, dim) = self._of(q).target(q), q.shape[1:]
        number = -(-count // shape_of(dim, count).rows) * heads
        return target is not None and (k.shape[2] - count < HISTORY or number * FEW >= target.sm_count)

    def __call__(self, operands: "Operands", scale: float, shape: Shape | None = None) -> None:
        """Row t of q [1, H, T, D] attends to rows 0 .. L - T + t of k and v [1, KV, L, D]; written to out [1, H, T, D].

        ``shape``: how blocks work, by the rows of q where it is not said.

        Raises:
            BuildError: the device has no preset, or nothing builds the kernel.
        """
        q = operands[0]
        shape = shape or shape_of(q.shape[3], q.shape[2])
        kernels = self._kernels[q.shape[3], shape]
        target = kernels.target(q)
        assert target is not None
        launch, scalars = called(kernels.launches(q)[0], operands, shape, scale)
        kernels.run(q, launch, min(int(scalars[TILES]), target.sm_count), operands, scalars)

    def _of(self, q: "torch.Tensor") -> OwnKernels:
        return self._kernels[q.shape[3], shape_of(q.shape[3], q.shape[2])]
