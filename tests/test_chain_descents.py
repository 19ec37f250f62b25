"""The chain descends twice, in two orders: what the first order misses is found, the log leads to what is selected, the budget is kept."""

import functools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chain_neighbours import MARGIN, selected, step

from agentcompile_core.ir.decisions import CHAIN_MARGIN, ChainLog, ChainTrial
from agentcompile_core.ir.plan import Cover, Fusion, Step
from agentcompile_core.ir.selection import Basis, Selection
from agentcompile_core.report import audit, audit_chain
from agentcompile_core.worker import chain_search, descent, neighbours, paired
from agentcompile_core.worker.chain_question import Alternative, ChainAnswer, changes

REGIONS = {"s": ("a", "b", "c"), "t": ("d", "e")}  # the steps of each, in its order; both occur once
CAPTURE_S, SAMPLE_S = 0.05, 0.003
Choice = dict[str, int]  # of each match that is not on the framework
SETTINGS = settings(max_examples=100, deadline=None, derandomize=True)


def region(signature: str) -> Any:
    nodes = [SimpleNamespace(name=f"node_{place}") for place in REGIONS[signature]]
    return SimpleNamespace(signature=signature, graph=SimpleNamespace(nodes=nodes), instances=(None,))


def selections() -> tuple[Selection, ...]:
    return tuple(Selection(signature=s, region=s, cover=Cover(matches=places, fusion=Fusion.FULL, rank=0), basis=Basis.MEASURED,
                           steps=tuple(selected(place, 0) for place in places)) for s, places in REGIONS.items())


def choice_of(selections: tuple[Selection, ...]) -> Choice:
    return {x.step.match_id: int(x.step.schedule["number"]) for s in selections for x in s.steps}


def other(place: str, number: int | None, later: bool = False) -> Alternative:
    """Another way to do a step; None: the framework."""
    signature = next(s for s, places in REGIONS.items() if place in places)
    return Alternative(signature=signature, match_id=place, selected=None if number is None else selected(place, number), later=later)


class Made(SimpleNamespace):
    """A variant of the step, which is told from others by itself."""

    __hash__ = object.__hash__


class Search(chain_search.ChainSearch):
    """A chain whose step takes ``us(choice)``, on a clock that goes on when it captures and samples."""

    def __init__(self, us: Callable[[Choice], float], alternatives: tuple[Alternative, ...], budget_s: float = 1e9,
                 covers: tuple[Selection, ...] = ()) -> None:
        question: Any = SimpleNamespace(selections=selections(), alternatives=alternatives, covers=covers,
                                        regions=tuple(map(region, REGIONS)), budget_s=budget_s, margin=CHAIN_MARGIN * MARGIN,
                                        with_framework=False, earlier=())
        super().__init__(question, lambda what: None)
        self.us, self.now, self.captures = us, 0.0, list[float]()
        self.alive, self.most_alive = weakref.WeakSet[Made](), 0

    def captured(self, selections: tuple[Selection, ...]) -> Any:
        self.captures.append(self.now)
        self.now += CAPTURE_S
        choice = choice_of(selections)

        def sample_us() -> float:
            self.now += SAMPLE_S
            return self.us(choice)

        variant = Made(sample_us=sample_us, wrong=lambda: "")
        self.alive.add(variant)
        self.most_alive = max(self.most_alive, len(self.alive))
        return variant

    def stand_at(self, position: int) -> None:
        self.now += SAMPLE_S


@contextmanager
def clock_of(search: Search) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (chain_search, descent):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: search.now))
        yield


def answered(search: Search) -> ChainAnswer:
    with clock_of(search):
        return search.sweep()


def rugged(seed: int) -> Callable[[Choice], float]:
    """Times of a landscape in which every choice is its own."""
    return lambda choice: random.Random(f"{seed} {sorted(choice.items())}").uniform(95.0, 105.0)


def everything(options: int = 3) -> tuple[Alternative, ...]:
    """Some ways to do every step, its removal, and some more that come later."""
    places = [place for places in REGIONS.values() for place in places]
    first = [other(place, number) for place in places for number in (*range(options), None)]
    return (*first, *(other(place, number, later=True) for place in places for number in range(options, options + 2)))


def log_of(found: ChainAnswer) -> ChainLog:
    return ChainLog(started=tuple((s.signature, x.step) for s in selections() for x in s.steps), trials=found.trials)


def steps_of(selections: tuple[Selection, ...]) -> dict[str, dict[str, Step]]:
    return {s.signature: {x.step.match_id: x.step for x in s.steps} for s in selections}


