"""One budget for the whole search: shares are kept, nobody restarts the clock, and compile ends when it says."""

import time
from types import SimpleNamespace

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core import pipeline
from agentcompile_core.budget import CHAIN_SHARE, EVEN_SHARE, WINNERS_SHARE, Budget
from agentcompile_core.configuration import Config
from agentcompile_core.ir.advice import Advice
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.stages import advise


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_comes_later_keeps_its_share() -> None:
    clock = Clock()
    budget = Budget(100.0, clock)
    budget.reserve("chain", 0.3)
    budget.reserve("winners", 0.1)
    budget.start()
    assert budget.left_s("search") == pytest.approx(60.0)
    clock.now += 70.0  # the search is late
    assert budget.left_s("search") == 0.0
    assert budget.left_s("winners") == 0.0 and budget.left_s("chain") == pytest.approx(20.0)
    clock.now += 40.0
    assert budget.left_s("chain") == 0.0


def test_the_chain_takes_no_more_than_its_share_of_an_early_end() -> None:
    budget = Budget(100.0, Clock())
    budget.reserve("chain", 0.3)
    assert budget.left_s("chain") == pytest.approx(30.0)


@pytest.mark.parametrize(("total", "kept"), [(2.0, 0.0), (8.0, 0.0), (12.0, 1.92), (40.0, 12.0)])
def test_little_time_goes_to_a_kernel_for_every_step_first(total: float, kept: float) -> None:
    budget = Budget(total, Clock())
    budget.reserve("chain", 0.3)
    assert budget.left_s("search") == pytest.approx(total - kept)


def test_the_clock_is_started_once() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    budget.start()
    clock.now += 4.0
    budget.start()
    assert budget.left_s() == pytest.approx(6.0)


@settings(derandomize=True, max_examples=80)
@given(total=st.floats(0.1, 1000.0),
       uses=st.lists(st.tuples(st.sampled_from(["search", "winners", "chain"]), st.floats(0.0, 1.0)), max_size=12))
def test_whoever_keeps_to_what_is_left_ends_within_the_total(total: float, uses: list[tuple[str, float]]) -> None:
    clock = Clock()
    budget = Budget(total, clock)
    budget.reserve("chain", CHAIN_SHARE)
    budget.reserve("winners", WINNERS_SHARE)
    budget.start()
    for purpose, share in uses:
        assert budget.stop_at(purpose) <= 1000.0 + total + 1e-6
        clock.now += share * budget.left_s(purpose)
    assert clock.now <= 1000.0 + total + 1e-6


def test_on_a_gpu_the_default_leaves_candidates_the_time_that_they_had() -> None:
    budget = Budget(Config().budget_s, Clock())
    budget.reserve("chain", CHAIN_SHARE)
    budget.reserve("winners", WINNERS_SHARE)
    assert budget.left_s("search") >= 90.0 and budget.left_s("chain") >= 40.0
    budget.reserve("chain", EVEN_SHARE)
    budget.reserve("ranges", EVEN_SHARE)
    assert budget.left_s("search") == pytest.approx(75.0) and budget.left_s("ranges") == budget.left_s("chain") >= 30.0


@pytest.fixture
def advice_cases():
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("advice_cases", Path(__file__).parent / "advice_cases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rounds_share_one_deadline_and_the_advisor_does_not_restart_it(advice_cases) -> None:
    """An advisor that sleeps through what it is given gets half of what is left in each round, never the whole budget again."""
    ctx, plans, advisor = advice_cases.world(lambda q: time.sleep(q.budget_s) or Advice(), budget_s=0.6, rounds=3)
    began = time.monotonic()
    for round_number in range(3):
        advise.run(plans, (), round_number, ctx)
    given = [question.budget_s for question in advisor.questions]
    assert time.monotonic() - began < 0.6 and sum(given) < 0.6
    assert given == sorted(given, reverse=True) and given[0] <= 0.3


@pytest.mark.parametrize("total_s, ranged, chain_s, ranges_s", [
    (150.0, False, 40.5, None), (150.0, True, 30.0, 30.0), (40.0, True, 8.0, 8.0), (30.0, True, 8.1, 3.9), (10.0, True, 0.864, 1.5)])
def test_later_positions_have_as_much_of_a_long_search_as_the_first_ones(total_s: float, ranged: bool, chain_s: float,
                                                                         ranges_s: float | None, advice_cases,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = advice_cases.world(lambda q: Advice(), budget_s=total_s)[0]
    monkeypatch.setattr(pipeline.chain, "possible", lambda ctx: True)
    ctx = evolve(ctx, config=evolve(ctx.config, validators=()), budget=Budget(total_s, Clock()))
    pipeline.begin_budget(ctx, ranged)
    assert ctx.budget.left_s("chain") == pytest.approx(chain_s)
    assert ctx.budget.left_s("search") == pytest.approx(total_s - chain_s - (ranges_s or 0.0))
    if ranges_s is not None:
        assert ctx.budget.left_s("ranges") == pytest.approx(ranges_s)


def test_the_pipeline_ends_within_the_budget_though_everyone_is_slow(advice_cases, monkeypatch: pytest.MonkeyPatch) -> None:
    given, taken = list[float](), list[float]()

    def take(seconds: float) -> None:
        taken.append(seconds)
        time.sleep(seconds)

    ctx, plans, _ = advice_cases.world(lambda q: take(q.budget_s) or Advice(), budget_s=3.0, rounds=5)

    def slow(candidates, ordered, left_s, ctx, earlier, again):
        given.append(left_s)
        take(left_s / 2)
        return Evaluated()

    monkeypatch.setattr(pipeline.lower, "run", lambda ordered, ctx: (SimpleNamespace(signature="s", step=None),))
    monkeypatch.setattr(pipeline.validate, "run", slow)
    monkeypatch.setattr(pipeline.chain, "possible", lambda ctx: True)
    monkeypatch.setattr("agentcompile_core.budget.FIRST_S", 0.0)  # as with a budget that is not small
    ctx = evolve(ctx, config=evolve(ctx.config, validators=()), budget=Budget(3.0))
    pipeline.begin_budget(ctx)
    began = time.monotonic()
    pipeline._rounds(plans, frozenset(), ctx, pipeline._Clock(ctx, {}))
    pauses = time.monotonic() - began - sum(taken)  # of a busy machine, which nobody can leave time for
    assert sum(taken) < 2.25 and (given or pauses > 0.3)
    assert ctx.budget.left_s("chain") > 0.6 - pauses
