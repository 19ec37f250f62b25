"""Attention matches and inputs for the tests, and what the kernel should compute, in fp64 with its error budget."""

import math
import sys
from pathlib import Path

import torch
from attrs import frozen

from agentcompile_core.plugin_api import ATTENTION, Access, DType, Match, Role, SemanticLabel

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from agentcompile_validator_emulation.testing import TINY, TORCH, UNIT, aligned, operand

EPS = 1e-6


@frozen(kw_only=True)
class Model:
    """The attention of one layer."""

    dtype: DType = DType.F16
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    norm: str = "rms"
    capacity: int = 96
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: tuple[float, ...] = ()
    value_dim: int = 0  # 0: as head_dim
    interleaved: bool = False

    @property
    def width(self) -> int:
        """Elements of a row of V."""
        return self.value_dim or self.head_dim

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        """Scale of the scores."""
        return self.head_dim**-0.5

    def first(self, position: int) -> int:
        """The first position that a token attends to."""
        return max(0, position + 1 - self.window if self.window else 0, position - position % self.chunk if self.chunk else 0)

    def match(self) -> Match:
        """The match as the core's rules make it."""
        dtype, d = self.dtype, self.head_dim
        operands = [operand("q", Role.INPUT, (1, 1, self.heads * d), dtype)]
        operands += [operand(name, Role.INPUT, (1, 1, self.kv_heads * wide), dtype) for name, wide in (("k", d), ("v", self.width))]
        if self.norm != "none":
            operands += [operand(name, Role.WEIGHT, (d,), dtype) for name in ("q_norm", "k_norm")]
        if self.rotary_dim:
            operands += [operand(name, Role.INPUT, (1, 1, self.rotary_dim), dtype) for name in ("cos", "sin")]
        operands += [operand(name, Role.STATE, (1, self.capacity, self.kv_heads, wide), dtype, Access.READ_WRITE)
                     for name, wide in (("k_cache", d), ("v_cache", self.width))]
        operands.append(operand("position", Role.LENGTH, (1,), DType.I64))
        if self.sinks:
            operands.append(operand("sinks", Role.WEIGHT, (self.heads,), dtype))
        operands.append(operand("out", Role.OUTPUT, (1, 1, self.heads, self.width), dtype, Access.WRITE))
        return Match(
            kind=ATTENTION, label=SemanticLabel.ATTENTION, nodes=("attention",), operands=tuple(operands),
            attributes=(("heads", self.heads), ("kv_heads", self.kv_heads), ("head_dim", d), ("value_dim", self.value_dim),
                        ("capacity", self.capacity),
                        ("scale", self.scale), ("window", self.window), ("chunk", self.chunk), ("softcap", self.softcap),
                        ("alibi", bool(self.slopes)), *((f"slope{head}", slope) for head, slope in enumerate(self.slopes)),
                        ("qk_norm", self.norm != "none"), ("rope", self.rotary_dim > 0), ("norm", self.norm), ("norm_eps", EPS),
                        ("interleaved", self.interleaved)))

    def draw(self, position: int, seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Operands for a token at ``position``: everything that may not be read is NaN."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for item in self.match().operands:
            if item.name in ("position", "out"):
                continue
            values = torch.randn(item.spec.shape, generator=generator, dtype=torch.float64)
            tensors[item.name] = aligned(values * (scale if item.role is Role.INPUT else 1.0), TORCH[item.spec.dtype])
        if self.rotary_dim:
            angles = torch.rand(self.rotary_dim // 2, generator=generator, dtype=torch.float64) * 100
            angles = angles.repeat_interleave(2) if self.interleaved else angles.repeat(2)
            tensors["cos"].copy_(angles.cos())
            tensors["sin"].copy_(angles.sin())
        first = self.first(position)
        for name in ("k_cache", "v_cache"):
            tensors[name][:, :first] = math.nan
            tensors[name][:, position:] = math.nan
        tensors["position"] = torch.tensor([position])
        tensors["out"] = aligned(torch.full((1, 1, self.heads, self.width), math.nan), TORCH[self.dtype])
        return tensors

    def prepared(self, tensors: dict[str, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """q or k [heads, head_dim] after norm and RoPE, in fp64, and the error that rounding it may carry."""
        unit = UNIT[TORCH[self.dtype]]
        x = tensors[name].double().view(-1, self.head_dim)
        error = torch.zeros_like(x)
        if self.norm != "none":
            weight = tensors[f"{name}_norm"].double()
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + weight if self.norm == "rms_one_plus" else weight)
            error = 2.01 * unit * x.abs() + 2.0**-21 * x.abs()
        if self.rotary_dim:
            cos, sin, half, r = tensors["cos"].double().flatten(), tensors["sin"].double().flatten(), self.rotary_dim // 2, self.rotary_dim
            def turn(a: torch.Tensor, c: torch.Tensor, s: torch.Tensor, sign: float) -> torch.Tensor:
                swapped = torch.cat((sign * a[:, half:r], a[:, :half]), -1)
                if self.interleaved:
                    swapped = torch.stack((sign * a[:, 1:r:2], a[:, :r:2]), -1).flatten(-2)
                return torch.cat((a[:, :r] * c + swapped * s, a[:, r:]), -1)
            error = error + 2.0**-22 * x.abs()  # of the products, which may cancel
            x, error = turn(x, cos, sin, -1.0), turn(error, cos.abs(), sin.abs(), 1.0)
        elif self.norm == "none":
            return x, error
        return x, error + 1.001 * unit * x.abs() + 2.0**-22 * x.abs() + TINY[TORCH[self.dtype]]

    def expect(self, tensors: dict[str, torch.Tensor], depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The output [heads, head_dim] in fp64 and the error budget of each element."""
        position = int(tensors["position"])
        first = self.first(position)
        query, query_error = self.prepared(tensors, "q")
        key, key_error = self.prepared(tensors, "k")
        keys, values = (tensors[name][0].double().clone() for name in ("k_cache", "v_cache"))
        keys[position], values[position] = key, tensors["v"].double().view(-1, self.width)
        keys, values = keys[first:position + 1], values[first:position + 1]
        key_errors = torch.zeros_like(keys)
        key_errors[-1] = key_error
        grouped = [t.repeat_interleave(self.group, 1).transpose(0, 1) for t in (keys, values, key_errors)]  # [heads, length, D]
        keys, values, key_errors = grouped
        scores = torch.einsum("hd,hld->hl", query, keys) * self.scale
        noise = 4 * torch.sqrt(torch.einsum("hd,hld->hl", query_error.square(), keys.square())
                               + torch.einsum("hd,hld->hl", query.square(), key_errors.square()))
        noise += 2 * math.sqrt(depth) * 2.0**-24 * torch.einsum("hd,hld->hl", query.abs(), keys.abs())
        noise = noise * self.scale + 2.0**-21 * scores.abs()
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.slopes:
            bias = torch.tensor(self.slopes, dtype=torch.float64)[:, None] * (torch.arange(first, position + 1) - position)
            scores, noise = scores + bias, noise + 2.0**-21 * bias.abs()
        with_sink = torch.cat((scores, tensors["sinks"].double()[:, None]), -1) if self.sinks else scores
        weights = with_sink.softmax(-1)[:, :scores.shape[-1]]
        out = torch.einsum("hl,hld->hd", weights, values)
        moved = torch.einsum("hl,hld->hd", weights * noise, (values - out[:, None]).abs()) * 1.2
        accumulated = (2 * math.sqrt(depth) * 2.0**-24 + 2.0**-18) * torch.einsum("hl,hld->hd", weights, values.abs())
        unit = UNIT[TORCH[self.dtype]]
        return out, 1.001 * unit * out.abs() + TINY[TORCH[self.dtype]] + moved + accumulated

    def use(self, tensors: dict[str, torch.Tensor], before: dict[str, torch.Tensor], depth: int) -> float:
        """Largest share of the error budget that any output uses; at most 1 is right."""
        expected, budget = self.expect(before, depth)
        return float(((tensors["out"].double().view_as(expected) - expected).abs() / budget).max())
