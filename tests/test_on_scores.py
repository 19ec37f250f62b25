"""Which of transformers' processors a device may run by itself, and which of them are said as odds."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from processor_cases import CHOSEN, MADE, PROMPT, SETTINGS, VOCABULARY, processors
from transformers.generation import logits_process

from agentcompile_core.ops.odds import Odds, scores_of
from agentcompile_core.runtime.generation.on_scores import alone
from agentcompile_core.runtime.sampling import Alone

ODDS = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p", "MinPLogitsWarper": "min_p"}


@SETTINGS
@given(names=st.lists(st.sampled_from([*ODDS, "LogitNormalization"]), max_size=4), seed=st.integers(0, 99), data=st.data())
def test_odds_say_what_the_processors_do(names: list[str], seed: int, data: st.DataObject) -> None:
    """Where they come in transformers' order, each of them once, and nothing else is among them."""
    made = processors(tuple((name, data.draw(MADE[name])) for name in names))
    odds = alone(made, frozenset()).odds
    order = [list(ODDS).index(name) if name in ODDS else -1 for name in names]
    assert (odds is not None) == (order == sorted(set(order)) and -1 not in order)
    if odds is not None:
        logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
        wanted = made(torch.zeros(1, 1, dtype=torch.int64), logits[None])[0]
        assert torch.equal(scores_of(logits, odds), wanted)


@pytest.mark.parametrize("name", ["TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"])
@pytest.mark.parametrize("named", [{"min_tokens_to_keep": 2}, {"filter_value": -5.0}])
def test_other_settings_of_a_processor_are_no_odds(name: str, named: dict[str, Any]) -> None:
    one = getattr(logits_process, name)(2 if name == "TopKLogitsWarper" else 0.5, **named)
    found = alone([one], frozenset())
    assert found is not None and found.odds is None


def every_processor() -> list[type]:
    return [each for _, each in inspect.getmembers(logits_process, inspect.isclass)
            if issubclass(each, transformers.LogitsProcessor) and each is not transformers.LogitsProcessor]


@SETTINGS
@given(chosen=CHOSEN, scores=st.lists(st.floats(-9, 9, width=32), min_size=VOCABULARY, max_size=VOCABULARY), ids=PROMPT,
       others=PROMPT, times=st.integers(1, 3))
def test_whom_the_device_runs_alone_looks_at_nothing_else(chosen, scores, ids, others, times) -> None:
    made = processors(chosen)
    known = alone(made, frozenset())
    assert known is not None
    first, given_scores = made(torch.tensor([ids]), torch.tensor([scores])), torch.tensor([scores])
    seen = [*reversed(ids), *ids, ids[0]] if known.of_tokens else others
    for _ in range(times):
        assert torch.equal(made(torch.tensor([seen]), given_scores.clone()), first)


def test_every_other_processor_is_the_hosts() -> None:
    """Whatever transformers adds is unknown until somebody has looked at it."""
    for each in every_processor():
        one = object.__new__(each)
        one.__dict__ |= dict.fromkeys(ODDS.values(), 1)
        assert (alone([one], frozenset()) is not None) == (each.__name__ in MADE), each.__name__


def test_a_class_derived_from_a_known_one_is_the_hosts() -> None:
    class Own(transformers.TopKLogitsWarper):
        pass

    assert alone([Own(3)], frozenset()) is None
    assert alone([logits_process.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2)], frozenset()) is None
    assert alone([lambda ids, scores: scores], frozenset()) is None
    assert alone([], frozenset({3})) == Alone(settings=(), eos=frozenset({3}), odds=Odds())
