"""What is computed of a graph is computed once, changes for nobody, and goes with the graph."""

import gc
import weakref

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.ir.candidate import StepSource
from agentcompile_core.ir.graph import Graph
from agentcompile_core.ops.aliasing import alias_roots, memory_roots
from agentcompile_core.ops.dependency import dependencies
from agentcompile_core.ops.per_graph import once_per_graph
from agentcompile_core.testing import doubles


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_each_graph_has_its_own_result_computed_once_while_it_lives(asked: list[tuple[int, bool]]) -> None:
    """Graphs are equal and yet told apart; some are dropped between two questions, and another may lie at their address."""
    computed: list[int] = []

    @once_per_graph
    def tokens(graph: Graph) -> int:
        computed.append(graph.tokens)
        return graph.tokens

    graphs: dict[int, Graph] = {}
    expected: list[int] = []
    for number, dropped in asked:
        if number not in graphs:
            graphs[number] = evolve(doubles.fake_match()[1], tokens=number)
            expected.append(number)
        assert tokens(graphs[number]) == number
        if dropped:
            del graphs[number]
    assert computed == expected


def test_nothing_that_is_kept_keeps_a_graph() -> None:
    graph = evolve(doubles.fake_match()[1])
    for compute in (alias_roots, memory_roots, dependencies):
        assert compute(graph) is compute(graph)
    gone = weakref.ref(graph)
    del graph
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("compute", [alias_roots, memory_roots, lambda graph: dependencies(graph).index])
def test_who_gets_it_cannot_change_it_for_others(compute: object) -> None:
    found = compute(doubles.fake_match()[1])  # type: ignore[operator]
    with pytest.raises(TypeError):
        found["another"] = "value"


def test_the_key_of_a_source_is_that_of_its_launches() -> None:
    source: StepSource = doubles.fake_source("honest", 5.0)
    same, other = evolve(source), evolve(source, launches=tuple(evolve(launch, grid=(77, 1, 1)) for launch in source.launches))
    assert source.key is source.key and same.key == source.key and same == source and hash(same) == hash(source)
    assert other.key != source.key and other.key.startswith(source.digest)
