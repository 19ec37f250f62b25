"""Whose turn it is while candidates are timed: all get one, the favourite cover first, and most go where most time can be won."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.ir.plan import Cover, Fusion
from agentcompile_core.stages.validate.turns import Turns

TARGET = PRESETS["h200"]
SIGNATURE = "s"


@frozen(kw_only=True)
class Made:
    """A match: its name, bytes moved, candidates, times of its kernels alone (0: every one fails) and of the framework."""

    name: str
    nbytes: int
    count: int
    us: float
    baseline_us: float
    seconds: float = 0.1
    nodes: tuple[str, ...] = ()

    @property
    def bytes_moved(self) -> int:
        return self.nbytes


@frozen(eq=False)
class Asked:
    """As much of an entry as a turn depends on."""

    match: str
    number: int

    @property
    def place(self) -> tuple[str, str]:
        return SIGNATURE, self.match


class Bench:
    """Evaluates what is asked for at once, and is the ledger of it."""

    def __init__(self, matches: tuple[Made, ...], primary: tuple[str, ...], covers: tuple[tuple[str, ...], ...],
                 instances: int = 1) -> None:
        self.made = {match.name: match for match in matches}
        self.best_us: dict[Any, float] = {}
        self.baselines: dict[Any, Any] = {}
        self.seconds: dict[Any, float] = {}
        self.done: list[Asked] = []
        space = SimpleNamespace(covers=tuple(Cover(matches=c, fusion=Fusion.FULL, rank=i) for i, c in enumerate(covers)))
        region = SimpleNamespace(instances=(None,) * instances, match_by_id=self.made, graph=SimpleNamespace(nodes=()))
        self.ordered = (SimpleNamespace(signature=SIGNATURE, primary=primary, plan=SimpleNamespace(space=space, region=region)),)
        self.entries = [Asked(m.name, n) for m in matches for n in range(m.count)]

    def knows(self, entry: Asked) -> bool:
        return entry in self.done

    def run(self, tried: dict[Any, int] | None = None, most: int = 10**6, again: tuple[str, ...] = (), late: int = 0) -> list[str]:
        """The order; results are known ``late`` by so many candidates."""
        places = frozenset((SIGNATURE, name) for name in again)
        asked: list[Asked] = []
        for entry in Turns(self.entries, self.ordered, self, TARGET, Counter(tried or {}), places):
            asked.append(entry)
            if len(asked) > late:
                self._evaluate(asked[-1 - late])
            if len(asked) == most:
                break
        return [entry.match for entry in asked]

    def _evaluate(self, entry: Asked) -> None:
        made = self.made[entry.match]
        self.done.append(entry)
        self.seconds[entry.place] = made.seconds
        self.baselines[entry.place] = SimpleNamespace(measurement=SimpleNamespace(us=made.baseline_us))
        if made.us:
            self.best_us[entry.place] = made.us


@st.composite
def benches(draw: st.DrawFn) -> Bench:
    names = [f"m{i}" for i in range(draw(st.integers(1, 6)))]
    nodes = st.lists(st.sampled_from("abcd"), unique=True, min_size=1).map(tuple)
    matches = tuple(Made(name=name, nbytes=draw(st.integers(0, 10**8)), count=draw(st.integers(1, 6)), nodes=draw(nodes),
                         us=draw(st.sampled_from((0.0, 1.0, 20.0, 300.0))), baseline_us=draw(st.sampled_from((2.0, 30.0, 900.0))))
                    for name in names)
    some = st.lists(st.sampled_from(names), unique=True, min_size=1).map(tuple)
    return Bench(matches, draw(some), tuple(draw(st.lists(some, max_size=4))), draw(st.integers(1, 32)))


@given(benches())
def test_everyone_has_one_turn_in_the_order_of_its_match(bench: Bench) -> None:
    order = bench.run()
    assert sorted(order) == sorted(entry.match for entry in bench.entries)
    for name in bench.made:
        assert [entry.number for entry in bench.done if entry.match == name] == list(range(bench.made[name].count))


@given(benches())
def test_the_favourite_cover_comes_first_as_long_as_nothing_is_better(bench: Bench) -> None:
    bench.made = {name: evolve(match, us=1e6) for name, match in bench.made.items()}
    order, primary = bench.run(), set(bench.ordered[0].primary)
    second = [name for name in primary if bench.made[name].count > 1]
    assert set(order[: len(primary)]) == primary
    assert sorted(order[len(primary):len(primary) + len(second)]) == sorted(second)


@given(st.integers(2, 6), st.floats(1.0, 100.0))
def test_what_is_judged_again_at_later_positions_has_five_turns_before_all_else(others: int, factor: float) -> None:
    """However slowly it is judged, and however little it loses at first; nothing else waits for its third turn."""
    attention = Made(name="attention", nbytes=1, count=9, us=1.0, baseline_us=2.0, seconds=factor)
    layers = tuple(Made(name=f"linear{i}", nbytes=10**8, count=99, us=3 * TARGET.floor_us(10**8), baseline_us=900.0) for i in range(others))
    names = tuple(m.name for m in (attention, *layers))
    order = Bench((attention, *layers), names, (names,)).run(most=2 * len(names) + 3, again=("attention",))
    assert Counter(order) == {**{layer.name: 2 for layer in layers}, "attention": 5}
    assert set(order[: len(names)]) == set(names) and Counter(Bench((attention, *layers), names, (names,)).run(most=40))["attention"] == 2


@given(st.integers(2, 6), st.floats(1.0, 100.0))
def test_what_is_judged_again_and_fails_keeps_nobody_waiting_for_a_second_turn(others: int, seconds: float) -> None:
    attention = Made(name="attention", nbytes=10**9, count=9, us=0.0, baseline_us=900.0, seconds=seconds)
    layers = tuple(Made(name=f"linear{i}", nbytes=10**8, count=99, us=3 * TARGET.floor_us(10**8), baseline_us=900.0) for i in range(others))
    names = tuple(m.name for m in (attention, *layers))
    order = Bench((attention, *layers), names, (names,)).run(most=2 * len(names), again=("attention",))
    assert order[len(names)] == "attention" and sorted(order[len(names) + 1:]) == sorted(names[1:])


@given(st.integers(2, 30), st.floats(1.5, 20.0))
def test_turns_go_where_time_can_be_won(count: int, factor: float) -> None:
    """Two matches of one cover, one of which loses ``factor`` times as much: it has about as many times the candidates."""
    floor_us = TARGET.floor_us(10**8)
    near, far = (Made(name=name, nbytes=10**8, count=count * 25, us=floor_us + lost, baseline_us=10 * floor_us)
                 for name, lost in (("near", 1.0), ("far", factor)))
    found = Counter(Bench((near, far), ("near", "far"), (("near", "far"),)).run(most=count * 20))
    assert abs(found["far"] / found["near"] / factor - 1) < 0.5 or found["near"] < 3


@given(st.floats(1.5, 20.0))
def test_what_takes_long_to_judge_has_fewer_turns(factor: float) -> None:
    quick, slow = (Made(name=name, nbytes=10**8, count=500, us=2 * TARGET.floor_us(10**8), baseline_us=900.0, seconds=seconds)
                   for name, seconds in (("quick", 0.1), ("slow", 0.1 * factor)))
    found = Counter(Bench((quick, slow), ("quick", "slow"), (("quick", "slow"),)).run(most=400))
    assert abs(found["quick"] / found["slow"] / factor - 1) < 0.5


@given(st.integers(1, 28), st.floats(1.0, 1.2))
def test_matches_outside_of_the_best_cover_wait(instances: int, worse: float) -> None:
    """A fused match, and the same work in two, which takes a little longer: the two have a turn each before the end, and few more."""
    fused = Made(name="fused", nbytes=2 * 10**8, count=40, us=1.1 * TARGET.floor_us(2 * 10**8), baseline_us=900.0,
                 nodes=("one", "other"))
    parts = tuple(Made(name=name, nbytes=10**8, count=40, us=1.1 * worse * TARGET.floor_us(10**8) + 1.0, baseline_us=440.0, nodes=(name,))
                  for name in ("one", "other"))
    found = Counter(Bench((fused, *parts), ("fused",), (("fused",), ("one", "other")), instances).run(most=30))
    assert found["fused"] >= 20 and found["one"] and found["other"]


@given(st.integers(1, 28))
def test_what_saves_more_becomes_the_best_cover(instances: int) -> None:
    fused = Made(name="fused", nbytes=2 * 10**8, count=40, us=1.6 * TARGET.floor_us(2 * 10**8), baseline_us=300.0,
                 nodes=("one", "other"))
    parts = tuple(Made(name=name, nbytes=10**8, count=40, us=1.1 * TARGET.floor_us(10**8), baseline_us=150.0, nodes=(name,))
                  for name in ("one", "other"))
    bench = Bench((fused, *parts), ("fused",), (("fused",), ("one", "other")), instances)
    found = bench.run(most=60)
    assert {"one", "other"} <= set(found[:24])  # before a budget of half a minute ends
    later = Counter(found[24:])
    assert later["one"] + later["other"] > later["fused"]


@given(st.integers(1, 28), st.floats(0.97, 1.03))
def test_noise_of_the_framework_does_not_make_a_cover_the_best(instances: int, noise: float) -> None:
    fused = Made(name="fused", nbytes=2 * 10**8, count=40, us=1.1 * TARGET.floor_us(2 * 10**8), baseline_us=880.0 * noise,
                 nodes=("one", "other"))
    parts = tuple(Made(name=name, nbytes=10**8, count=40, us=1.15 * TARGET.floor_us(10**8), baseline_us=440.0, nodes=(name,))
                  for name in ("one", "other"))
    found = Counter(Bench((fused, *parts), ("fused",), (("fused",), ("one", "other")), instances).run(most=40))
    quiet = Counter(Bench((evolve(fused, baseline_us=880.0), *parts), ("fused",), (("fused",), ("one", "other")), instances).run(most=40))
    assert found == quiet


@given(st.integers(1, 28))
def test_where_the_favourite_fails_the_others_are_tried_at_once(instances: int) -> None:
    broken = Made(name="broken", nbytes=10**8, count=30, us=0.0, baseline_us=300.0)
    other = Made(name="other", nbytes=10**8, count=30, us=1.5 * TARGET.floor_us(10**8), baseline_us=300.0)
    found = Bench((broken, other), ("broken",), (("broken",), ("other",)), instances).run(most=6)
    assert found[:2] == ["broken"] * 2 and "other" in found[2:4]


@given(benches())
def test_every_match_of_the_favourite_cover_has_one_turn_before_anything_has_two(bench: Bench) -> None:
    """Whatever passes or fails: the first turns are the favourite cover's, each match once."""
    primary = set(bench.ordered[0].primary)
    order = bench.run(most=len(primary))
    assert sorted(order) == sorted(primary)


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 8), st.integers(1, 36))
def test_what_stands_in_for_a_match_that_fails_comes_before_third_turns(others: int, count: int, late: int, instances: int) -> None:
    """All candidates of a fused match fail; the cover with its parts has a kernel of each of them as soon as the failures are known."""
    fused = Made(name="fused", nbytes=10**7, count=count, us=0.0, baseline_us=90.0, nodes=("a", "b"))
    parts = tuple(Made(name=name, nbytes=10**7, count=count, us=9.0, baseline_us=45.0, nodes=(name,)) for name in "ab")
    rest = tuple(Made(name=f"rest{i}", nbytes=10**9, count=99, us=5 * TARGET.floor_us(10**9), baseline_us=10**5, nodes=(f"r{i}",))
                 for i in range(others))
    names = tuple(match.name for match in rest)
    bench = Bench((fused, *parts, *rest), ("fused", *names), (("fused", *names), ("a", "b", *names)), instances)
    order = bench.run(most=2 * len(names) + 4 + late, late=late)
    assert {"a", "b"} <= set(order)
    assert not {"a", "b"} & set(order[: 1 + len(names)])
    if not late:  # its second turn is the first of the second ones, and behind it come those that stand in for it
        assert order[1 + len(names)] == "fused" or count == 1
        assert set(order[len(names) + 1 + (count > 1):][:2]) == {"a", "b"}