TRAP = {(1, 0): 98.0, (0, 1): 99.0, (2, 1): 95.0, (1, 1): 100.0, (2, 0): 100.5}  # of a and c, which are no neighbours


def test_what_the_first_order_misses_the_second_finds() -> None:
    search = Search(lambda choice: TRAP.get((choice["a"], choice["c"]), 100.0), (other("a", 1), other("a", 2), other("c", 1)))
    found = answered(search)
    assert choice_of(found.selections) == {"a": 2, "b": 0, "c": 1, "d": 0, "e": 0} and found.us == 95.0
    *descended, end = found.trials
    assert {end.step, *(one for _, one in end.beside)} == {step("a", 2), step("c", 1)} and end.taken and end.ratio == pytest.approx(95 / 98)
    assert [trial.step for trial in descended if trial.taken] == [step("a", 1)], "what the second tried on its way is not in the log"
    assert found.accepted == 2 and found.tried == len(descended)


def test_a_second_end_that_is_slower_changes_nothing_and_is_told() -> None:
    times = {**TRAP, (2, 1): 98.5}
    found = answered(Search(lambda choice: times.get((choice["a"], choice["c"]), 100.0), (other("a", 1), other("a", 2), other("c", 1))))
    assert choice_of(found.selections)["a"] == 1 and found.us == 98.0
    assert found.trials[-1].beside and not found.trials[-1].taken and found.trials[-1].ratio == pytest.approx(98.5 / 98.0)


def test_a_second_end_with_which_the_step_is_wrong_is_not_taken() -> None:
    search = Search(lambda choice: TRAP.get((choice["a"], choice["c"]), 100.0), (other("a", 1), other("a", 2), other("c", 1)))
    made = search.captured

    def captured(selections: tuple[Selection, ...]) -> Any:
        variant = made(selections)
        if choice_of(selections)["a"] == 2 and choice_of(selections)["c"] == 1:
            variant.wrong = iter(["", "it differs"]).__next__  # when it is taken on the way, and when it is compared as a whole
        return variant

    search.captured = captured  # type: ignore[method-assign]
    found = answered(search)
    assert found.us == 98.0 and found.trials[-1].refused == "it differs" and not found.trials[-1].taken
    assert audit_chain.replayed(log_of(found), MARGIN).held == steps_of(found.selections)


@SETTINGS
@given(seed=st.integers(0, 10_000), budget_s=st.sampled_from([0.3, 1.0, 3.0, 1e9]), noise=st.sampled_from([0.0, 0.002, 0.02]))
def test_the_log_leads_to_what_is_selected(seed: int, budget_s: float, noise: float) -> None:
    times, draw = rugged(seed), random.Random(seed)
    search = Search(lambda choice: times(choice) * (1.0 + draw.uniform(0.0, noise)), everything(), budget_s)
    found = answered(search)
    log = log_of(found)
    again = audit_chain.replayed(log, MARGIN)
    assert again.problems == () and again.held == steps_of(found.selections)
    for signature in REGIONS:  # the audit makes each region's choice again by the trials that change it
        own = audit_chain.replayed(audit._of_region(log, signature), MARGIN)
        assert own.problems == () and own.held.get(signature, {}) == steps_of(found.selections)[signature]
    assert noise or found.us <= found.first_us
    turned = tuple(evolve(t, taken=not t.taken) if not t.alone else t for t in found.trials)
    assert len(audit_chain.replayed(evolve(log, trials=turned), MARGIN).problems) == sum(not t.alone for t in found.trials)


def test_ends_that_differ_in_several_regions_and_in_steps_that_go_are_among_them() -> None:
    ends = [found.trials[-1] for found in (answered(Search(rugged(seed), everything())) for seed in range(60)) if found.trials]
    taken = [trial for trial in ends if trial.taken and not trial.alone]
    assert any(trial.without for trial in taken) and any(len(trial.signatures) == 2 for trial in taken)
    assert any(trial.beside and trial.step is not None for trial in taken)


@SETTINGS
@given(seed=st.integers(0, 10_000))
def test_what_comes_later_takes_nothing_from_what_comes_first(seed: int) -> None:
    """However short the time is: what is tried without them is tried with them as well, and before any of them."""
    def trials(alternatives: tuple[Alternative, ...]) -> list[ChainTrial]:
        search = Search(rugged(seed), alternatives)
        with clock_of(search):
            one = descent.Descent(search._try_out, search.q.selections, search.captured(search.q.selections), search.q.regions, 1e9)
            one.run(alternatives)
        return one.trials

    first = tuple(a for a in everything() if not a.later)
    alone = trials(first)
    assert trials(everything())[:len(alone)] == alone
    assert {(t.match_id, t.step) for t in alone if t.alone} >= {(a.match_id, a.step) for a in first if a.step not in
                                                                  {x.step for s in selections() for x in s.steps}}


