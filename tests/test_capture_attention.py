"""What a model says about its attention reaches the operator, or refuses the capture; nothing vanishes."""

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from agentcompile_core.ir.graph import LayerHeads
from agentcompile_core.ops import operators
from agentcompile_core.stages.capture import mask_pattern
from agentcompile_core.stages.capture.attention import (
    CausalMask,
    DifferentCalls,
    DifferentHeads,
    PassThroughCache,
    Recorder,
    Tracing,
    Unsupported,
    attention_function,
    mask_interface,
    recording,
)
from agentcompile_core.stages.capture.known import knowing
from agentcompile_core.stages.capture.mask_pattern import Pattern, pattern_of


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


def test_layers_that_attend_more_often_than_a_configuration_says_are_counted() -> None:
    seen = recorder()
    for layer in (0, 3, 1, 2):
        attend(seen, layer=layer)
    with pytest.raises(DifferentCalls) as raised:
        seen.finish()
    assert raised.value.calls == 4


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


def test_other_heads_are_reported_of_all_layers_at_once() -> None:
    seen = recorder()
    seen.keys, seen.values = ([torch.zeros(1, 16, *heads) for heads in ((1, 8), (2, 8), (2, 4))] for _ in range(2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        for layer in range(3):
            attend(seen, layer=layer)
    with pytest.raises(DifferentHeads) as caught:
        seen.finish()
    assert caught.value.found == (LayerHeads(0, 2, 8, 8), LayerHeads(2, 2, 8, 8))


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


def in_chunks(size: int) -> Any:
    return chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(size=st.integers(1, 40), length=st.integers(1, 200), make=st.sampled_from([in_chunks, sliding_window_causal_mask_function]))
def test_windows_and_chunks_of_any_size_are_told_apart(size: int, length: int, make: Any) -> None:
    part = size if size < length else 0
    chunk = part if make is in_chunks and size > 1 else 0  # of one position each, they are windows of one
    assert pattern_of(make(size), length) == Pattern(window=0 if chunk else part, chunk=chunk)


def test_what_is_made_of_the_same_numbers_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of transformers' own functions; others, and those over tensors whose numbers may change, are asked anew."""
    asked: list[int] = []
    real = mask_pattern._asked

    def counting(function: Any, length: int, about: Any) -> Pattern:
        asked.append(length)
        return real(function, length, about)

    monkeypatch.setattr(mask_pattern, "_asked", counting)
    monkeypatch.setattr(mask_pattern, "_answers", {})
    for size, length in ((7, 50), (7, 50), (8, 50), (7, 51)):
        assert pattern_of(sliding_window_causal_mask_function(size), length) == Pattern(window=size)
    assert asked == [50, 50, 51]
    for size in (7, 8, 7):  # left_padding is a tensor of which nothing is known
        assert pattern_of(in_chunks(size), 30) == Pattern(chunk=size)
    assert asked[3:] == [30, 30, 30]
    bound = 4
    for bound in (4, 5, 4):
        assert pattern_of(lambda batch, head, query, key: (key <= query) & (key > query - bound), 20) == Pattern(window=bound)  # noqa: B023
    assert asked[6:] == [20, 20, 20]


@pytest.mark.parametrize(("length", "window", "chunk"), [(8192, 32, 4096), (8192, 16, 2048), (32768, 256, 16384), (2048, 16, 1024)])
def test_a_window_inside_of_chunks_is_none_of_either(length: int, window: int, chunk: int) -> None:
    """Few rows behind a border show it, and no probe of windows lies there."""
    def both(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window) & (key // chunk == query // chunk)

    with pytest.raises(Unsupported, match="neither causal"):
        pattern_of(both, length)


def test_a_block_that_looks_ahead_between_the_probes_refuses() -> None:
    """As of an image among text: a few rows see each other."""
    def block(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) | ((query >= 100) & (query < 104) & (key >= 100) & (key < 104))

    with pytest.raises(Unsupported, match="neither causal"):
        pattern_of(block, 16384)


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(size=st.integers(1, 40), length=st.integers(2, 60), make=st.sampled_from([in_chunks, sliding_window_causal_mask_function]),
       data=st.data())
def test_a_mask_that_differs_anywhere_refuses(size: int, length: int, make: Any, data: st.DataObject) -> None:
    """One answer turned round: what comes out is that very mask, or nothing."""
    row, column = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, length - 1))

    def turned(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return make(size)(batch, head, query, key) ^ ((query == row) & (key == column))

    try:
        found = pattern_of(turned, length)
    except Unsupported:
        return
    zero, every = torch.tensor(0), torch.arange(length)
    drawn = torch.as_tensor(turned(zero, zero, every[:, None], every[None]))
    assert torch.equal(drawn, operators.seen(every[:, None], every, found.window, found.chunk))


@pytest.mark.parametrize(("made", "understood"), [
    (lambda: torch.zeros(1, dtype=torch.int64), True), (lambda: torch.zeros(1, dtype=torch.int64, device="meta"), True),
    (lambda: torch.ones(2, dtype=torch.int64).new_zeros(1), True),
    (lambda: torch.zeros(1, dtype=torch.int64) + 0, False), (lambda: torch.arange(1), False),
    (lambda: torch.zeros(1, dtype=torch.int64).add_(3), False),
])
@pytest.mark.parametrize("length", [6, 32])
def test_a_mask_that_holds_traced_tensors_is_asked_with_what_is_known_of_them(made: Any, understood: bool, length: int) -> None:
    """As Llama 4's counts the padding before each row: in a trace that tensor has no numbers."""
    with FakeTensorMode(), knowing():
        mask = mask_interface(kv_length=length, mask_function=chunked_causal_mask_function(8, made()))
    if understood:
        assert mask == CausalMask(chunk=8 if length > 8 else 0)
    else:
        with pytest.raises(Unsupported, match="values a trace does not know"):
            attend(recorder(), mask=mask)


def test_chunks_reach_the_operator_and_scores_of_the_models_own_refuse() -> None:
    """The token at position 9 sees positions 8 and 9 of two layers with equal caches there, by a chunk of 8 or a window of 2."""
    seen = recorder()
    for caches in (seen.keys, seen.values):
        for cache in caches:
            cache.fill_(5.0)
        caches[1][:, :8] = -5.0
    seen.position.fill_(9)
    found = []
    for layer, mask in enumerate((CausalMask(chunk=8), CausalMask(2))):
        torch.manual_seed(0)
        found.append(attend(seen, mask=mask, layer=layer))
    torch.testing.assert_close(*found)
    with recording(evolve(seen, tracing=Tracing.OWN)), pytest.raises(Unsupported, match="in chunks"):
        torch.zeros(1, 1, 1, 16) + CausalMask(chunk=8)  # type: ignore[operator]


@pytest.mark.parametrize("function", [
    chunked_causal_mask_function(8, torch.tensor([3])),  # chunks that begin elsewhere
    and_masks(in_chunks(8), sliding_window_causal_mask_function(3)),  # chunks and windows
    and_masks(in_chunks(8), lambda b, h, q, kv: kv != 17),
    lambda b, h, q, kv: (kv <= q) & (kv // 8 == q // 8) & (q < 24),  # rows that see nothing
    or_masks(causal_mask_function, lambda b, h, q, kv: kv < 5),  # a prefix that everyone sees
    and_masks(causal_mask_function, lambda b, h, q, kv: kv != 3),  # a hole
    lambda b, h, q, kv: kv >= 0,  # both directions
], ids=["shifted chunks", "chunks and windows", "hole in a chunk", "empty rows", "prefix", "hole", "bidirectional"])
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


def test_what_a_stand_in_has_not_may_be_asked_for_and_refuses_where_it_is_used() -> None:
    mask, layer = CausalMask(), PassThroughCache(recorder()).layers[0]
    for one, name in ((mask, "dtype"), (layer, "store_compression_weights")):
        assert not hasattr(one, name) and getattr(one, name, 7) == 7
        with pytest.raises(Unsupported, match=name):
            getattr(one, name)
