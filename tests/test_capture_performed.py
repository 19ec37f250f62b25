"""A graph that does anything else than its model is found by what it calls."""

from functools import cache, partial
from typing import Any

from attrs import evolve
from capture_models import SIZES, WORKLOAD, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.errors import VerificationError
from agentcompile_core.ir.graph import Graph, GraphKind, Node, Ref
from agentcompile_core.stages.capture.attention import Tracing
from agentcompile_core.stages.capture.between import Unlike
from agentcompile_core.stages.capture.deep import Deep
from agentcompile_core.stages.capture.export import calls_of_decode, calls_of_graph, export_decode
from agentcompile_core.stages.capture.importer import import_program
from agentcompile_core.stages.capture.language_model import kv_spec
from agentcompile_core.stages.capture.performed import perform, said_alike
from agentcompile_core.stages.capture.states import Held

MODEL = tiny("qwen3", {**SIZES, "num_hidden_layers": 4})
KV = kv_spec(MODEL, WORKLOAD)


@cache
def exported() -> tuple[Graph, Any]:
    """The graph and what its model calls; not while tests are collected, which every process of a run does."""
    return import_program(export_decode(MODEL, KV), "decode", GraphKind.DECODE), calls_of_decode(MODEL, KV)


def alike(graph: Graph) -> bool:
    try:
        return said_alike(calls_of_graph(partial(perform, graph.verify()), MODEL, KV, 0, Held()), exported()[1])
    except (Unlike, VerificationError, RuntimeError, TypeError, IndexError, ValueError):
        return False


def test_exported_graph_calls_what_its_model_calls() -> None:
    assert alike(exported()[0])


def others(graph: Graph, node: Node, name: str) -> list[str]:
    """Values that could stand in the place of ``name`` there: of the same shape and type, and there before."""
    before = graph.nodes[: graph.nodes.index(node)]
    made = {value for one in before for value in one.outputs}
    there = [v.name for v in graph.values if v.name in made or v.kind.value != "intermediate"]
    return [other for other in there if itself(graph, other) != itself(graph, name) and graph.spec(other) == graph.spec(name)]


def itself(graph: Graph, name: str) -> str:
    """Which tensor it is: a cast to its own type hands it on."""
    node = graph.producer.get(name)
    return itself(graph, node.inputs[0]) if node is not None and node.op.startswith(("aten.to.", "aten.contiguous.")) else name


def changes(graph: Graph, node: Node, at: int) -> list[Any]:
    """What else the argument at this place might have been."""
    given = node.args[at]
    if isinstance(given, Ref):
        return [Ref(other) for other in others(graph, node, given.value)]
    if isinstance(given, bool) or given is None:
        return [not given]
    if isinstance(given, int | float):
        return [given + 1, -given - 3, float(given) if isinstance(given, int) else given * (1 + 1e-12)]
    return [given[::-1]] if isinstance(given, tuple) and given != given[::-1] else []


@cache
def places() -> list[tuple[int, int]]:
    graph = exported()[0]
    return [(index, at) for index, node in enumerate(graph.nodes) for at in range(len(node.args)) if changes(graph, node, at)]


@settings(max_examples=80, derandomize=True, database=None, deadline=None)
@given(st.data())
def test_any_other_argument_of_any_node_is_found(data: st.DataObject) -> None:
    graph, _ = exported()
    index, at = data.draw(st.sampled_from(places()))
    node = graph.nodes[index]
    other = data.draw(st.sampled_from(changes(graph, node, at)))
    # What is written moves along with the argument that says it.
    given = node.args[at]
    names = {given.value: other.value} if isinstance(given, Ref) and isinstance(other, Ref) else {}
    changed = evolve(node, args=(*node.args[:at], other, *node.args[at + 1 :]), mutates=tuple(names.get(n, n) for n in node.mutates))
    assert not alike(evolve(graph, nodes=(*graph.nodes[:index], changed, *graph.nodes[index + 1 :])))


@settings(max_examples=30, derandomize=True, database=None, deadline=None)
@given(st.deferred(lambda: st.integers(0, len(exported()[0].nodes) - 2)))
def test_any_other_order_of_effects_and_any_other_description_is_found(index: int) -> None:
    graph, _ = exported()
    one, behind = graph.nodes[index], graph.nodes[index + 1]
    if not set(one.outputs) & set(behind.inputs):
        assert not alike(evolve(graph, nodes=(*graph.nodes[:index], behind, one, *graph.nodes[index + 2 :])))
    for changed in (evolve(one, mutates=(*one.mutates, "kv.key.0")), evolve(one, outputs=())):
        assert not alike(evolve(graph, nodes=(*graph.nodes[:index], changed, *graph.nodes[index + 1 :])))
    if one.outputs:
        spec = evolve(graph.spec(one.outputs[0]), shape=(*graph.spec(one.outputs[0]).shape, 2))
        values = tuple(evolve(value, spec=spec) if value.name == one.outputs[0] else value for value in graph.values)
        assert not alike(evolve(graph, values=values))


def test_other_results_are_found() -> None:
    graph, _ = exported()
    assert not alike(evolve(graph, outputs=graph.outputs[::-1])) and not alike(evolve(graph, outputs=graph.outputs[:1]))


def test_what_one_trace_says_is_asked_once() -> None:
    model = Deep(MODEL, Tracing.PLAIN, Held())
    assert model.calls(KV, 4) is model.calls(KV, 4) and model.calls(KV, 0) == exported()[1]
