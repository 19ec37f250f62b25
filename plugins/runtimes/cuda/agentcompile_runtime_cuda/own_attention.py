"""Attention of prompt chunks over what is cached by the kernel of ``attend.cu``, in one launch over any length."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentcompile_cuda_kit import c_type, make_source
from attrs import asdict, evolve, frozen

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
EVERYTHING = 2**31 - 1  # a window without an end
SPAN = 64  # channels that the copy engine fetches side by side
VECTOR = 8  # elements of 16 bytes, of which steps from row to row and from head to head are multiples
TILES = 4  # which of the scalars is the number of tiles
USUAL = (64, 128)  # channels of heads whose kernels are built before they are asked for
LONG = 4096  # rows from which on three warpgroups are faster for heads of one span
FAR = 8192  # rows that are seen from which on blocks of 192 keys are faster for heads of two spans
HISTORY, FEW = 1024, 4  # from so many rows before the chunk on flash attention, which splits them, is faster where an SM has 1/FEW tile


@frozen(kw_only=True)
class Form:
    """What a kernel is written for: channels of queries and keys, and of values, in whole spans, and what else happens to scores."""

    dim: int = 128
    value_dim: int = 128
    windowed: bool = False
    capped: bool = False
    sinks: bool = False
    slopes: bool = False


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

    def shared_bytes(self, form: Form) -> int:
        """Of a block: queries, keys and values of two bytes each, and barriers."""
        of_keys = form.dim * (self.rows + self.stages * self.keys)
        return 2 * (of_keys + form.value_dim * self.stages * self.keys) + 8 * (2 + 4 * self.stages)


@frozen(kw_only=True)
class DeviceScoring:
    """A ``Scoring`` as the kernel takes it, with its tensors on the device.

    Scores are times ``scale``, capped by ``softcap``, of the last ``window`` keys alone; 0 is no such thing. ``sinks`` [H]: of each head a
    score that belongs to no key. ``slopes`` [H], fp32: by what scores fall for each row that a key lies back.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: "torch.Tensor | None" = None
    slopes: "torch.Tensor | None" = None

    @property
    def is_plain(self) -> bool:
        """Whether they are only scaled."""
        return not self.window and not self.softcap and self.sinks is None and self.slopes is None


TWO, THREE = Shape(groups=2, registers=240, copier_registers=24), Shape(groups=3, registers=160, copier_registers=32)
WIDE, DEEP = evolve(TWO, keys=64), evolve(TWO, keys=192)
WIDTHS = (64, 128, 256)  # of values, that one instruction makes
WIDEST = 256  # channels of a head


