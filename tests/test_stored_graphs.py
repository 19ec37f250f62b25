"""Graphs of chunk sizes that follow from others are not stored, and come back as they were; a text that says otherwise is refused."""

from itertools import combinations

import pytest
from attrs import evolve
from capture_models import SIZES, WORKLOAD, tiny
from torch import nn

from agentcompile_core.errors import UsageError, VerificationError
from agentcompile_core.ir import serial
from agentcompile_core.ir.graph import Graph, GraphKind, GraphSet
from agentcompile_core.plugin.interfaces import LoadedModel
from agentcompile_core.stages.capture.comparison import difference
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.stored_graphs import StoredGraphs, stored


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny("llama", SIZES)


@pytest.fixture(scope="module")
def sizes(model: nn.Module) -> GraphSet:
    return capture_language_model(model, "llama", evolve(WORKLOAD, prefill_chunks=(4, 6, 8, 12)))


def without(graphs: GraphSet, *names: str) -> GraphSet:
    return evolve(graphs, graphs=tuple(graph for graph in graphs.graphs if graph.name not in names))


def test_what_is_stored_is_less_and_comes_back_to_the_letter(sizes: GraphSet) -> None:
    text = serial.dumps(stored(sizes))
    assert serial.loads(text, StoredGraphs).between == (6, 8) and len(text) < 0.7 * len(serial.dumps(sizes))
    assert serial.loads(text, StoredGraphs).whole() == sizes


@pytest.mark.parametrize("gone", [names for count in (1, 2) for names in combinations(
    ("prefill_4", "prefill_4_fresh", "prefill_6", "prefill_8_fresh", "prefill_12", "prefill_12_fresh"), count)])
def test_any_set_of_graphs_comes_back_as_it_was(gone: tuple[str, ...], sizes: GraphSet) -> None:
    graphs = without(sizes, *gone)
    assert stored(graphs).whole() == graphs
    backwards = evolve(graphs, graphs=graphs.graphs[::-1])
    assert stored(backwards).whole() == backwards


def test_what_a_frontend_adds_of_a_size_that_follows_is_stored_as_well(sizes: GraphSet) -> None:
    named = {graph.name: graph for graph in sizes.graphs}
    more = evolve(sizes, graphs=(*sizes.graphs, evolve(named["prefill_6"], name="prefill_6_images")))
    assert stored(more).whole() == more


@pytest.mark.parametrize("between", [(4,), (12,), (3,), (13,), (8, 6), (6, 6), (6, 12), (-1,), (0,), (10**9,), (5,), (6, 7, 8)])
def test_sizes_that_lie_between_no_others_or_were_not_asked_for_are_refused(between: tuple[int, ...], sizes: GraphSet) -> None:
    with pytest.raises(UsageError, match=r"are to follow|not all what was asked for"):
        evolve(stored(sizes), between=between).whole()


@pytest.mark.parametrize("name", ["decode", *(f"prefill_{size}{suffix}" for size in (4, 12) for suffix in ("", "_fresh"))])
def test_a_change_in_any_graph_that_is_stored_is_found(name: str, model: nn.Module, sizes: GraphSet) -> None:
    loaded, right = LoadedModel(module=model, name="llama"), stored(sizes)

    def swapped(graph: Graph) -> Graph:
        text = serial.dumps(graph)
        assert "aten.silu.default" in text
        return serial.loads(text.replace("aten.silu.default", "aten.tanh.default"), Graph) if graph.name == name else graph

    wrong = evolve(right, graphs=evolve(right.graphs, graphs=tuple(map(swapped, right.graphs.graphs))))
    assert difference(right.whole().verify(), loaded, between=right.between) == ""
    try:
        found = wrong.whole().verify()
    except UsageError:  # nothing follows from it
        return
    assert difference(found, loaded, between=wrong.between)


def test_texts_that_give_one_name_to_two_graphs_or_a_size_a_wrong_name_are_refused(sizes: GraphSet) -> None:
    right = stored(sizes)
    twice = evolve(right.graphs.graphs[0], name="prefill_6", kind=GraphKind.FORWARD)
    with pytest.raises(VerificationError, match="two graphs are called 'prefill_6'"):
        evolve(right, graphs=evolve(right.graphs, graphs=(*right.graphs.graphs, twice))).whole().verify()
    exchanged = {"prefill_4": "prefill_12", "prefill_12": "prefill_4", "prefill_4_fresh": "prefill_12_fresh",
                 "prefill_12_fresh": "prefill_4_fresh"}
    other = tuple(evolve(graph, name=exchanged.get(graph.name, graph.name)) for graph in right.graphs.graphs)
    with pytest.raises(UsageError, match="are to follow"):
        evolve(right, graphs=evolve(right.graphs, graphs=other)).whole()
    with pytest.raises(VerificationError, match="is called"):
        evolve(right, graphs=evolve(right.graphs, graphs=other), between=()).whole().verify()
    same = tuple(evolve(graph, tokens=12) if graph.tokens == 4 else graph for graph in right.graphs.graphs)
    with pytest.raises(UsageError, match="are to follow"):
        evolve(right, graphs=evolve(right.graphs, graphs=same)).whole()
    with pytest.raises(UsageError, match="are to follow"):
        evolve(right, graphs=evolve(right.graphs, whole_chunks=True)).whole()


def test_sizes_that_do_not_follow_are_refused(sizes: GraphSet) -> None:
    right = stored(sizes)
    shorter = tuple(evolve(graph, nodes=graph.nodes[:-1]) if graph.name == "prefill_12" else graph for graph in right.graphs.graphs)
    with pytest.raises(UsageError, match="does not"):
        evolve(right, graphs=evolve(right.graphs, graphs=shorter)).whole()
    with pytest.raises(UsageError, match="are to follow"):
        StoredGraphs(graphs=without(sizes, *(graph.name for graph in sizes.graphs if graph.tokens > 4)), between=(6,)).whole()
