"""What tests of drawn tokens share: transformers' processors that look at scores and at which tokens there were, with values for each."""

from typing import Any

import transformers
from hypothesis import settings
from hypothesis import strategies as st
from transformers.generation import logits_process

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=80)
VOCABULARY = 23
MADE: dict[str, st.SearchStrategy[Any]] = {
    "TemperatureLogitsWarper": st.floats(0.3, 3.0), "TopKLogitsWarper": st.integers(1, 30), "TopPLogitsWarper": st.floats(0.05, 1.0),
    "MinPLogitsWarper": st.floats(0.0, 0.5), "TypicalLogitsWarper": st.floats(0.2, 0.9), "EpsilonLogitsWarper": st.floats(1e-4, 0.1),
    "RepetitionPenaltyLogitsProcessor": st.floats(0.5, 3.0), "InfNanRemoveLogitsProcessor": st.none(), "LogitNormalization": st.none(),
    "SuppressTokensLogitsProcessor": st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),
}
FIRST = ("RepetitionPenaltyLogitsProcessor", "SuppressTokensLogitsProcessor")  # as in transformers; behind others nothing might be left


def in_order(names: list[str]) -> st.SearchStrategy[tuple[tuple[str, Any], ...]]:
    ordered = sorted(names, key=lambda name: name not in FIRST)
    return st.tuples(*(MADE[name].map(lambda value, name=name: (name, value)) for name in ordered))


CHOSEN = st.lists(st.sampled_from(sorted(MADE)), max_size=4, unique=True).flatmap(in_order)
PROMPT = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)


def processors(chosen: tuple[tuple[str, Any], ...]) -> transformers.LogitsProcessorList:
    makers = [(getattr(logits_process, name), value) for name, value in chosen]
    return transformers.LogitsProcessorList([maker() if value is None else maker(value) for maker, value in makers])
