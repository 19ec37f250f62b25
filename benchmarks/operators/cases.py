"""The operators that are timed: projections of nine models for one token, rows by columns, and products of matrices."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

CONFIGS = Path(__file__).parents[1] / "configs"
# Hidden size, heads of Q and of K and V, width of a head, inner size, vocabulary, as their publishers state them.
PUBLISHED = {
    "llama-3.1-8b": (4096, 32, 8, 128, 14336, 128256), "granite-3.3-2b": (2048, 32, 8, 64, 8192, 49159),
    "qwen2.5-1.5b": (1536, 12, 2, 128, 8960, 151936), "gemma-2-2b": (2304, 8, 4, 256, 9216, 256000),
    "olmo2-1b": (2048, 16, 16, 128, 8192, 100352),
}
MEASURED = ("qwen3-1.7b", "qwen3-4b", "llama-3.2-1b", "llama-3.2-3b")
ROWS = ((1, 2048), (1, 151936), (128, 2048), (4096, 4096), (8192, 8192), (16, 131072), (65536, 256))
PRODUCTS = (((4096, 4096, 4096), torch.float16), ((1024, 4096, 4096), torch.bfloat16), ((512, 512, 512), torch.float32))
EPS = 1e-5


@frozen(kw_only=True, eq=False)
class Case:
    """One operator: a module for the compiler, and the same as a function of its inputs and parameters for everybody else.

    ``shape`` says sizes as the tables do; ``inputs``, ``parameters`` and ``result`` are shapes.
    """

    family: str
    op: str
    shape: str
    dtype: torch.dtype
    module: Callable[[], nn.Module]
    function: Callable[..., Tensor]
    inputs: tuple[tuple[int, ...], ...]
    parameters: tuple[tuple[int, ...], ...] = ()
    result: tuple[int, ...]
    names: tuple[str, ...] = ()  # what has this shape: models and their projections
    fused: Callable[..., Tensor] | None = None  # the framework's one operator for what ``function`` writes out

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a row is known by."""
        return self.family, self.op, self.shape, str(self.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Bytes of all operands, each once: what must be read and written."""
        return sum(math.prod(shape) for shape in (*self.inputs, *self.parameters, self.result)) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of a product; 0 for everything else."""
        return 2 * math.prod(self.result) * self.inputs[0][-1] if self.family in ("gemv", "gemm") else 0

    @property
    def terms(self) -> int:
        """Terms that add up to a result without weights; 1 where a result is no such sum."""
        return self.inputs[0][-1] if self.op == "sum" else 1

    @property
    def reads_only(self) -> bool:
        """Whether it writes next to nothing, so that the read ceiling is its bound."""
        return self.family in ("gemv", "reduction")

    def made(self, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module with random parameters, and random inputs."""
        with torch.device(device):
            module = self.module().to(self.dtype).eval().requires_grad_(False)
            inputs = tuple(torch.randn(shape, dtype=self.dtype) for shape in self.inputs)
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
        return module, inputs


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As HuggingFace's models write it: the normalized row is rounded before it meets the weight."""
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


class _Rms(nn.Module):
    """The RMS norm of HuggingFace's models."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class _Silu(nn.Module):
    """silu(a) * b."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.silu(a) * b


class _Softmax(nn.Module):
    """Softmax of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1)


class _Sum(nn.Module):
    """Sums of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(-1)


class _Largest(nn.Module):
    """The largest of each row."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax(-1)


def _linear(family: str, shape: tuple[int, int, int], dtype: torch.dtype, names: tuple[str, ...] = ()) -> Case:
    m, n, k = shape
    text = f"{n}x{k}" if family == "gemv" else f"{m}x{n}x{k}"
    op = "head" if any(name.endswith(" head") for name in names) else "linear"
    return Case(family=family, op=op, shape=text, dtype=dtype, module=lambda: _skipped(nn.Linear, k, n, bias=False), function=F.linear,
                inputs=((m, k),), parameters=((n, k),), result=(m, n), names=names)


def _skipped(kind: type[nn.Module], *sizes: int, **said: Any) -> nn.Module:
    """A module whose parameters nobody has initialized."""
    return torch.nn.utils.skip_init(kind, *sizes, device=torch.get_default_device(), **said)


def sizes_of(model: str) -> tuple[int, ...]:
    """The published sizes of a model in the order of ``PUBLISHED``."""
    if model in PUBLISHED:
        return PUBLISHED[model]
    said = json.loads((CONFIGS / model / "config.json").read_text())
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
    return tuple(said[name] for name in names)


def projections() -> dict[tuple[int, int], tuple[str, ...]]:
    """Every distinct projection (n, k) of the nine models, with who has it."""
    found: dict[tuple[int, int], tuple[str, ...]] = {}
    for model in (*MEASURED, *PUBLISHED):
        hidden, heads, kv_heads, width, inner, vocabulary = sizes_of(model)
        each = {"q": (heads * width, hidden), "k, v": (kv_heads * width, hidden), "o": (hidden, heads * width), "gate, up": (inner, hidden),
                "down": (hidden, inner), "head": (vocabulary, hidden)}
        for name, shape in each.items():
            found[shape] = (*found.get(shape, ()), f"{model} {name}")
    return found


def _rows(rows: int, columns: int, dtype: torch.dtype) -> Iterator[Case]:
    whole, row = (rows, columns), (columns,)

    def case(family: str, op: str, module: Callable[[], nn.Module], function: Callable[..., Tensor], **said: Any) -> Case:
        return Case(family=family, op=op, shape=f"{rows}x{columns}", dtype=dtype, module=module, function=function,
                    **{"inputs": (whole,), "result": whole, **said})

    yield case("norm", "rms_norm", lambda: _Rms(columns), rms_norm, parameters=(row,), fused=lambda x, w: F.rms_norm(x, row, w, EPS))
    yield case("norm", "layer_norm", lambda: nn.LayerNorm(columns, eps=EPS), lambda x, w, b: F.layer_norm(x, row, w, b, EPS),
               parameters=(row, row))
    yield case("softmax", "softmax", _Softmax, lambda x: torch.softmax(x, -1))
    yield case("elementwise", "silu_mul", _Silu, lambda a, b: F.silu(a) * b, inputs=(whole, whole))
    yield case("reduction", "sum", _Sum, lambda x: x.sum(-1), result=(rows,))
    yield case("reduction", "amax", _Largest, lambda x: x.amax(-1), result=(rows,))


def cases(small: bool = False) -> list[Case]:
    """All cases, those first that a claim is made of: products, heads, then the most bytes. ``small``: the same of a few elements."""
    found = [_linear("gemm", shape, dtype) for shape, dtype in PRODUCTS]
    found += [_linear("gemv", (1, *shape), torch.float16, names) for shape, names in projections().items()]
    found += [case for rows, columns in ROWS for dtype in (torch.float16, torch.float32) for case in _rows(rows, columns, dtype)]
    if small:
        found = [_linear("gemm", (20, 24, 40), torch.float16), _linear("gemv", (1, 24, 64), torch.float16, ("tiny head",)),
                 *_rows(2, 70, torch.float32), *_rows(3, 64, torch.float16)]
    return sorted(found, key=lambda case: (case.family != "gemm", case.op != "head", -case.nbytes))