@SETTINGS
@given(seed=st.integers(0, 10_000))
def test_a_descent_ends_where_nothing_that_came_close_helps(seed: int) -> None:
    """Neither alone nor with a neighbour."""
    search, ways = Search(rugged(seed), everything()), {(a.signature, a.step): a for a in everything()}
    with clock_of(search):
        one = descent.Descent(search._try_out, search.q.selections, search.captured(search.q.selections), search.q.regions, 1e9)
        one.run(everything())
    bar = search.us(choice_of(one.held)) * (1.0 - CHAIN_MARGIN * MARGIN)
    near = [(ways[key],) for key, ratio in one._ratios.items() if 0.0 < ratio < neighbours.NEAR]
    pairs = [(ways[a], ways[b]) for a, b in neighbours.replacements(one.held, search.q.regions, one._ratios)]
    for change in (*near, *pairs):
        assert search.us(choice_of(functools.reduce(descent.replaced, change, one.held))) >= bar


@SETTINGS
@given(seed=st.integers(0, 10_000), budget_s=st.floats(0.0, 12.0))
def test_the_budget_is_kept(seed: int, budget_s: float) -> None:
    """No variant is captured behind it, and what began in time ends soon: one comparison, and the samples of what is selected."""
    search = Search(rugged(seed), everything(), budget_s)
    found = answered(search)
    trial_s = CAPTURE_S + (4 + 2 * paired.PAIRS) * SAMPLE_S
    assert all(at <= budget_s for at in search.captures[1:])
    assert search.now <= max(budget_s, CAPTURE_S + paired.PAIRS * SAMPLE_S) + trial_s + paired.PAIRS * SAMPLE_S
    assert audit_chain.replayed(log_of(found), MARGIN).held == steps_of(found.selections)


@SETTINGS
@given(seed=st.integers(0, 10_000))
def test_four_variants_are_held_at_most(seed: int) -> None:
    """Each has an arena, workspaces and a graph: the start, what either descent holds, and the challenger."""
    search = Search(rugged(seed), everything())
    answered(search)
    assert search.most_alive <= 4


def test_with_nothing_taken_there_is_no_second_descent() -> None:
    search = Search(lambda choice: 100.0 + sum(choice.values()), tuple(a for a in everything() if a.selected is not None))
    found = answered(search)
    assert not found.accepted and len(search.captures) == 1 + len(found.trials)


@given(slow=st.sets(st.integers(0, 40), max_size=1), factor=st.floats(1.0, 5.0))
def test_one_disturbed_sample_rejects_no_faster_step(slow: set[int], factor: float) -> None:
    """Whichever sample it is. In the pairs it may widen the bound, so that it is not taken; the quick look lets it through."""
    count = iter(range(1000))
    quick: list[int] = []

    def timed(us: float) -> Any:
        def sample_us() -> float:
            number = next(count)
            quick.append(number)
            return us * (factor if number in slow else 1.0)
        return SimpleNamespace(sample_us=sample_us)

    ratio = paired.paired_ratio(timed(98.0), timed(100.0), 0.001)
    assert len(quick) >= 6, "it came to the pairs"
    if not slow or min(slow) < 2:
        assert ratio == pytest.approx(0.98)


def test_what_is_slower_costs_two_samples_of_each() -> None:
    samples: list[float] = []

    def timed(us: float) -> Any:
        return SimpleNamespace(sample_us=lambda: (samples.append(us), us)[1])

    assert paired.paired_ratio(timed(103.0), timed(100.0), 0.001) == pytest.approx(1.03) and samples == [103.0, 100.0] * 2


def test_changes_make_one_of_the_other() -> None:
    draw = random.Random(0)
    ways = everything()
    for _ in range(50):
        before = after = selections()
        for _ in range(draw.randrange(6)):
            before, after = descent.replaced(before, draw.choice(ways)), descent.replaced(after, draw.choice(ways))
        made = before
        for change in changes(before, after):
            made = descent.replaced(made, change)
        assert steps_of(made) == steps_of(after)
        assert changes(after, after) == ()
