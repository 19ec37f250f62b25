"""What is known of tensors in a trace: never more than holds for every position."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_models import TOKENS, WORKLOAD, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import causal_mask_function
from transformers.models.opt import modeling_opt
from transformers.models.xglm import modeling_xglm

from agentcompile_core.stages.capture.attention import CausalMask, mask_interface
from agentcompile_core.stages.capture.known import Known, knowing, known
from agentcompile_core.stages.capture.language_model import capture_language_model

ORDERS: tuple[Callable[[Any, Any], Any], ...] = (operator.gt, operator.ge, operator.lt, operator.le)
STEPS: tuple[Callable[[Any, int], Any], ...] = (
    operator.add, operator.sub, lambda x, n: n + x, lambda x, n: n - x, lambda x, n: x.clamp(max=n), lambda x, n: x.clamp(min=n),
)
small = st.integers(-20, 20)


@settings(max_examples=80, deadline=None)
@given(position=st.integers(0, 9), steps=st.lists(st.tuples(st.sampled_from(STEPS), small), max_size=4),
       order=st.sampled_from(ORDERS), limit=small)
def test_what_a_span_decides_holds_for_every_position(
    position: int, steps: list[tuple[Callable[[Any, int], Any], int]], order: Callable[[Any, Any], Any], limit: int
) -> None:
    """The trace has one number; where a span answers for it, all positions would have answered the same."""
    def judged(at: int) -> bool:
        value = torch.tensor(at)
        for step, number in steps:
            value = step(value, number)
        return bool(order(value, limit))

    with Known() as about:
        value = about.lies_in(torch.tensor(position), 0, 9)
        for step, number in steps:
            value = step(value, number)
        compared = order(value, limit)
        found, decided = bool(compared), about._fact(compared) is not None
    assert found == judged(position)
    if decided:
        assert {judged(at) for at in range(10)} == {found}


@settings(max_examples=40, deadline=None)
@given(position=st.integers(0, 9), before=st.integers(0, 3), more=st.integers(0, 5), dtype=st.sampled_from((torch.int64, torch.float32)))
def test_numbers_from_a_position_on_are_counted_without_asking_for_it(position: int, before: int, more: int, dtype: torch.dtype) -> None:
    """TrOCR, MVP and RoFormer make their positions as such a range, of which a trace must know only how long it is."""
    counts: list[Any] = []

    class Counted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts.extend(args if func is torch.arange else ())
            return func(*args, **(kwargs or {}))

    with Counted(), Known() as about:
        first = about.lies_in(torch.tensor(position), 0, 9) - before + 1
        found = torch.arange(first, 2 + first + more - 1, dtype=dtype)
        other = about.lies_in(torch.tensor(position), 0, 9) * 2
    assert counts == [more + 1]
    assert torch.equal(found, torch.arange(position - before + 1, position - before + 2 + more, dtype=dtype)) and found.dtype is dtype
    wanted = torch.arange(position - before + 1, 2 * position + 20)
    with Counted(), about:
        assert torch.equal(torch.arange(first, other + 20), wanted)
    assert isinstance(counts[-1], torch.Tensor)  # how far that is depends on the position


def test_an_index_that_can_be_one_number_only_is_that_number() -> None:
    with Known() as about:
        zero = about.lies_in(torch.tensor(7), 0, 9).clamp(max=0)
        assert torch.equal(torch.arange(5)[zero:], torch.arange(5))


@pytest.mark.parametrize(("made", "ones"), [
    (lambda: torch.ones(2, 3).to(torch.bool)[:, 1:], True),
    (lambda: torch.zeros(2).new_ones(4).expand(3, 4).long(), True),
    (lambda: torch.zeros(2, 3), False),
    (lambda: torch.ones(2, 3) * 2, False),
    (lambda: torch.ones(2, 3).cumsum(-1), False),
    (lambda: torch.ones(2, 3).masked_fill(torch.eye(3)[:2] > 0, 0), False),
], ids=["cast and cut", "expanded", "zeros", "multiplied", "summed", "filled"])
def test_masks_of_ones_are_known(made: Callable[[], torch.Tensor], ones: bool) -> None:
    with Known() as about:
        assert about.is_ones(made()) is ones


@pytest.mark.parametrize(("made", "number"), [
    (lambda: torch.zeros(3, dtype=torch.int64)[:2], 0), (lambda: torch.ones(2).new_zeros(2, 2).bool(), 0),
    (lambda: torch.zeros_like(torch.arange(3)), 0), (lambda: torch.ones(2, 2).expand(3, 2, 2), 1), (lambda: torch.zeros(2) + 1, None),
    (lambda: torch.zeros(2).add_(1), None), (lambda: torch.arange(1), None),
], ids=["cut", "cast", "like another", "expanded", "added to", "written", "counted"])
def test_what_fills_a_tensor_is_known(made: Callable[[], torch.Tensor], number: int | None) -> None:
    with Known() as about:
        assert about.filled_with(made()) == number


@pytest.mark.parametrize("write", [
    lambda mask: mask.__setitem__((0, 0), 0), lambda mask: mask.zero_(), lambda mask: mask.view(-1).fill_(0),
    lambda mask: torch.zeros(2, 3, out=mask), lambda mask: mask.__imul__(0),
])
def test_a_mask_that_was_written_is_not_known(write: Callable[[torch.Tensor], Any]) -> None:
    with Known() as about:
        mask = torch.ones(2, 3)
        write(mask)
        assert not about.is_ones(mask)


def test_a_write_says_nothing_of_what_lies_elsewhere_and_all_of_what_lies_there() -> None:
    """RemBERT adds up embeddings in place, of the type of its mask; and a write by another type is one, too."""
    with Known() as about:
        mask, other = torch.ones(2, 3), torch.ones(2, 3)
        part = mask[:, 1:]
        other += 1
        assert about.is_ones(mask) and about.is_ones(part)
        mask.view(torch.int32).zero_()
        assert not about.is_ones(mask) and not about.is_ones(part)


def test_ones_of_as_many_tokens_as_there_are_hide_none_of_those_that_there_may_be() -> None:
    """RemBERT and MegatronBERT make such a mask, whose length a trace does not know."""
    with Known() as about:
        mask = torch.ones((1, 1 + about.lies_in(torch.tensor(3), 0, 9)))
        assert mask.shape == (1, 10) and about.is_ones(mask)
        assert torch.zeros((1, 1 + about.lies_in(torch.tensor(3), 0, 9))).shape == (1, 4)


def test_a_number_that_was_written_is_not_known() -> None:
    with Known() as about:
        number = about.lies_in(torch.tensor(3), 0, 9)
        number += 20
        assert bool(number > 10)


def test_asking_a_mask_what_it_means_forgets_nothing() -> None:
    with knowing() as about:
        number, mask = about.lies_in(torch.tensor(3), 0, 9), torch.ones(1, 32).bool()
        assert mask_interface(kv_length=32, mask_function=causal_mask_function, attention_mask=mask) == CausalMask()
        assert about.is_ones(mask) and about._fact(number > 20) is False


def test_a_model_that_asks_whether_its_table_is_long_enough_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As XGLM of transformers 5.17 does, whose cache says its length as a tensor."""
    def asking(self: Any, position_ids: torch.Tensor, past_key_values_length: Any = 0) -> torch.Tensor:
        if 2 + position_ids.shape[1] + past_key_values_length > self.weights.size(0):
            raise AssertionError("no position of the context lies behind the table")
        return self.weights[position_ids + self.offset]

    monkeypatch.setattr(modeling_xglm.XGLMSinusoidalPositionalEmbedding, "forward", asking)
    model = tiny("xglm", {"vocab_size": 128, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4,
                          "max_position_embeddings": 64, **TOKENS, "pad_token_id": 0})
    assert capture_language_model(model, "xglm", WORKLOAD).eager_reason == ""


@pytest.mark.parametrize("ones", [True, False])
def test_a_model_that_makes_its_padding_mask_itself_is_captured_where_it_hides_nothing(ones: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As OPT of transformers 5.17 does."""
    original = modeling_opt.create_causal_mask

    def masked(attention_mask: Any = None, **keywords: Any) -> Any:
        made = torch.ones(1, 24) if ones else torch.ones(1, 24).tril()
        return original(attention_mask=made, **keywords)

    monkeypatch.setattr(modeling_opt, "create_causal_mask", masked)
    model = tiny("opt", {"vocab_size": 128, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "max_position_embeddings": 64, "word_embed_proj_dim": 32, **TOKENS})
    reason = capture_language_model(model, "opt", WORKLOAD).eager_reason
    assert reason == "" if ones else "padding mask" in reason


def test_nothing_is_known_outside_of_a_trace() -> None:
    assert known() is None
    with knowing() as about:
        assert known() is about
    assert known() is None
