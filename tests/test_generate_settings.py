"""Settings of a call are its own: whatever becomes of them, those of the model and of the caller stay what they are."""

from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.runtime.generation.settings import effective
from agentcompile_core.runtime.generation.settings import settings as merged

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "suppress_tokens": st.lists(st.integers(0, 9), min_size=1, max_size=3),
    "eos_token_id": st.lists(st.integers(0, 9), min_size=1, max_size=3),
    "bad_words_ids": st.just([[3, 4], [5]]), "sequence_bias": st.just([[[3], -1.0]]), "temperature": st.floats(0.1, 2.0),
    "repetition_penalty": st.sampled_from([1.0, 1.3]), "max_new_tokens": st.integers(1, 9), "cache_config": st.just({"a": [1]}),
}


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_nothing_that_a_call_could_change_is_shared(values: dict[str, Any]) -> None:
    own = transformers.GenerationConfig(**values)
    before = own.to_dict()
    found = merged(SimpleNamespace(generation_config=own), {})
    assert found.to_dict() == before and type(found) is type(own)
    for name, value in vars(found).items():
        if isinstance(value, list | dict):
            assert value is not getattr(own, name)
            value.clear()
        else:
            setattr(found, name, None)
    assert own.to_dict() == before


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_what_transformers_calls_changed_has_an_effect_unless_it_is_neutral(values: dict[str, Any]) -> None:
    config = transformers.GenerationConfig(**values)
    changed = set(config.to_diff_dict()) & set(values)
    without = {"eos_token_id", "max_new_tokens", "temperature", "cache_config"}
    if values.get("repetition_penalty") == 1.0:
        without.add("repetition_penalty")
    assert set(effective(config)) == changed - without


@pytest.mark.parametrize("given_too", [False, True])
def test_what_is_given_for_one_call_is_not_changed_either(given_too: bool) -> None:
    own, asked = transformers.GenerationConfig(suppress_tokens=[1]), transformers.GenerationConfig(suppress_tokens=[2])
    found = merged(SimpleNamespace(generation_config=own), {"max_new_tokens": 3}, asked if given_too else None)
    found.suppress_tokens.append(7)
    assert (own.suppress_tokens, asked.suppress_tokens) == ([1], [2]) and own.max_new_tokens is None
