"""Neighbours in the chain are changed together: what no single step wins is found, logged, and follows from the log again."""

import itertools
from types import SimpleNamespace
from typing import Any

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir import ranges
from agentcompile_core.ir.decisions import CHAIN_MARGIN, ChainLog
from agentcompile_core.ir.plan import Cover, Fusion, Origin, Schedule, Step
from agentcompile_core.ir.selection import Basis, SelectedStep, Selection
from agentcompile_core.report.audit_chain import evidence_of, replayed
from agentcompile_core.worker import neighbours
from agentcompile_core.worker.chain_question import Alternative
from agentcompile_core.worker.chain_search import ChainSearch

PLACES = ("a", "b", "c")  # of the steps of one region, in its order
MARGIN = 0.01
Choice = tuple[int, int, int]


def step(place: str, number: int) -> Step:
    return Step(match_id=place, implementation="family/one", origin=Origin.GENERATED, schedule=Schedule({"number": number}))


def selected(place: str, number: int) -> SelectedStep:
    return SelectedStep(step=step(place, number), label="gemv", nodes=(f"node_{place}",), source=None, basis=Basis.MEASURED)


def region(instances: int = 4) -> Any:
    nodes = [SimpleNamespace(name=f"node_{place}") for place in PLACES]
    return SimpleNamespace(signature="s", graph=SimpleNamespace(nodes=nodes), instances=(None,) * instances)


def selection(numbers: Choice) -> Selection:
    steps = tuple(selected(place, number) for place, number in zip(reversed(PLACES), reversed(numbers), strict=True))  # in any order
    return Selection(signature="s", region="layer", cover=Cover(matches=PLACES, fusion=Fusion.FULL, rank=0), steps=steps,
                     basis=Basis.MEASURED)


def choice_of(selections: tuple[Selection, ...]) -> Choice:
    found = {x.step.match_id: int(x.step.schedule["number"]) for x in selections[0].steps}
    return found["a"], found["b"], found["c"]


class Chain(ChainSearch):
    """A chain whose step takes what ``times`` says of the numbers that are selected."""

    def __init__(self, times: dict[Choice, float], options: int, budget_s: float = 60.0) -> None:
        others = tuple(Alternative(signature="s", match_id=place, selected=selected(place, number))
                       for place in PLACES for number in range(options))
        question: Any = SimpleNamespace(selections=(selection((0, 0, 0)),), alternatives=others, covers=(), regions=(region(),),
                                        budget_s=budget_s, margin=CHAIN_MARGIN * MARGIN, with_framework=False, earlier=())
        super().__init__(question, lambda what: None)
        self.times, self.position = times, 0

    def captured(self, selections: tuple[Selection, ...]) -> Any:
        return SimpleNamespace(sample_us=lambda: self.times[choice_of(selections)], wrong=lambda: "")

    def stand_at(self, position: int) -> None:
        self.position = position


def times_of(options: int, single: list[float], together: dict[tuple[int, int], float]) -> dict[Choice, float]:
    """100 us, times a factor of each step's number, times one of the first two's numbers together."""
    return {choice: 100.0 * single[choice[0]] * single[choice[1]] * single[choice[2]] * together.get(choice[:2], 1.0)
            for choice in itertools.product(range(options), repeat=3)}


JUDGED = 2560


class InRounds(Chain):
    """What has number 1 in the middle takes half as long, but twice as long at ``slow_at``. Number 0 stops working if it is ``unsound``."""

    def __init__(self, earlier: tuple[int, ...], slow_at: frozenset[int], unsound: bool = False) -> None:
        super().__init__(times_of(2, [1.0, 1.2], {}), 2)
        self.unsound = unsound
        self.q.earlier, self.q.position, self.slow_at = earlier, JUDGED, slow_at
        self.position = JUDGED

    def captured(self, selections: tuple[Selection, ...]) -> Any:
        number = next((int(x.step.schedule["number"]) for x in selections[0].steps if x.step.match_id == "b"), None)

        def sample_us() -> float:
            return 100.0 if number != 1 else 200.0 if self.position in self.slow_at else 50.0

        return SimpleNamespace(sample_us=sample_us, wrong=lambda: "it has NaN" if self.unsound and number == 0 else "")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(slow_at=st.frozensets(st.sampled_from([1024, 1536, 2048, JUDGED])))
