"""Pointwise operators of prompt chunks, each in one launch of ``rows.cu``: norms of rows, rotations, activation times product.

A kernel is built on first use and compared there with the framework, on the numbers of that call; one that cannot be built or
differs is not used again.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentcompile_cuda_kit import c_type, make_source
from attrs import evolve

from agentcompile_core.plugin_api import Access, Backend, BuildError, DType, Launch, Role, StepSource, Target, f32, i32, i64, pointer

if TYPE_CHECKING:
    import torch

log = logging.getLogger("agentcompile.runtime.cuda")

TEMPLATE = Path(__file__).with_name("rows.cu")
THREADS = 256
WIDE = 1024  # columns from which on a row is a block's
VECTOR_BYTES = 16
RMS, RMS_ONE_PLUS, RMS_ONCE = 1, 2, 4  # ac::Norm of row.cuh
MOST_PARTS = 5  # of one merge
CLOSE = 2.0  # units in the last place of the largest element beside which a kernel may differ from the framework
NORM, ROPE, GATED = "agentcompile.rms_norm.default", "agentcompile.rope.default", ("aten.silu.default", "aten.mul.Tensor")

_NORM_SCALARS = (i32("rows", 0), i32("columns", 0), f32("eps", 0.0), i32("kind", 0))
_MERGE_SCALARS = tuple(i32(n, 0) for n in ("tokens", "heads", "dim"))
_ROPE_SCALARS = (*(i32(n, 0) for n in ("tokens", "heads", "dim", "rotary")), i64("token_stride", 0), i64("head_stride", 0))


def source(dtype: DType) -> StepSource:
    """The kernels for one element type; grids and scalars are those of a call."""
    def launch(entry: str, inputs: tuple[str, ...], scalars: tuple[Any, ...]) -> Launch:
        pointers = (*(pointer(name, Role.INPUT, dtype) for name in inputs), pointer("out", Role.OUTPUT, dtype, Access.WRITE))
        return Launch(entry=entry, grid=(1, 1, 1), block=(THREADS, 1, 1), arguments=(*pointers, *scalars))

    sums = tuple(pointer(f"sum{i}", Role.INPUT, DType.F32) for i in range(MOST_PARTS))
    merge = launch("merge_rows", tuple(f"part{i}" for i in range(MOST_PARTS)), _MERGE_SCALARS)
    places = (*merge.arguments[:MOST_PARTS], *sums, *merge.arguments[MOST_PARTS:])
    launches = (launch("rms_rows_warp", ("x", "weight"), _NORM_SCALARS), launch("rms_rows_block", ("x", "weight"), _NORM_SCALARS),
                launch("rope_rows", ("x", "cos", "sin"), _ROPE_SCALARS), launch("silu_product", ("gate", "up"), (i64("count", 0),)),
                evolve(merge, arguments=places))
    return make_source(TEMPLATE, plan={"T": c_type(dtype), "threads": THREADS}, launches=launches)


class RowKernels:
    """Bodies of operators, as ``Backend.body`` hands them out, over kernels that ``backend`` builds and launches."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None], capturing: Callable[[], bool]) -> None:
        self._backend, self._target, self._capturing = backend, target, capturing
        self._handles: dict[Any, Any] = {}
        self._served: dict[Any, bool] = {}

    def body(self, *ops: str) -> "Callable[..., torch.Tensor | None] | None":
        """See ``Backend.body``."""
        known: dict[tuple[str, ...], Callable[..., Any]] = {(NORM,): self._norm, (ROPE,): self._rope, GATED: self._gated}
        return known.get(ops)

    def _norm(self, x: "torch.Tensor", weight: "torch.Tensor | None", eps: float, one_plus: bool = False,
              once: bool = False) -> "torch.Tensor | None":
        import torch

        columns = x.shape[-1]
        if not _even(columns, x) or not x.is_contiguous() or (weight is None and (one_plus or once)):
            return None
        if weight is not None and (weight.dtype is not x.dtype or not _aligned(weight) or not weight.is_contiguous()):
            return None
        rows = x.numel() // columns
        entry, blocks = ("rms_rows_block", rows) if columns >= WIDE else ("rms_rows_warp", -(-rows // (THREADS // 32)))
        out = torch.empty_like(x)
        kind = RMS_ONE_PLUS if one_plus else RMS_ONCE if once else RMS
        scalars = (rows, columns, eps, kind)
        return self._checked((entry, x.dtype, columns, weight is None, kind), out, (x, weight), (entry, blocks, scalars),
                             lambda: torch.ops.agentcompile.rms_norm.default(x, weight, eps, one_plus, once))

    def _rope(self, x: "torch.Tensor", cos: "torch.Tensor", sin: "torch.Tensor", interleaved: bool = False) -> "torch.Tensor | None":
        import torch

        (batch, heads, tokens, dim), rotary = x.shape, cos.shape[-1]
        tables = cos.dtype is x.dtype and sin.dtype is x.dtype and cos.is_contiguous() and sin.is_contiguous()
        tables = tables and tuple(cos.shape) == tuple(sin.shape) == (1, tokens, rotary) and _aligned(cos) and _aligned(sin)
        strides = x.stride()
        if interleaved or batch != 1 or not tables or strides[3] != 1 or rotary % 2 or rotary > dim:
            return None
        if not all(_even(n, x) for n in (rotary // 2, dim, strides[1], strides[2])):
            return None
        out = torch.empty((1, tokens, heads, dim), dtype=x.dtype, device=x.device).transpose(1, 2)
        items = tokens * heads * ((rotary // 2 + dim - rotary) * x.element_size() // VECTOR_BYTES)
        scalars = (tokens, heads, dim, rotary, strides[2], strides[1])
        return self._checked(("rope_rows", x.dtype, dim, rotary), out, (x, cos, sin), ("rope_rows", -(-items // THREADS), scalars),
                             lambda: torch.ops.agentcompile.rope.default(x, cos, sin))

    def _gated(self, gate: "torch.Tensor", up: "torch.Tensor") -> "torch.Tensor | None":
        import torch

        same = gate.shape == up.shape and gate.dtype is up.dtype and gate.is_contiguous() and up.is_contiguous()
        if not same or not _even(gate.numel(), gate) or not _aligned(up):
            return None
        out, vectors = torch.empty_like(gate), gate.numel() * gate.element_size() // VECTOR_BYTES
        return self._checked(("silu_product", gate.dtype), out, (gate, up), ("silu_product", -(-vectors // THREADS), (gate.numel(),)),
                             lambda: torch.nn.functional.silu(gate) * up)

    def merge(self, parts: "list[tuple[torch.Tensor, torch.Tensor]]", out: "torch.Tensor") -> bool:
        """See ``Backend.merge``."""
        import torch

        (_, heads, tokens, dim), rows = out.shape, [part for part, _ in parts]
        dense = all(one.shape == out.shape and one.transpose(1, 2).is_contiguous() for one in (*rows, out))
        if len(parts) > MOST_PARTS or not dense or not all(_even(dim, one) and one.dtype is out.dtype for one in (*rows, out)):
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
        if key not in self._served:
            if self._capturing():
                return None  # nothing can be built or compared now; who captures warms up first
            self._served[key] = self._agrees(key, out, inputs, how, framework())
        if not self._served[key]:
            return None
        self._launch(out, inputs, how)
        return out

    def _agrees(self, key: Any, out: "torch.Tensor", inputs: "tuple[torch.Tensor | None, ...]", how: tuple[str, int, tuple[Any, ...]],
                wanted: "torch.Tensor") -> bool:
        import torch

        try:
            self._launch(out, inputs, how)
            self._backend.synchronize()
        except (BuildError, RuntimeError, ValueError) as exc:
            log.info("the kernel of %s is not used: %s", key, exc)
            return False
        found, wanted = out.float().nan_to_num(), wanted.float().nan_to_num()
        limit = CLOSE * torch.finfo(out.dtype).eps * float(wanted.abs().max())
        apart = float((found - wanted).abs().max())
        if apart > limit:
            log.warning("the kernel of %s is not used: it differs from the framework by %g", key, apart)
        return apart <= limit

    def _launch(self, out: "torch.Tensor", inputs: "tuple[torch.Tensor | None, ...]", how: tuple[str, int, tuple[Any, ...]]) -> None:
        entry, blocks, scalars = how
        made, handle = self._built(out.dtype)
        launch = next(one for one in made.launches if one.entry.startswith(f"{entry}_"))
        addresses = (*(0 if tensor is None else tensor.data_ptr() for tensor in inputs), out.data_ptr())
        run = self._backend.prepare_launch(handle, evolve(launch, grid=(blocks, 1, 1)), (*addresses, *scalars), False)
        run(self._backend.stream())

    def _built(self, dtype: "torch.dtype") -> tuple[StepSource, Any]:
        if dtype not in self._handles:
            made, target = source(DType(str(dtype).removeprefix("torch."))), self._target()
            if target is None:
                raise BuildError("this GPU has no preset")
            self._handles[dtype] = made, self._backend.load(self._backend.build(made, target))
        return self._handles[dtype]  # type: ignore[no-any-return]


def _aligned(tensor: "torch.Tensor") -> bool:
    return tensor.data_ptr() % VECTOR_BYTES == 0


def _even(count: int, tensor: "torch.Tensor") -> bool:
    """Whether ``count`` elements of a 16-bit tensor at an aligned address are whole vectors."""
    return tensor.element_size() == 2 and tensor.is_floating_point() and count * 2 % VECTOR_BYTES == 0 and _aligned(tensor)
