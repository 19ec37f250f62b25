"""The implementation passes the kit over a double of the package, computes what the operator does, and says what it refuses."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.testing import attention_case, chunked_case, linear_case
from agentcompile_runtime_flashattn import FlashAttention, agentcompile_implementations, attention
from agentcompile_runtime_flashattn.attention import is_installed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentcompile_core.ops import operators
from agentcompile_core.plugin_api import DType, Match, Origin, Reject, Schedule
from agentcompile_core.testing.implementation_conformance import ImplementationConformance

TARGET = ImplementationConformance.target
HALF = (DType.F16, DType.BF16)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor,
                            softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float, num_splits: int) -> Tensor:
    """What flash-attn's does, in torch's own operators: K and V [1, 1, KV, D] at ``cache_seqlens``, then one row of q [1, 1, H, D]."""
    assert cache_seqlens.dtype is torch.int32 and cache_seqlens.shape == (1,) and causal and num_splits >= 0
    assert all(x.dtype in (torch.float16, torch.bfloat16) and x.dtype is q.dtype and x.stride(-1) == 1 for x in (q, k_cache, v_cache, k, v))
    at = cache_seqlens.long()
    k_cache.index_copy_(1, at, k)
    v_cache.index_copy_(1, at, v)
    columns = torch.arange(k_cache.shape[1], device=q.device)
    hidden = (columns > at) | ((columns < at - window_size[0]) if window_size[0] >= 0 else False)
    group = q.shape[2] // k.shape[2]
    keys, values = (c[0].float().masked_fill(hidden.view(-1, 1, 1), 0.0).repeat_interleave(group, 1) for c in (k_cache, v_cache))
    scores = torch.einsum("hd,shd->hs", q[0, 0].float(), keys) * softmax_scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, values).to(q.dtype).view_as(q)


@pytest.fixture(autouse=True)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double in place of the package, except where a test wants the package itself."""
    if request.node.get_closest_marker("device"):
        return
    module: Any = ModuleType(attention.PACKAGE)
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, attention.PACKAGE, module)
    monkeypatch.setattr(attention, "is_installed", lambda: True)


class TestFlashAttention(ImplementationConformance):
    implementation = FlashAttention()
    cases = (attention_case(heads=(4, 2), head_dim=16, capacity=64),
             attention_case(heads=(2, 2), head_dim=8, capacity=40, window=8, dtype=DType.BF16))
    rejected = (linear_case(n=8, k=16), attention_case(heads=(2, 2), head_dim=8, capacity=40, rope="none"),
                attention_case(heads=(2, 2), head_dim=8, capacity=40, dtype=DType.F32),
                attention_case(heads=(2, 2), head_dim=12, capacity=40), chunked_case(heads=(2, 2), head_dim=16, capacity=40, chunk=11))


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    match, _ = attention_case(heads=(2, 2), head_dim=8, capacity=40)
    monkeypatch.setattr(attention, "is_installed", lambda: False)
    answer = FlashAttention().accepts(match, TARGET)
    assert isinstance(answer, Reject) and "install" in answer.reason
    (offered,) = agentcompile_implementations()
    assert offered.origin is Origin.THIRD_PARTY and offered.capturable


def check(match: Match, schedule: Schedule, position: int, seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    of = {o.name: getattr(torch, o.spec.dtype.value) for o in match.operands}
    given_ = {o.name: torch.randn(o.spec.shape, generator=generator).to(device, of[o.name]) for o in match.operands if o.name != "position"}
    given_["position"] = torch.tensor([position], device=device)
    wanted = {name: tensor.clone() for name, tensor in given_.items()}
    for name in ("k_cache", "v_cache"):
        given_[name][:, position:] = float("nan")
    width, window = match.integer("head_dim"), match.integer("window", 0)
    with torch.no_grad():
        FlashAttention().bind(match, schedule, TARGET)(**given_)
        q, k, v = (wanted[name].view(1, -1, 1, width) for name in ("q", "k", "v"))
        caches = wanted["k_cache"], wanted["v_cache"]
        found = operators.attention(q, k, v, *caches, wanted["position"], match.number("scale"), window, match.number("softcap", 0.0))
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(given_["out"].view(-1).float(), found.reshape(-1).float(), rtol=4 * eps, atol=4 * eps)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given_[name][:, : position + 1], wanted[name][:, : position + 1])
        assert given_[name][:, position + 1 :].isnan().all(), "nothing is written beyond the position"


@settings(max_examples=15, deadline=None)
@given(position=st.integers(0, 31), window=st.sampled_from([0, 1, 5, 32]), group=st.integers(1, 3), softcap=st.sampled_from([0.0, 20.0]),
       dtype=st.sampled_from(HALF), seed=st.integers(0, 99))
def test_it_computes_what_the_operator_does(position: int, window: int, group: int, softcap: float, dtype: DType, seed: int) -> None:
    match, _ = attention_case(heads=(2 * group, 2), head_dim=8, capacity=32, window=window, softcap=softcap, dtype=dtype)
    for schedule in FlashAttention().space(match, TARGET).points:
        check(match, schedule, position, seed, "cpu")


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("position", "capacity"), [(0, 64), (129, 512), (2047, 2048), (5000, 8192)])
def test_the_package_itself_does_so_on_the_device(position: int, capacity: int, dtype: DType) -> None:
    if not is_installed():
        pytest.skip("flash-attn is not installed")
    match, _ = attention_case(heads=(16, 8), head_dim=128, capacity=capacity, dtype=dtype)
    for schedule in FlashAttention().space(match, TARGET).points:
        check(match, schedule, position, position, "cuda")
