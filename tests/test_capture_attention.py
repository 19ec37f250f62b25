"""What a model says about its attention reaches the operator, or refuses the capture; nothing vanishes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from agentcompile_core.stages.capture.attention import (
    CausalMask,
    DifferentHeads,
    PassThroughCache,
    Recorder,
    Unsupported,
    attention_function,
    mask_interface,
    recording,
)


def recorder() -> Recorder:
    caches = [torch.zeros(1, 16, 2, 8) for _ in range(2)]
    return Recorder(caches, [c.clone() for c in caches], torch.tensor([0]), caches[0].shape[1])


def attend(seen: Recorder, *, layer: int = 0, heads: int = 2, cached: bool = True, mask: Any = None, **keywords: Any) -> Tensor:
    q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, heads, 1, 8), torch.randn(1, heads, 1, 8)
    with recording(seen):
        if cached:
            k, v = PassThroughCache(seen).update(k, v, layer)
        return attention_function(nn.Identity(), q, k, v, mask, scaling=0.5, **keywords)[0]


def test_each_layer_attends_once() -> None:
    seen = recorder()
    attend(seen, layer=0)
    with pytest.raises(Unsupported, match="1 of 2 layers"):
        seen.finish()
    attend(seen, layer=1)
    seen.finish()


@pytest.mark.parametrize("keywords", [{"position_bias": torch.zeros(1)}, {"alibi": 1}, {"dropout": 0.1}, {"is_causal": False}])
def test_what_is_not_understood_refuses(keywords: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        attend(recorder(), **keywords)


def test_keywords_that_say_nothing_are_fine() -> None:
    attend(recorder(), position_ids=torch.zeros(1, 1), output_attentions=False, new_option=None)


def test_sinks_and_softcap_change_the_result() -> None:
    torch.manual_seed(0)
    plain = attend(recorder())
    torch.manual_seed(0)
    # One key: without a sink its weight is 1, with one as strong as the score it is less.
    with_sink = attend(recorder(), s_aux=torch.zeros(4))
    assert not torch.allclose(plain, with_sink) and bool((with_sink.abs() < plain.abs()).all())


def test_other_keys_than_the_cached_ones_refuse() -> None:
    with pytest.raises(Unsupported, match="other K and V"):
        attend(recorder(), cached=False)


def test_other_heads_are_reported() -> None:
    with pytest.raises(DifferentHeads) as caught:
        attend(recorder(), heads=4)
    assert (caught.value.kv_heads, caught.value.head_dim) == (4, 8)


def test_window_by_keyword_and_mask_must_agree() -> None:
    attend(recorder(), mask=CausalMask(5), sliding_window=5)
    attend(recorder(), mask=CausalMask(0), sliding_window=16)
    for mask, window in ((CausalMask(5), 6), (CausalMask(0), 6), (torch.zeros(1, 1, 1, 16), None)):
        with pytest.raises(Unsupported):
            attend(recorder(), mask=mask, sliding_window=window)


@pytest.mark.parametrize(("function", "window"), [
    (causal_mask_function, 0),
    (sliding_window_causal_mask_function(4), 4),
    (sliding_window_causal_mask_function(32), 0),
    (sliding_window_causal_mask_function(1), 1),
])
def test_mask_is_understood_by_asking_it(function: Any, window: int) -> None:
    assert mask_interface(kv_length=32, mask_function=function) == CausalMask(window)


@pytest.mark.parametrize("function", [
    chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
    or_masks(causal_mask_function, lambda b, h, q, kv: kv < 5),  # a prefix that everyone sees
    and_masks(causal_mask_function, lambda b, h, q, kv: kv != 3),  # a hole
    lambda b, h, q, kv: kv >= 0,  # both directions
], ids=["chunked", "prefix", "hole", "bidirectional"])
def test_other_masks_refuse(function: Any) -> None:
    mask = mask_interface(kv_length=32, mask_function=function)  # made for nothing, it would do no harm
    with pytest.raises(Unsupported, match="neither causal nor a sliding window"):
        attend(recorder(), mask=mask)
    with pytest.raises(Unsupported, match="neither causal nor a sliding window"):
        torch.zeros(1) + mask


def test_padding_mask_refuses() -> None:
    mask = mask_interface(kv_length=32, mask_function=causal_mask_function, attention_mask=torch.ones(1, 32))
    with pytest.raises(Unsupported, match="padding mask"):
        attend(recorder(), mask=mask)
