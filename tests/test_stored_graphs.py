"""Graphs of chunk sizes that follow from others are not stored, and come back as they were; a text that says otherwise is refused."""

from itertools import combinations

import pytest
from attrs import evolve
from capture_models import SIZES, WORKLOAD, tiny

from agentcompile_core.errors import UsageError, VerificationError
from agentcompile_core.ir import serial
from agentcompile_core.ir.graph import GraphSet
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.stored_graphs import StoredGraphs, stored


@pytest.fixture(scope="module")
def sizes() -> GraphSet:
    return capture_language_model(tiny("llama", SIZES), "llama", evolve(WORKLOAD, prefill_chunks=(4, 6, 8, 12)))


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


@pytest.mark.parametrize("between", [(4,), (12,), (3,), (13,), (8, 6), (6, 6), (6, 12), (-1,), (0,), (10**9,)])
def test_sizes_that_lie_between_no_others_are_refused(between: tuple[int, ...], sizes: GraphSet) -> None:
    with pytest.raises(UsageError, match="are to follow"):
        evolve(stored(sizes), between=between).whole()


def test_sizes_that_do_not_follow_are_refused(sizes: GraphSet) -> None:
    text = serial.dumps(stored(sizes))
    with pytest.raises(UsageError, match="no chunk of 6 tokens follows"):
        serial.loads(text.replace('"prefill_12"', '"prefill_13"'), StoredGraphs).whole()
    plain = stored(sizes)
    *others, last = (graph for graph in plain.graphs.graphs if graph.name != "prefill_12_fresh")
    assert last.name == "prefill_12"
    shorter = evolve(plain, graphs=evolve(plain.graphs, graphs=(*others, evolve(last, nodes=last.nodes[:-1]))))
    with pytest.raises((UsageError, VerificationError)):
        shorter.whole()
    with pytest.raises(UsageError, match="are to follow"):
        StoredGraphs(graphs=without(sizes, *(graph.name for graph in sizes.graphs if graph.tokens > 4)), between=(6,)).whole()
