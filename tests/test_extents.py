"""Extents and strides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.extents import span


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4))
def test_a_span_is_the_least_memory_that_holds_a_view(axes: list[tuple[int, int]]) -> None:
    extents, strides = [extent for extent, _ in axes], [stride for _, stride in axes]
    count = span(extents, strides)
    torch.zeros(count).as_strided(extents, strides)
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.zeros(count).as_strided(extents, strides, 1)


def test_a_stride_is_missing() -> None:
    with pytest.raises(ValueError):
        span((2, 2), (1,))
