"""Later ranges of positions when time is short: one choice for several of them, and none only where there is no time at all."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ranges import CONTEXT, SETTINGS, chosen, grid_of
from test_ranges import planned as planned

from agentcompile_core.budget import FIRST_S, RANGES_LEAST_S, RANGES_SHARE, Budget
from agentcompile_core.ir import ranges


@pytest.mark.parametrize(("total_s", "kept_s"), [(FIRST_S, 0.0), (FIRST_S + 1, RANGES_LEAST_S), (10.0, RANGES_LEAST_S), (100.0, 13.0)])
def test_a_little_time_is_kept_for_later_positions(total_s: float, kept_s: float) -> None:
    budget = Budget(total_s, clock=lambda: 0.0)
    budget.reserve("ranges", RANGES_SHARE, RANGES_LEAST_S)
    assert budget.left_s("search") == pytest.approx(total_s - kept_s)


@SETTINGS
@given(capacity=st.integers(1, 1 << 20), count=st.integers(0, 6))
def test_what_no_time_is_for_is_chosen_with_what_is_before_it(capacity: int, count: int) -> None:
    found, starts = ranges.judged(capacity, count), ranges.starts(capacity)
    assert [start for start, _ in found] == list(starts[:count])
    for (start, position), end in zip(found, [*(start for start, _ in found[1:]), capacity], strict=False):
        assert start < position < end
    if 0 < count < len(starts):
        assert found[-1][1] > ranges.middle(starts[0], capacity)
    else:
        assert [position for _, position in found] == [ranges.middle(start, capacity) for start in starts[:count]]


@pytest.mark.parametrize(("budget_s", "asked"), [(60.0, (1024, 4096)), (4.1, (1024, 4096)), (2.1, (1024,)), (1.1, (1024,)), (0.9, ())])
def test_short_of_time_one_choice_holds_for_all_that_is_behind(planned: Any, budget_s: float, asked: tuple[int, ...]) -> None:
    ctx, heard = planned[0], list[str]()
    listening = ctx.watched(lambda event: heard.append(str(getattr(event, "message", ""))))
    first, _, later, worker = chosen((listening, *planned[1:]), lambda position: 4, budget_s=budget_s)
    assert [q.position for q in worker.asked] == [position for _, position in ranges.judged(CONTEXT, len(asked))]
    assert tuple(log.start for log in later.logs) == asked
    held = [grid_of((*first, *later.selections), position) for position in (1024, CONTEXT)]
    assert (held == [{4}, {4}]) == bool(asked)
    assert any("as one range" in one for one in heard) == (len(asked) == 1)
    assert any("no time was left" in one for one in heard) == (not asked)
