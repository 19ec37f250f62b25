"""Later ranges of positions when time is short: one choice for several of them, and none only where there is no time at all."""

import math
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_ranges import CONTEXT, SETTINGS, Worker, chosen, grid_of
from test_ranges import planned as planned

from agentcompile_core.budget import FIRST_S, RANGES_LEAST_S, RANGES_SHARE, Budget
from agentcompile_core.errors import Cause
from agentcompile_core.ir import ranges
from agentcompile_core.stages.select import ranges as later_ranges
from agentcompile_core.store import Store
from agentcompile_core.worker.client import WorkerLost


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
        start = starts[count - 1]
        assert found[-1][1] == max(ranges.inside(start, capacity), math.isqrt(start * capacity))
    else:
        assert [position for _, position in found] == [ranges.inside(start, capacity) for start in starts[:count]]


@pytest.mark.parametrize(("budget_s", "asked"), [(60.0, (1024, 4096)), (4.1, (1024, 4096)), (2.1, (1024,)), (1.1, (1024,)), (0.9, ())])
def test_short_of_time_one_choice_holds_for_all_that_is_behind(planned: Any, budget_s: float, asked: tuple[int, ...]) -> None:
    ctx, heard = planned[0], list[str]()
    listening = ctx.watched(lambda event: heard.append(str(getattr(event, "message", ""))))
    first, _, later, worker = chosen((listening, *planned[1:]), lambda position: 16, budget_s=budget_s)
    assert [q.position for q in worker.asked] == [position for _, position in ranges.judged(CONTEXT, len(asked))]
    assert tuple(log.start for log in later.logs) == asked
    held = [grid_of((*first, *later.selections), position) for position in (1024, CONTEXT)]
    assert (held == [{16}, {16}]) == bool(asked)
    assert any("as one range" in one for one in heard) == (len(asked) == 1)
    assert any("no time was left" in one for one in heard) == (not asked)


@settings(SETTINGS, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cold_s=st.sampled_from([0.5, 1.1, 2.1, 4.1, 60.0]), warm_s=st.sampled_from([0.0, 0.9, 1.1, 4.1, 60.0]))
def test_a_warm_run_repeats_the_ranges_of_the_cold_one_however_much_time_each_has(planned: Any, cold_s: float, warm_s: float) -> None:
    """Else it would ask what nobody has answered yet, and a warm compile would take as long as another search."""
    store = Store(None)
    cold, warm = (chosen(planned, lambda position: 16 if position < 4096 else 8, budget_s=s, store=store) for s in (cold_s, warm_s))
    assert warm[3].asked == [] and warm[2] == cold[2]
    other = (evolve(planned[0], config=evolve(planned[0].config, budget_s=planned[0].config.budget_s + 1.0)), *planned[1:])
    again = chosen(other, lambda position: 16 if position < 4096 else 8, store=store)
    assert tuple(log.start for log in again[2].logs) == ranges.starts(CONTEXT), "another budget is another search"


@pytest.mark.parametrize("text", ["", "3 1", "1 2", "-1 0", "1", "1 x", "1 1 1"])
def test_what_is_remembered_wrongly_is_not_believed(planned: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(None)
    monkeypatch.setattr(store, "text", lambda kind, key: text if kind == later_ranges.KIND else None)
    later, worker = chosen(planned, lambda position: 16, store=store)[2:]
    assert len(worker.asked) == len(later.logs) == 2


def test_a_failure_of_the_moment_is_not_remembered(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, call = Store(None), Worker.call

    def lost(self: Worker, *arguments: object, **named: object) -> object:
        raise WorkerLost(Cause.CRASH, "it is gone")

    monkeypatch.setattr(Worker, "call", lost)
    assert not chosen(planned, lambda position: 16, store=store)[2].logs
    monkeypatch.setattr(Worker, "call", call)
    assert len(chosen(planned, lambda position: 16, store=store)[2].logs) == 2
