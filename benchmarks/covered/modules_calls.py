"""Modules by what goes in and comes out: names, nests, None, numbers, named tuples, views, what is written and what is kept."""

from collections import OrderedDict, namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Of, add, function, integers, randn

Pair = namedtuple("Pair", "first second")
ROW = randn(4, 64)


class Attention(nn.Module):
    """Self-attention with an optional mask and a switch for what is returned."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, causal: bool = False, weights: bool = False) -> Any:
        """[B, T, C] -> the same, and the weights [B, H, T, T] where asked for."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        if mask is not None:
            scores = scores + mask
        shares = scores.softmax(-1)
        out = self.out((shares @ v).transpose(1, 2).reshape(batch, length, width))
        return (out, shares) if weights else out


class Block(nn.Module):
    """A pre-norm transformer block of torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, 32] -> the same."""
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Gated(nn.Module):
    """The gated MLP of language models behind its norm, with the residual."""

    def __init__(self, width: int = 64, inner: int = 96) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((width, inner), (width, inner), (inner, width)))

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] -> the same."""
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Counter(nn.Module):
    """Keeps a running sum in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(64))
        self.total: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[T, 64] -> what was summed up so far, added."""
        self.total += x.sum(0)
        return x + self.total


class Experts(nn.Module):
    """A dense mixture: every expert computes, the best two count."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(64, 4), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[T, 64] -> the same."""
        shares, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        kept = torch.zeros(x.shape[0], 4, device=x.device).scatter(1, chosen, shares)
        return torch.stack([expert(x) for expert in self.experts], 1).mul(kept.unsqueeze(-1)).sum(1)


def branching(x: Tensor) -> Tensor:
    """A branch on values: not to be captured."""
    return x + 1 if float(x.sum()) > 0 else x - 1


def selected(x: Tensor) -> Tensor:
    """A result whose size depends on values."""
    return x[x > 0]


def written(x: Tensor) -> Tensor:
    """Writes to its input."""
    x.mul_(2.0)
    return x + 1


def sliced(x: Tensor) -> Tensor:
    """Writes to a slice of what it made, and reads the whole before and after."""
    y = x * 2
    before = y.exp()
    y[:, :3].zero_()
    return before + y


def chained(x: Tensor) -> Tensor:
    """Writes in place that only the result shows."""
    y = torch.tanh(x)
    return y.mul_(3.0).add_(x).relu_()


def shown(x: Tensor) -> tuple[Tensor, Tensor]:
    """A view made before a write shows it."""
    y = torch.tanh(x)
    view = y.t()
    y.mul_(3.0)
    return view * 2, y


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over neighbouring channels."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


add("attention", Attention, randn(2, 6, 32))
add("attention_mask_by_name", Attention, randn(2, 6, 32), mask=randn(6, 6), causal=True)
add("attention_none_and_weights", Attention, randn(1, 6, 32), None, weights=True)
add("transformer_block", Block, randn(1, 6, 32))
add("encoder_layer", lambda: nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), randn(1, 5, 32))
add("gated_mlp", Gated, ROW)
add("gated_mlp_one_row", Gated, randn(1, 64))
add("mixture", Experts, ROW)
add("running_sum", Counter, ROW)
add("shared_weights", lambda: nn.Sequential(*[nn.Linear(64, 64)] * 3), ROW)
add("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 8)), ROW)
add("uses_input_twice", lambda: Of(lambda m, a, b: m.f(a) + m.f(b), f=nn.Linear(64, 64)), ROW, ROW)
function("sdpa", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *[randn(1, 4, 6, 8)] * 3)
function("interleaved_rope", interleaved, randn(1, 4, 6, 8), randn(6, 4), randn(6, 4))
function("named_tuple_out", lambda x: Pair(x + 1, x.sum()), ROW)
function("dict_out", lambda x: {"a": x * 2, "b": [x.sum(), None, 3, "text"]}, ROW)
function("ordered_dict_out", lambda x: OrderedDict(z=x, a=x + 1), ROW)
function("list_in", lambda parts, *, scale: [part * scale for part in parts], parts=[ROW, ROW], scale=0.5)
function("nested_in", lambda d: d["x"] @ d["w"][0] + d["bias"], {"x": ROW, "w": (randn(64, 8), None), "bias": 1.5})
function("tuple_of_one", lambda x: (x.exp(),), ROW)
function("none_out", lambda x: (None, x * 2), ROW)
function("number_out", lambda x: (x * 2, 7), ROW)
function("same_twice", lambda x: (lambda y: (y, y))(x * 2), ROW)
function("input_among_outputs", lambda x: (x, x + 1), ROW)
function("view_among_outputs", lambda x: (lambda y: (y, y[0], y.t()))(x * 2), ROW)
function("transposed_input", lambda x: x.softmax(-1) @ x.t(), lambda g: torch.randn(64, 4, generator=g).t())
function("expanded_input", lambda x: x * 2 + 1, lambda g: torch.randn(1, 64, generator=g).expand(4, 64))
function("booleans", lambda a, b: (a > b) | (a < 0), ROW, ROW)
function("integers", lambda a, b: a * b + a // 3, integers(9, 4, 8), integers(9, 4, 8))
function("doubles", lambda x: (x * 1.1).sum(-1), lambda g: torch.randn(4, 8, generator=g, dtype=torch.float64))
function("scalar_tensor", lambda x, s: x * s, ROW, randn())
function("empty", lambda x, e: torch.cat([x, e]), ROW, randn(0, 64))
function("gathered", lambda x, i: x.gather(1, i), ROW, integers(64, 4, 5))
function("broadcast", lambda a, b: a + b, randn(4, 1, 8), randn(3, 1))
function("arange_inside", lambda x: x + torch.arange(x.shape[-1], device=x.device) * 0.5, ROW)
function("index_written", lambda x, i: x.clone().index_copy_(0, i, torch.zeros_like(x[:2])), ROW, lambda g: torch.tensor([3, 1]))
function("branch_on_values", branching, ROW)
function("slice_written", sliced, ROW)
function("chain_in_place", chained, ROW)
function("write_seen_through_view", shown, ROW)
function("size_by_values", selected, ROW)
function("writes_its_input", written, ROW)
add("relu_in_place", lambda: nn.Sequential(nn.Linear(64, 8), nn.ReLU(inplace=True)), ROW)
add("relu_of_input_in_place", lambda: nn.ReLU(inplace=True), ROW)
