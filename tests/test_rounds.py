"""Rounds of one workload: they end where the time does, and long baselines are estimated from short requests."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st


def clocked(seconds: float, cost: Callable[[int, int], float]) -> tuple[Callable[[int, int], float], Callable[[], float]]:
    """A system whose requests take ``cost`` ms of a clock that nobody waits for, and what is left of ``seconds``."""
    passed = [0.0]

    def ask(given: int, new: int) -> float:
        passed[0] += cost(given, new) / 1e3
        return cost(given, new)

    return ask, lambda: seconds - passed[0]


def linear(given: int, new: int) -> float:
    """20 ms for the prompt; the step that leaves p positions behind takes 5 + p / 1000 ms."""
    return 20.0 + sum(5.0 + (given + step) / 1000 for step in range(1, new))


@settings(max_examples=10)
@given(st.integers(1, 4000), st.integers(129, 900))
def test_an_estimate_is_exact_where_steps_grow_with_their_context(bench: Any, given: int, new: int) -> None:
    asked: list[tuple[int, int]] = []
    module = bench("peers.estimate")
    e2e, first = module.estimated(lambda *one: (asked.append(one), linear(*one))[1], given, new)
    assert first == 20.0 and e2e == pytest.approx(linear(given, new), rel=1e-9)
    assert all(context + n <= given + new and context >= given for context, n in asked)
    at = module.contexts(given, new)
    assert {context for context, _ in asked} == set(at)
    step_ms = 5.0 + (given + new) / 1000
    assert sum(linear(*one) for one in asked) <= sum(module.cost_ms(linear(context, 1), step_ms) for context in at), "as was said"


@example(which=1, step_ms=2.5, off=0.05)
@given(which=st.integers(1, 9), step_ms=st.floats(0.5, 4.0), off=st.floats(-0.5, 0.5))
def test_one_prompt_that_took_longer_or_less_is_no_part_of_an_estimated_step(bench: Any, which: int, step_ms: float, off: float) -> None:
    asked: dict[int, int] = {}

    def ask(context: int, new: int) -> float:
        asked[context] = number = asked.get(context, -1) + 1
        return 215.0 * (1.0 + (off if number == which else 0.0)) + step_ms * (new - 1)

    e2e, first = bench("peers.estimate").estimated(ask, 12288, 8192)
    assert first == 215.0 and e2e == pytest.approx(first + 8191 * step_ms, rel=1e-9)


def test_long_baselines_are_estimated_and_say_so_and_ours_is_not(bench: Any) -> None:
    rounds, out = bench("peers.rounds"), []
    ask, left = clocked(float("inf"), linear)
    seen: dict[str, list[int]] = {"eager": [], rounds.OURS: []}
    lengths: set[int] = set()

    def noted(name: str) -> Callable[[int, int], float]:
        return lambda given, new: (seen[name].append(new), lengths.add(given), ask(given, new))[2]

    terms = rounds.Terms(repetitions=10, estimate_over_ms=60_000.0, left_s=left)
    rows = rounds.measured({name: noted(name) for name in seen}, rounds.Workload(8192, 8192), terms, out.append)
    found = {row["system"]: row for row in rows}
    assert found["eager"]["estimated"] and not found[rounds.OURS]["estimated"]
    assert found["eager"]["e2e_ms"] == pytest.approx(found[rounds.OURS]["e2e_ms"], rel=1e-9)
    assert max(seen["eager"]) == 65 and seen[rounds.OURS].count(8192) == 3 == found[rounds.OURS]["repetitions"], "runs over 30 s: three"
    assert len(out) == 3 and out[0][0]["repetitions"] == 1, "rows are written as they come"
    assert lengths == set(rounds.prompt_lengths(rounds.Workload(8192, 8192))) and rounds.prompt_lengths(rounds.Workload(8, 128)) == (8,)


@pytest.mark.parametrize("seconds, repetitions", [(7.0, 3), (30.0, 10), (3.0, None)])
def test_rounds_end_where_the_time_does(bench: Any, seconds: float, repetitions: int | None) -> None:
    rounds = bench("peers.rounds")
    ask, left = clocked(seconds, lambda given, new: 10.0 * new)  # 1 s whole
    terms = rounds.Terms(repetitions=10, estimate_over_ms=60_000.0, left_s=left)
    if repetitions is None:
        with pytest.raises(rounds.OutOfTime):
            rounds.measured({rounds.OURS: ask}, rounds.Workload(8, 100), terms, lambda rows: None)
        return
    (row,) = rounds.measured({rounds.OURS: ask}, rounds.Workload(8, 100), terms, lambda rows: None)
    assert row["repetitions"] == repetitions and left() >= 0 and row["step_ms"] == pytest.approx(10.0)
