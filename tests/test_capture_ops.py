"""The operators of namespace agentcompile against plain formulas, their fakes, and the float64 mode."""

import gc
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentcompile_core.ops import operators as ops

KERNELS = torch.ops.agentcompile


def reference_attention(
    q: Tensor, keys: Tensor, values: Tensor, position: int, scale: float, window: int, softcap: float, sinks: Tensor | None, size: int
) -> Tensor:
    """Row by row in float64: [1, T, H, D] from q [1, H, T, D] and keys, values [S, KV, D]."""
    heads, count = q.shape[1:3]
    group = heads // keys.shape[1]
    out = torch.empty(1, count, heads, q.shape[3], dtype=torch.float64)
    for h in range(heads):
        for t in range(count):
            last = position + t
            first = max(0, last - window + 1 if window else 0, last // size * size if size else 0)
            scores = keys[first : last + 1, h // group].double() @ q[0, h, t].double() * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[h : h + 1].double()])
            weights = scores.softmax(0)[: last + 1 - first]
            out[0, t, h] = weights @ values[first : last + 1, h // group].double()
    return out


@given(
    count=st.integers(1, 6), position=st.integers(0, 9), group=st.sampled_from([1, 2, 3]), window=st.sampled_from([0, 1, 4]),
    softcap=st.sampled_from([0.0, 2.0]), with_sinks=st.booleans(), fresh=st.booleans(), size=st.sampled_from([0, 1, 3, 5, 40]),
)
def test_attention_appends_and_attends(
    count: int, position: int, group: int, window: int, softcap: float, with_sinks: bool, fresh: bool, size: int
) -> None:
    generator = torch.Generator().manual_seed(count * 100 + position)
    position = 0 if fresh else position
    kv_heads, dim, capacity = 2, 4, 16

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = draw(1, kv_heads * group, count, dim), draw(1, kv_heads, count, dim), draw(1, kv_heads, count, dim)
    k_cache, v_cache = draw(1, capacity, kv_heads, dim), draw(1, capacity, kv_heads, dim)
    want_k, want_v = k_cache.clone(), v_cache.clone()
    want_k[:, position : position + count] = k.transpose(1, 2)
    want_v[:, position : position + count] = v.transpose(1, 2)
    sinks = draw(kv_heads * group) if with_sinks else None
    got = KERNELS.attention(q, k, v, k_cache, v_cache, torch.tensor([position]), 0.3, window, softcap, sinks, fresh, chunk=size)
    want = reference_attention(q, want_k[0], want_v[0], position, 0.3, window, softcap, sinks, size)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    assert torch.equal(k_cache, want_k) and torch.equal(v_cache, want_v)
    assert got.is_contiguous()


@pytest.mark.parametrize("position", [0, 13, 15])
def test_attention_drops_rows_beyond_the_capacity(position: int) -> None:
    """Padding rows of a last chunk may reach beyond the cache; the rows that fit are untouched by them."""
    rows = torch.arange(1.0, 9.0).reshape(1, 1, 8, 1).expand(1, 1, 8, 2).contiguous()
    cache = torch.zeros(1, 16, 1, 2)
    ops.append(cache, rows, torch.tensor([position]), fresh=False)
    kept = min(8, 16 - position)
    assert cache[0, position : position + kept, 0, 0].tolist() == list(range(1, kept + 1))
    assert not bool(cache[0, :position].any()) and not bool(cache[0, position + kept :].any())


def test_attention_needs_no_number_from_the_device() -> None:
    """On a device where the position cannot be read (here: meta), every variant still runs: it can be captured."""
    with torch.device("meta"):
        for count in (1, 4):
            q, k = torch.empty(1, 4, count, 8), torch.empty(1, 2, count, 8)
            cache, position = torch.empty(1, 16, 2, 8), torch.empty(1, dtype=torch.int64)
            for softcap in (0.0, 2.0):
                out = ops.attention(q, k, k, cache, cache, position, 0.5, 3, softcap, torch.empty(4), chunk=5)
                assert out.shape == (1, count, 4, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rms_norm_rounds_as_huggingface(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    x = (torch.randn(3, 64) * 5).to(dtype)
    for cls, one_plus in ((LlamaRMSNorm, False), (GemmaRMSNorm, True)):
        norm = cls(64, eps=1e-5).to(dtype)
        norm.weight.data.normal_()
        assert torch.equal(KERNELS.rms_norm(x, norm.weight.data, 1e-5, one_plus), norm(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rope_is_huggingfaces_and_leaves_the_rest(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 5, 16).to(dtype), torch.randn(1, 2, 5, 16).to(dtype)
    cos, sin = KERNELS.rotary_embedding(torch.arange(5)[None], torch.linspace(1, 0.1, 8), 1.0, dtype)
    want = apply_rotary_pos_emb(q, k, cos, sin)
    assert torch.equal(KERNELS.rope(q, cos, sin), want[0]) and torch.equal(KERNELS.rope(k, cos, sin), want[1])
    wide = torch.cat([q, q], dim=-1)
    partial = KERNELS.rope(wide, cos, sin)
    assert torch.equal(partial[..., :16], want[0]) and torch.equal(partial[..., 16:], q)


def test_decode_state_moves() -> None:
    ids, position, history = torch.tensor([[5]]), torch.tensor([3]), torch.full((8,), -1)
    KERNELS.start_decode(torch.tensor([9]), ids, position, history, torch.tensor([2]), torch.tensor([2]))
    assert (ids.tolist(), position.tolist(), history.tolist()) == ([[9]], [4], [-1, -1, -1, -1, 9, -1, -1, -1])
    KERNELS.advance(torch.tensor([6]), ids, position, history)
    assert (ids.tolist(), position.tolist(), history.tolist()) == ([[6]], [5], [-1, -1, -1, -1, 9, 6, -1, -1])


def test_argmax_takes_the_first_maximum_and_nan() -> None:
    logits = torch.tensor([[[1.0, 7.0, 7.0, 2.0]]])
    assert KERNELS.argmax(logits).tolist() == [1]
    logits[0, 0, 3] = float("nan")
    assert KERNELS.argmax(logits).tolist() == [3]


def test_float64_operands_are_computed_in_float64() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 32, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w
    torch.testing.assert_close(KERNELS.rms_norm(x, w, 1e-6), want, rtol=1e-14, atol=1e-14)
    cos, _ = KERNELS.rotary_embedding(torch.tensor([[7]]), torch.tensor([0.1], dtype=torch.float64), 1.0, torch.float64)
    assert abs(float(cos[0, 0, 0]) - float(torch.cos(torch.tensor(0.7, dtype=torch.float64)))) < 1e-15


def test_operators_survive_a_second_import() -> None:
    held = KERNELS.rope.default  # as a prepared graph holds it
    again = importlib.reload(ops)
    gc.collect()
    assert set(again.SCHEMAS) == {"attention", "rotary_embedding", "rms_norm", "layer_norm", "rope", "argmax", "cached", "masked",
                                  "expert_linear", "recurrence", "causal_convolution", "advance", "advance_rows", "start_decode"}
    assert KERNELS.argmax(torch.tensor([[[0.0, 1.0]]])).tolist() == [1]
    x = torch.randn(1, 2, 1, 4)
    assert torch.equal(held(x, torch.ones(1, 1, 4), torch.zeros(1, 1, 4)), x)


@pytest.mark.parametrize("count", [1, 3])
def test_fakes_agree_with_the_bodies(count: int) -> None:
    q, k = torch.randn(1, count, 4, 8).transpose(1, 2), torch.randn(1, count, 2, 8).transpose(1, 2)
    cache, cos = torch.zeros(1, 16, 2, 8), torch.randn(1, count, 8)
    token, one = torch.tensor([1]), torch.tensor([1])
    calls: tuple[tuple[object, tuple[object, ...]], ...] = (
        (KERNELS.attention.default, (q, k, k, cache, cache.clone(), torch.tensor([2]), 0.5)),
        (KERNELS.rope.default, (q, cos, cos)),
        (KERNELS.rms_norm.default, (q, torch.ones(8), 1e-6)),
        (KERNELS.rotary_embedding.default, (torch.zeros(1, count, dtype=torch.int64), torch.ones(4), 1.0, torch.float16)),
        (KERNELS.argmax.default, (torch.randn(1, 1, 9),)),
        (KERNELS.advance.default, (token, torch.zeros(1, 1, dtype=torch.int64), one, torch.zeros(4, dtype=torch.int64))),
    )
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