@given(benches())
def test_nothing_stands_in_where_everything_passes(bench: Bench) -> None:
    """Then the first turns are the favourite's, twice each, as long as it is the best cover."""
    bench.made = {name: evolve(match, us=1e6) for name, match in bench.made.items()}
    primary = set(bench.ordered[0].primary)
    first = sum(min(2, bench.made[name].count) for name in primary)
    assert set(bench.run(most=first)) == primary


@given(st.integers(2, 9))
def test_a_cover_that_fails_as_well_is_stood_in_for_by_the_next(count: int) -> None:
    whole, half, other = (Made(name=name, nbytes=10**8, count=count, us=0.0, baseline_us=90.0, nodes=nodes)
                          for name, nodes in (("whole", ("a", "b")), ("half", ("a",)), ("other", ("b",))))
    parts = tuple(Made(name=name, nbytes=10**8, count=9, us=50.0, baseline_us=90.0, nodes=(name,)) for name in "ab")
    covers = (("whole",), ("half", "other"), ("a", "b"))
    order = Bench((whole, half, other, *parts), ("whole",), covers).run(most=7)
    assert order == ["whole", "whole", "half", "other", "half", "a", "b"]


def test_what_earlier_rounds_tried_counts() -> None:
    near, far = (Made(name=name, nbytes=10**8, count=9, us=2 * TARGET.floor_us(10**8), baseline_us=900.0) for name in ("near", "far"))
    found = Bench((near, far), ("near", "far"), (("near", "far"),)).run({(SIGNATURE, "near"): 8}, most=8)
    assert found == ["far"] * 8
