"""Work of prompt chunks and of rows of a batch in one launch each: norms, sums with norms, heads, gates (``rows.cu``), and products, those
of chosen experts too.

A kernel is built on first use and compared there with the framework, on the numbers of that call; one that cannot be built or
differs is not used again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentcompile_cuda_kit import c_type, make_source
from attrs import evolve

from agentcompile_core.plugin_api import (
    Access,
    Backend,
    DType,
    Heads,
    Launch,
    Role,
    StepSource,
    Target,
    f32,
    i32,
    i64,
    operator_names,
    pointer,
)

from .compared import CLOSE_PRODUCTS, Compared
from .expert_product import ExpertProduct, one_by_one
from .gated_product import GatedProduct
from .gates import ACTIVATIONS, LIKELY, gate_of
from .head_places import MOST, THREADS, placed, placing
from .own_kernels import OwnKernels
from .recurrent_bodies import RecurrentBodies
from .recurrent_rows import RecurrentRows
from .row_norms import RowNorms
from .row_vectors import VECTOR_BYTES, even, is_aligned, whole
from .scan_chunks import ScanChunks
from .short_convolution import ShortConvolution
from .skinny_product import SkinnyProduct

if TYPE_CHECKING:
    import torch

    Tensors = Sequence[torch.Tensor]

TEMPLATE = Path(__file__).with_name("rows.cu")
MOST_PARTS = 5  # of one merge

_NORM_SCALARS = (i32("rows", 0), i32("columns", 0), f32("eps", 0.0), i32("kind", 0))
_GATED_SCALARS = tuple(i32(n, 0) for n in ("rows", "columns", "gate_row", "up_row", "activation"))
_SUM_SCALARS = (i32("columns", 0), f32("eps", 0.0), i32("kind", 0))
_WEIGH_SCALARS = tuple(i32(n, 0) for n in ("tokens", "slots", "columns"))
_MERGE_SCALARS = tuple(i32(n, 0) for n in ("tokens", "heads", "dim"))
_ROPE_SCALARS = (*(i32(n, 0) for n in ("tokens", "heads", "dim", "rotary")), i64("token_stride", 0), i64("head_stride", 0),
                 i32("interleaved", 0))
_STRIDES = tuple(f"{name}_{which}" for which in ("heads", "token", "head", "out_token", "out_head") for name in "qkv")
_PLACE_SCALARS = (
    *(i32(n, 0) for n in (*_STRIDES, "tokens", "capacity", "each", "dim", "rotary", "lanes", "normed", "turned", "moved", "style")),
    f32("eps", 0.0), i32("kind", 0))
SHAPES_OF = slice(-10, None)  # of those scalars the ones that say what is computed, and in which way: from each on


def source(dtype: DType) -> StepSource:
    """The kernels for one element type; grids and scalars are those of a call."""
    def launch(entry: str, inputs: tuple[str, ...], scalars: tuple[Any, ...], outputs: tuple[str, ...] = ("out",)) -> Launch:
        given = (pointer(name, Role.INPUT, DType.I64 if name == "at" else dtype) for name in inputs)
        pointers = (*given, *(pointer(name, Role.OUTPUT, dtype, Access.WRITE) for name in outputs))
        return Launch(entry=entry, grid=(1, 1, 1), block=(THREADS, 1, 1), pdl=True, arguments=(*pointers, *scalars))

    weigh = launch("weigh_rows", ("x", "weights"), _WEIGH_SCALARS)
    x, weights, out = weigh.arguments[:3]
    wide = evolve(weigh, entry="weigh_rows_wide",
                  arguments=(x, *(evolve(one, dtype=DType.F32) for one in (weights, out)), *_WEIGH_SCALARS))
    sums = tuple(pointer(f"sum{i}", Role.INPUT, DType.F32) for i in range(MOST_PARTS))
    merge = launch("merge_rows", tuple(f"part{i}" for i in range(MOST_PARTS)), _MERGE_SCALARS)
    places = (*merge.arguments[:MOST_PARTS], *sums, *merge.arguments[MOST_PARTS:])
    launches = (*(launch(f"norm_rows_{of}", ("x", "weight", "bias"), _NORM_SCALARS) for of in ("warp", "block")),
                launch("rope_rows", ("x", "cos", "sin"), _ROPE_SCALARS), launch("gate_rows", ("gate", "up"), _GATED_SCALARS),
                evolve(merge, arguments=places), weigh, wide,
                launch("add_norm_rows", ("left", "right", "weight", "bias"), _SUM_SCALARS, ("total", "out")),
                launch("place_heads", ("q", "k", "v", "q_weight", "k_weight", "v_weight", "cos", "sin", "at"), _PLACE_SCALARS,
                       ("q_out", "k_out", "v_out")))
    return make_source(TEMPLATE, plan={"T": c_type(dtype), "threads": THREADS}, launches=launches)


class RowKernels:
    """What ``Backend.body``, ``Backend.place`` and ``Backend.merge`` offer, over kernels that ``backend`` builds and launches."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None], capturing: Callable[[], bool],
                 others: "Sequence[Callable[[torch.Tensor], None]]" = ()) -> None:
        """``others``: what else of this package's own serves prompts, and begins to be built when the first kernel is."""
        self._kernels, self._others = OwnKernels(backend, target, source), tuple(others)
        self._product, self._skinny = GatedProduct(backend, target), SkinnyProduct(backend, target)
        self._experts = ExpertProduct(backend, target)
        self._compared = Compared(backend, capturing, (*self._others, self._product.start, self._experts.start))
        self._served = self._compared.served
        recurrences = ScanChunks(backend, target), RecurrentRows(backend, target)
        recurrent = RecurrentBodies(recurrences, ShortConvolution(backend, target), self._compared)
        self._norms = RowNorms(self._launch, self._compared)
        self._bodies: dict[tuple[str, ...], Callable[..., Any]] = {
            **self._norms.bodies, (operator_names.ROPE,): self._rope, (operator_names.LINEAR,): self._few_rows,
            (operator_names.EXPERT_LINEAR,): self._chosen, (operator_names.MULTIPLY, operator_names.SUM): self._weighed,
            (operator_names.RECURRENCE,): recurrent.recurrence, (operator_names.CONVOLUTION,): recurrent.convolution,
            (operator_names.RECURRENCE, operator_names.COPY): recurrent.recurrence_in_place,
            (operator_names.CONVOLUTION, operator_names.COPY): recurrent.convolution_in_place}
        for activation in ACTIVATIONS:
            self._bodies[activation, operator_names.MULTIPLY] = partial(self._gated, activation)
            self._bodies[operator_names.LINEAR, activation, operator_names.MULTIPLY] = partial(self._gated_product, activation)

    def start(self, like: "torch.Tensor") -> None:
        """Begin to build what most models need for the element type of ``like``, where it may be asked for."""
        for start in (self._kernels.start, *self._others, self._product.start, self._skinny.start):
            start(like)

    def body(self, *ops: str) -> "Callable[..., Any] | None":
        """See ``Backend.body``."""
        if len(ops) == 3 and ops in self._bodies:
            self._product.expect(LIKELY[ops[1]])
        if ops == (operator_names.EXPERT_LINEAR,):
            self._experts.expect()
        return self._bodies.get(ops)

    def place(self, heads: Sequence[Heads]) -> bool:
        """See ``Backend.place``."""
        how = placing(heads)
        if how is None:
            return False
        dtype, tensors, blocks, scalars = how
        launch = partial(self._launch, tensors, ("place_heads", blocks, scalars))
        count = heads[0].rows.shape[2]

        def found() -> "Tensors":
            starts = [0 if one.at is None else int(one.at) for one in heads]
            return [one.out[:, :, start : start + count] for one, start in zip(heads, starts, strict=True)]

        key = ("place_heads", dtype, *(one.rows.shape[1] for one in heads), *scalars[SHAPES_OF])
        return self._compared.agreed(key, launch, found, lambda: [placed(one) for one in heads])

    def _rope(self, x: "torch.Tensor", cos: "torch.Tensor", sin: "torch.Tensor", interleaved: bool = False) -> "torch.Tensor | None":
        import torch

        (batch, heads, tokens, dim), rotary = x.shape, cos.shape[-1]
        tables = cos.dtype is x.dtype and sin.dtype is x.dtype and cos.is_contiguous() and sin.is_contiguous()
        tables = tables and tuple(cos.shape) == tuple(sin.shape) == (1, tokens, rotary) and is_aligned(cos) and is_aligned(sin)
        strides = x.stride()
        if batch != 1 or not tables or strides[3] != 1 or rotary % 2 or rotary > dim:
            return None
        alone = 0 if interleaved else rotary // 2  # channels whose vectors bring those of their partners
        if not all(even(n, x) for n in (rotary - alone, dim, strides[1], strides[2])):
            return None
        out = torch.empty((1, tokens, heads, dim), dtype=x.dtype, device=x.device).transpose(1, 2)
        items = tokens * heads * ((dim - alone) * x.element_size() // VECTOR_BYTES)
        scalars = (tokens, heads, dim, rotary, strides[2], strides[1], int(interleaved))
        launch = ("rope_rows", -(-items // THREADS), scalars)
        return self._checked(("rope_rows", x.dtype, dim, rotary, interleaved), out, (x, cos, sin), launch,
                             lambda: torch.ops.agentcompile.rope.default(x, cos, sin, interleaved))

    def _gated(self, activation: str, gate: "torch.Tensor", up: "torch.Tensor", **how: Any) -> "torch.Tensor | None":
        import torch

        by = gate_of(activation, how)
        if by is None or gate.shape != up.shape or gate.dtype is not up.dtype or not gate.dim():
            return None
        columns, strides = gate.shape[-1], (_row_stride(gate), _row_stride(up))
        apart = zip(strides, (gate, up), strict=True)
        if not whole(columns, gate) or not all(stride is not None and whole(stride, one) for stride, one in apart):
            return None
        rows, vectors = gate.numel() // columns, gate.numel() * gate.element_size() // VECTOR_BYTES
        if vectors > MOST - THREADS:
            return None
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        launched = ("gate_rows", -(-vectors // THREADS), (rows, columns, *strides, by.number))
        key = ("gate_rows", by.name, gate.dtype, all(stride == columns for stride in strides))
        return self._checked(key, out, (gate, up), launched, lambda: by.run(gate) * up)

    def _gated_product(self, activation: str, x: "torch.Tensor", gate: "torch.Tensor", up: "torch.Tensor",
                       **how: Any) -> "torch.Tensor | None":
        import torch
        from torch.nn.functional import linear

        by, is_skinny = gate_of(activation, how), self._skinny.takes(x, gate, up)
        if by is None or not (is_skinny or self._product.takes(x, gate, up)):
            return None
        out = torch.empty((*x.shape[:-1], gate.shape[0]), dtype=x.dtype, device=x.device)
        launch = partial(self._skinny.gated if is_skinny else self._product, x, gate, up, out, by)
        key = ("gated_rows", by.name, is_skinny, x.dtype, *gate.shape)

        def wanted() -> "Tensors":
            return (by.run(linear(x, gate)) * linear(x, up),)

        return out if self._compared.agreed(key, launch, lambda: (out,), wanted, CLOSE_PRODUCTS) else None

    def _few_rows(self, x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None" = None, *,
                  out: "torch.Tensor | None" = None) -> "torch.Tensor | None":
        """The product, written to ``out`` [.., N] where that is given, which is dense."""
        import torch

        if not self._skinny.takes(x, weight) or (bias is not None and not _is_beside(bias, weight)):
            return None
        made = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device) if out is None else out
        launch, key = partial(self._skinny.plain, x, weight, bias, made), ("skinny_rows", x.dtype, bias is None, *weight.shape)
        framework = partial(torch.nn.functional.linear, x, weight, bias)
        return made if self._compared.agreed(key, launch, lambda: (made,), lambda: (framework(),), CLOSE_PRODUCTS) else None

    def _chosen(self, x: "torch.Tensor", weight: "torch.Tensor", experts: "torch.Tensor", bias: "torch.Tensor | None" = None,
                transposed: bool = False) -> "torch.Tensor | None":
        """Rows times the matrices of the experts chosen for them, as ``agentcompile.expert_linear`` says."""
        import torch

        if not self._experts.takes(x, weight, experts, bias, transposed):
            return None
        out = torch.empty((*experts.shape, weight.shape[2 if transposed else 1]), dtype=x.dtype, device=x.device)
        launch = partial(self._experts, x, weight, experts, bias, transposed, out)
        is_tall = self._experts.is_tall(experts, weight)
        key = ("expert_rows", x.dtype, is_tall, transposed, bias is None, x.shape[1] == 1, *weight.shape)
        return out if self._compared.agreed(key, launch, lambda: (out,), lambda: (one_by_one(x, weight, experts, bias, transposed),),
                                   CLOSE_PRODUCTS) else None

    def _weighed(self, x: "torch.Tensor", weights: "torch.Tensor", dims: Sequence[int]) -> "torch.Tensor | None":
        """Rows [T, S, columns] times weights [T, S, 1], added for each token."""
        import torch

        if x.dim() != 3 or tuple(dims) not in ((1,), (-2,)) or tuple(weights.shape) != (*x.shape[:2], 1) or not x.numel():
            return None
        if not even(x.shape[2], x) or not x.is_contiguous() or not weights.is_contiguous() or x.numel() > MOST:
            return None
        is_wide = weights.dtype is torch.float32
        if not is_wide and weights.dtype is not x.dtype:
            return None
        tokens, slots, columns = x.shape
        out = torch.empty((tokens, columns), dtype=weights.dtype, device=x.device)
        vectors = tokens * columns * x.element_size() // VECTOR_BYTES
        how = ("weigh_rows_wide" if is_wide else "weigh_rows", -(-vectors // THREADS), (tokens, slots, columns))
        launch = partial(self._launch, (x, weights, out), how, x)
        return out if self._compared.agreed((how[0], x.dtype), launch, lambda: (out,), lambda: ((x * weights).sum(1),)) else None

    def merge(self, parts: "list[tuple[torch.Tensor, torch.Tensor]]", out: "torch.Tensor") -> bool:
        """See ``Backend.merge``."""
        import torch

        (_, heads, tokens, dim), rows = out.shape, [part for part, _ in parts]
        dense = all(one.shape == out.shape and one.transpose(1, 2).is_contiguous() for one in (*rows, out))
        if len(parts) > MOST_PARTS or not dense or not all(even(dim, one) and one.dtype is out.dtype for one in (*rows, out)):
            return False
        sums = [lse.reshape(heads, tokens) for _, lse in parts]
        if any(one.dtype is not torch.float32 for one in sums):
            return False
        absent = [None] * (MOST_PARTS - len(parts))
        how = ("merge_rows", -(-out.numel() * out.element_size() // (VECTOR_BYTES * THREADS)), (tokens, heads, dim))

        def framework() -> torch.Tensor:
            weights = torch.stack(sums).softmax(0)[:, None, :, :, None]
            return (torch.stack(rows).float() * weights).sum(0)

        return self._checked(("merge_rows", out.dtype), out, (*rows, *absent, *(one.contiguous() for one in sums), *absent), how,
                             framework) is not None

    def _checked(self, key: Any, out: "torch.Tensor", inputs: "tuple[torch.Tensor | None, ...]", how: tuple[str, int, tuple[Any, ...]],
                 framework: "Callable[[], torch.Tensor]") -> "torch.Tensor | None":
        """``out`` after its launch ``how`` (entry, blocks, scalars); None where the kernel is not to be used."""
        launch = partial(self._launch, (*inputs, out), how)
        return out if self._compared.agreed(key, launch, lambda: (out,), lambda: (framework(),)) else None

    def _launch(self, tensors: "tuple[torch.Tensor | None, ...]", how: tuple[str, int, tuple[Any, ...]],
                like: "torch.Tensor | None" = None) -> None:
        """``tensors``: in the kernel's order, outputs last, all of the type of ``like``, the last one, but those that say otherwise."""
        entry, blocks, scalars = how
        like = tensors[-1] if like is None else like
        assert like is not None
        launch = next(one for one in self._kernels.launches(like) if one.entry.startswith(f"{entry}_"))
        self._kernels.run(like, launch, blocks, tensors, scalars)


def _is_beside(bias: "torch.Tensor", weight: "torch.Tensor") -> bool:
    return bias.shape == weight.shape[:1] and bias.dtype is weight.dtype and bias.is_contiguous()


def _row_stride(tensor: "torch.Tensor") -> int | None:
    """From row to row, of rows of the last axis that lie so evenly; None where they do not."""
    stride, rows = tensor.stride(), tensor.numel() // tensor.shape[-1] if tensor.numel() else 0
    inner = [axis for axis in range(tensor.dim() - 1) if tensor.shape[axis] != 1]
    if rows == 0 or tensor.shape[-1] > MOST or (stride[-1] != 1 and tensor.shape[-1] != 1):
        return None
    if not inner:
        return tensor.shape[-1]
    even = all(stride[a] == stride[b] * tensor.shape[b] for a, b in pairwise(inner))
    return stride[inner[-1]] if even and tensor.shape[-1] <= stride[inner[-1]] <= MOST else None