def form_of(dim: int, value_dim: int, scores: DeviceScoring) -> Form | None:
    """What serves heads of so many channels; None: nothing does. What is more than scaled has a window, if need be of everything."""
    if not SPAN <= dim <= WIDEST or not SPAN <= value_dim <= WIDEST:
        return None
    return Form(dim=-(-dim // SPAN) * SPAN, value_dim=next(width for width in WIDTHS if width >= value_dim), windowed=not scores.is_plain,
                capped=bool(scores.softcap), sinks=scores.sinks is not None, slopes=scores.slopes is not None)


def shape_of(form: Form, count: int, seen: int) -> Shape:
    """How the blocks of a chunk of ``count`` rows work, which are the last of ``seen`` rows."""
    if form.dim == form.value_dim == SPAN and count >= LONG:
        return THREE
    if form == Form() and seen >= FAR:
        return DEEP
    return WIDE if form.value_dim > 128 or form.dim > 192 else TWO


def _shapes(form: Form) -> tuple[Shape, ...]:
    """All that ``shape_of`` has for a form."""
    return tuple(dict.fromkeys(shape_of(form, count, seen) for count, seen in ((1, 1), (LONG, LONG), (1, FAR))))


def source(dtype: DType, form: Form, shape: Shape) -> StepSource:
    """The kernel for one element type and form; grid, scalars and tilings are those of a call."""
    read = (*(pointer(name, Role.INPUT, dtype) for name in "qkv"), pointer("sinks", Role.WEIGHT, dtype),
            pointer("slopes", Role.CONSTANT, DType.F32))
    scalars = (*(i32(name, 0) for name in ("count", "start", "heads", "share", "tiles", "window", "channels")), f32("scale", 0.0),
               f32("before", 0.0), i64("out_row", 0), i64("out_head", 0))
    launch = Launch(entry="attend_rows", grid=(1, 1, 1), block=(shape.threads, 1, 1), shared_bytes=shape.shared_bytes(form),
                    arguments=(*read, pointer("out", Role.OUTPUT, dtype, Access.WRITE), *scalars))
    plan = {"T": c_type(dtype), **asdict(form), **asdict(shape), "threads": shape.threads}
    return make_source(TEMPLATE, plan=plan, launches=(launch,), features=FEATURES)


def called(launch: Launch, operands: "Operands", shape: Shape, scores: DeviceScoring) -> tuple[Launch, tuple[int | float, ...]]:
    """A launch of ``source`` with the tilings of a call, and the scalars of it. ``scalars[TILES]`` is the number of tiles."""
    q, k, v, out = operands
    heads, count = q.shape[1:3]
    boxes = (("q", q, shape.rows), ("k", k, shape.keys), ("v", v, SPAN))
    fetched = (tiles(name, Role.INPUT, DType(str(q.dtype).removeprefix("torch.")), _tiling(tensor, rows)) for name, tensor, rows in boxes)
    number = -(-count // shape.rows) * heads
    scale, before = (scores.softcap, scores.scale / scores.softcap) if scores.softcap else (scores.scale, 0.0)
    scalars = (count, k.shape[2] - count, heads, heads // k.shape[1], number, scores.window or EVERYTHING, v.shape[3], scale * LOG2_E,
               before, out.stride(2), out.stride(1))
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
        self._backend, self._live = backend, target
        self._kernels: dict[tuple[Form, Shape], OwnKernels] = {}

    def start(self, like: "torch.Tensor") -> None:
        """Begin to build the kernels of usual heads for the element type of ``like``, where they may be asked for."""
        if like.dtype.itemsize == 2:
            for dim in USUAL:
                for shape in _shapes(Form(dim=dim, value_dim=dim)):
                    self._of(Form(dim=dim, value_dim=dim), shape).start(like)

    def takes(self, operands: "Operands", scores: DeviceScoring) -> bool:
        """Whether the device has what the kernel needs, and the tensors are, and lie, as it reads and writes them."""
        q, k, v, out = operands
        form = form_of(q.shape[3], v.shape[3], scores)
        if form is None or not scores.scale > SMALLEST or not 0 <= scores.window < EVERYTHING or not 0.0 <= scores.softcap < math.inf:
            return False
        if q.dtype.itemsize != 2 or not q.is_floating_point() or len({one.dtype for one in operands}) > 1:
            return False
        if k.shape[:3] != v.shape[:3] or out.shape != (*q.shape[:3], v.shape[3]) or q.shape[0] != 1 or k.shape[0] != 1:
            return False
        if k.shape[3] != q.shape[3] or not q.numel() or not k.numel() or q.shape[1] % k.shape[1] or k.shape[2] < q.shape[2]:
            return False
        if not all(one.stride(3) == 1 and one.shape[3] % VECTOR == 0 and one.data_ptr() % 16 == 0
                   and not any(one.stride(axis) % VECTOR for axis in (1, 2)) for one in operands):
            return False
        import torch

        for one, dtype in ((scores.sinks, q.dtype), (scores.slopes, torch.float32)):
            if one is not None and (one.dtype is not dtype or one.shape != (q.shape[1],) or not one.is_contiguous()):
                return False
        return self._of(form, shape_of(form, q.shape[2], k.shape[2])).may_serve(q)

    def wins(self, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", scores: DeviceScoring) -> bool:
        """Whether it is faster than the libraries on a device that has what it needs; the figures are in docs/decisions/0038.

        Of scores that are more than scaled the libraries know nothing.
        """
        if not scores.is_plain or k.shape[2] - q.shape[2] < HISTORY:
            return True
        form, (heads, count) = form_of(q.shape[3], v.shape[3], scores), q.shape[1:3]
        if form is None:
            return False
        shape = shape_of(form, count, k.shape[2])
        target = self._of(form, shape).target(q)
        return target is not None and -(-count // shape.rows) * heads * FEW >= target.sm_count

    def shapes(self, q: "torch.Tensor", v: "torch.Tensor", scores: DeviceScoring) -> tuple[Shape, ...]:
        """Those that calls of such heads may have, by their rows."""
        form = form_of(q.shape[3], v.shape[3], scores)
        return () if form is None else _shapes(form)

    def __call__(self, operands: "Operands", scores: DeviceScoring, shape: Shape | None = None) -> None:
        """Row t of q [1, H, T, D] attends to rows 0 .. L - T + t of k [1, KV, L, D] and v [1, KV, L, Dv]; written to out [1, H, T, Dv].

        ``shape``: how blocks work, by the rows of q and k where it is not said.

        Raises:
            BuildError: the device has no preset, or nothing builds the kernel.
        """
        q, k, v, out = operands
        form = form_of(q.shape[3], v.shape[3], scores)
        assert form is not None
        shape = shape or shape_of(form, q.shape[2], k.shape[2])
        kernels = self._of(form, shape)
        target = kernels.target(q)
        assert target is not None
        launch, scalars = called(kernels.launches(q)[0], operands, shape, scores)
        kernels.run(q, launch, min(int(scalars[TILES]), target.sm_count), (*operands[:3], scores.sinks, scores.slopes, out), scalars)

    def _of(self, form: Form, shape: Shape) -> OwnKernels:
        key = form, shape
        if key not in self._kernels:
            self._kernels[key] = OwnKernels(self._backend, self._live, partial(source, form=form, shape=shape))
        return self._kernels[key]