def test_what_wins_begins_behind_the_last_position_where_it_loses(slow_at: frozenset[int]) -> None:
    earlier = (1024, 1536, 2048)
    chain = InRounds(earlier, slow_at)
    found = chain.sweep()
    assert chain.position == JUDGED, "what is asked afterwards is asked where it was"
    if JUDGED in slow_at:
        assert choice_of(found.selections)[1] == 0 and found.earlier == ()
        return
    assert choice_of(found.selections)[1] == 1
    lost = max((p for p in slow_at), default=0)
    assert ranges.holds_from(found.earlier, JUDGED) == next(p for p in (*earlier, JUDGED) if p > lost)
    assert found.earlier == tuple((p, 2.0 if p in slow_at else 0.5) for p in reversed(earlier) if p >= lost)
    assert InRounds((), slow_at).sweep().earlier == ()
    again = InRounds(earlier, slow_at, unsound=True).sweep()
    assert again.earlier == (), "what was taken out holds nowhere any more, however slow what replaces it"
    assert [trial.match_id for trial in again.trials if trial.taken and not trial.ratio] == ["b"]


def test_two_that_lose_alone_and_win_together_are_found() -> None:
    chain = Chain(times_of(2, [1.0, 1.01], {(1, 1): 0.9}), 2)
    found = chain.sweep()
    assert choice_of(found.selections) == (1, 1, 0)
    taken = [trial for trial in found.trials if trial.taken]
    assert len(taken) == 1 and {taken[0].step, *(one for _, one in taken[0].beside)} == {step("a", 1), step("b", 1)}
    assert found.tried == sum(not trial.beside for trial in found.trials) and found.accepted == 1


def test_what_lost_by_far_is_not_tried_again_and_nothing_is_without_time() -> None:
    assert not any(trial.beside for trial in Chain(times_of(2, [1.0, 1.2], {(1, 1): 0.1}), 2).sweep().trials)
    assert not any(trial.beside for trial in Chain(times_of(2, [1.0, 1.01], {(1, 1): 0.9}), 2, budget_s=-1.0).sweep().trials)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(single=st.lists(st.floats(0.9, 1.2), min_size=2, max_size=5))
def test_once_something_is_taken_only_what_came_close_is_tried_again(single: list[float]) -> None:
    """Captures are what the time goes to: those that lost by far leave it to pairs of neighbours, and nothing is tried twice beside the
    same steps. At the end nothing that came close is faster."""
    times = times_of(len(single), single, {})
    found = Chain(times, len(single)).sweep()
    last: dict[Step, tuple[int, float]] = {}
    taken = 0
    for trial in found.trials:
        if not trial.beside:
            assert trial.step is not None
            number, ratio = last.get(trial.step, (-1, 0.0))
            assert number < taken and ratio < neighbours.NEAR
            last[trial.step] = taken, trial.ratio
        taken += trial.taken
    end = choice_of(found.selections)
    for one, (_, ratio) in last.items():
        place = PLACES.index(one.match_id)
        changed = (*end[:place], int(one.schedule["number"]), *end[place + 1:])
        assert ratio >= neighbours.NEAR or times[changed] >= times[end] * (1.0 - CHAIN_MARGIN * MARGIN)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(single=st.lists(st.floats(0.97, 1.06), min_size=2, max_size=4),
       together=st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.floats(0.9, 1.05), max_size=6))
def test_the_end_is_no_slower_and_follows_from_the_log(single: list[float], together: dict[tuple[int, int], float]) -> None:
    chain = Chain(times_of(len(single), single, together), len(single))
    started = tuple((s.signature, x.step) for s in chain.q.selections for x in s.steps)
    found = chain.sweep()
    assert found.us <= found.first_us
    log = ChainLog(started=started, trials=found.trials)
    again = replayed(log, MARGIN)
    assert again.problems == () and again.held == {"s": {x.step.match_id: x.step for x in found.selections[0].steps}}
    assert all(line for line in evidence_of(log))
    lied = replayed(evolve(log, trials=tuple(evolve(t, taken=not t.taken) if t.beside else t for t in found.trials)), MARGIN)
    assert len(lied.problems) == sum(bool(t.beside) for t in found.trials)


def test_neighbours_are_those_of_the_region_and_of_its_next_copy() -> None:
    ratios = {("s", step(place, number)): 1.0 + number / 100 for place in PLACES for number in (1, 2, 5)} | {("s", step("a", 6)): 0.0}
    found = neighbours.replacements((selection((0, 0, 0)),), (region(),), ratios)
    places = {(one.match_id, other.match_id) for (_, one), (_, other) in found}
    assert places == {("a", "b"), ("b", "c"), ("c", "a")}
    assert {one.schedule["number"] for (_, one), _ in found} == {1, 2}, "closest ones only"
    sums = [ratios[a] * ratios[b] for a, b in found]
    assert sums == sorted(sums)
    alone = neighbours.replacements((selection((0, 0, 0)),), (region(1),), ratios)
    assert {(one.match_id, other.match_id) for (_, one), (_, other) in alone} == {("a", "b"), ("b", "c")}
