"""A sum of which one element is unknown: an infinity of another element is no answer, NaN and finite sums stay what they are."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.ops.reference.bounded import Bounded
from agentcompile_core.ops.reference.pointwise import mean

ELEMENTS = (1.0, -2.0, math.inf, -math.inf, math.nan)


@given(st.lists(st.tuples(st.sampled_from(ELEMENTS), st.booleans()), min_size=1, max_size=6), st.booleans())
def test_an_infinite_sum_is_known_only_where_every_element_is(row: list[tuple[float, bool]], divide: bool) -> None:
    values = torch.tensor([[value for value, _ in row]], dtype=torch.float64)
    unknown = torch.tensor([[lost and math.isfinite(value) for value, lost in row]])
    found = mean(Bounded(values, torch.where(unknown, math.inf, 0.0).double()), [1], False, len(row), divide)
    plain = values.sum(1)
    if plain.isinf() and unknown.any():
        assert found.value.item() == 0.0 and found.error.item() == math.inf
    else:
        assert found.value.isnan() if plain.isnan() else found.value == plain / (len(row) if divide else 1)
