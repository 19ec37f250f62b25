"""The framework's time of matches, told by their parts: what covers are compared by does not depend on how they cut the same nodes."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.ir.framework_time import by_parts, levelled


@st.composite
def matches(draw: Any) -> tuple[dict[str, float], dict[str, tuple[str, ...]]]:
    """Smallest matches that share no node, and unions of some, each measured by itself with noise."""
    parts = [tuple(f"n{i}{j}" for j in range(draw(st.integers(1, 3)))) for i in range(draw(st.integers(1, 5)))]
    nodes = {f"part{i}": part for i, part in enumerate(parts)}
    for count in range(2, len(parts) + 1):
        for chosen in combinations(range(len(parts)), count):
            if draw(st.booleans()):
                nodes["+".join(map(str, chosen))] = tuple(node for i in chosen for node in parts[i])
    return {match: draw(st.floats(1.0, 1000.0)) for match in nodes}, nodes


def exact_covers(whole: frozenset[str], nodes: dict[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    if not whole:
        return [()]
    first = min(whole)
    return [(match, *rest) for match, part in nodes.items() if first in part and whole.issuperset(part)
            for rest in exact_covers(whole - set(part), nodes)]


@given(matches())
def test_covers_of_the_same_nodes_are_told_the_same_time(made: tuple[dict[str, float], dict[str, tuple[str, ...]]]) -> None:
    measured_us, nodes = made
    told = by_parts(measured_us, nodes)
    assert set(told) == set(measured_us)
    single = [match for match in nodes if match.startswith("part")]
    for cover in exact_covers(frozenset(node for match in single for node in nodes[match]), nodes):
        assert sum(told[match] for match in cover) == pytest.approx(sum(measured_us[match] for match in single))


@given(matches())
def test_what_no_parts_make_up_is_as_it_was_measured(made: tuple[dict[str, float], dict[str, tuple[str, ...]]]) -> None:
    measured_us, nodes = made
    nodes = {**nodes, "odd": (nodes["part0"][0], "alone", "beside", "behind")}
    told = by_parts({**measured_us, "odd": 7.0}, nodes)
    assert told["odd"] == 7.0
    assert {match: told[match] for match in measured_us} == by_parts(measured_us, {m: nodes[m] for m in measured_us})


@given(matches(), st.data())
def test_covers_of_the_same_nodes_are_level_though_no_parts_make_them_up(made: tuple[dict[str, float], dict[str, tuple[str, ...]]],
                                                                         data: st.DataObject) -> None:
    """Some parts were not measured, or no match at all has their nodes alone."""
    measured_us, nodes = made
    kept = {match: us for match, us in measured_us.items() if not match.startswith("part") or data.draw(st.booleans())}
    told = by_parts(kept, nodes)
    known = {match: nodes[match] for match in kept}
    everything = frozenset(node for match in known for node in known[match])
    covers = exact_covers(everything, known)
    found = levelled(covers, told, nodes)
    assert len(set(found)) <= 1
    assert not covers or found[0] == min(sum(told[match] for match in cover) for cover in covers)


def test_what_other_nodes_take_is_not_levelled() -> None:
    nodes = {"a": ("1",), "b": ("2",), "both": ("1", "2")}
    told = {"a": 5.0, "b": 7.0, "both": 20.0}
    assert levelled([("a", "b"), ("both",), ("a",), (), ("both", "unknown")], told, nodes) == [12.0, 12.0, 5.0, 0, 12.0]


def test_views_make_no_match_another_one() -> None:
    """Attention that takes norms in has the views between them; of those no part is made."""
    nodes = {"norm": (), "rows": ("norm",), "attention": ("attend",), "whole": ("norm", "attend")}
    assert by_parts({"norm": 3.0, "rows": 12.0, "attention": 500.0, "whole": 551.0}, nodes) == {
        "norm": 0.0, "rows": 12.0, "attention": 500.0, "whole": 512.0}
