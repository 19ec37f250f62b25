"""Graphs with one small mistake, of every kind that a capture could make, for tests of what compares them with their modules."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from attrs import evolve

from agentcompile_core.ir.graph import Graph, GraphSet, Node, Ref, Symbol, TensorSpec, Value, ValueKind
from agentcompile_core.ops.operator_names import ATTENTION

OTHERS = {
    "aten.silu.default": "aten.tanh.default", "aten.tanh.default": "aten.sigmoid.default", "aten.sigmoid.default": "aten.tanh.default",
    "aten.exp.default": "aten.expm1.default", "aten.relu.default": "aten.silu.default", "aten.gelu.default": "aten.relu.default",
    "aten.softplus.default": "aten.relu.default", "aten.add.Tensor": "aten.sub.Tensor", "aten.mul.Tensor": "aten.add.Tensor",
    "aten.softmax.int": "aten.log_softmax.int",
}


def mutants(graphs: GraphSet) -> Iterator[tuple[str, Callable[[], GraphSet]]]:
    """What was done to which node, and what makes the graphs with it: of hundreds a test looks at some."""
    for index, graph in enumerate(graphs.graphs):
        for at, node in enumerate(graph.nodes):
            for what, nodes, values in _of_node(graph, node):
                yield f"{graph.name}: {what} of {node.name} ({node.op})", partial(_changed, graphs, index, at, nodes, values)


def _changed(graphs: GraphSet, index: int, at: int, nodes: tuple[Node, ...], values: tuple[Value, ...]) -> GraphSet:
    graph = graphs.graphs[index]
    changed = evolve(graph, nodes=(*graph.nodes[:at], *nodes, *graph.nodes[at + 1:]), values=(*graph.values, *values))
    return evolve(graphs, graphs=(*graphs.graphs[:index], changed, *graphs.graphs[index + 1:]))


def _of_node(graph: Graph, node: Node) -> Iterator[tuple[str, tuple[Node, ...], tuple[Value, ...]]]:
    for index, argument in enumerate(node.args):
        if isinstance(argument, float) and argument:
            for factor in (1.001, 1.1):
                yield f"number times {factor}", (_with(node, index, argument * factor),), ()
        if isinstance(argument, Symbol) and argument.kind == "dtype" and argument.name == "float32":
            yield "narrow type", (_with(node, index, Symbol("dtype", "bfloat16")),), ()
        if isinstance(argument, Ref) and (other := _other_weight(graph, argument.value)):
            yield f"{other} in place of {argument.value}", (_with(node, index, Ref(other)),), ()
        if node.op == ATTENTION and index == 7:
            yield "window one less", (_with(node, index, int(argument) - 1),), ()  # type: ignore[call-overload]
    if node.op == ATTENTION and len(node.args) == 7:
        yield "window of two", (evolve(node, args=(*node.args, 2)),), ()
    if node.op in OTHERS:
        yield "another operator", (evolve(node, op=OTHERS[node.op]),), ()
    if node.op.startswith("aten.topk"):
        yield "the smallest", (evolve(node, args=(*node.args[:2], -1, False)),), ()
    first = next((a for a in node.args if isinstance(a, Ref)), None)
    if first and len(node.outputs) == 1 and graph.spec(first.value) == graph.spec(node.outputs[0]) and not node.mutates:
        yield "left out", (evolve(node, op="aten.clone.default", args=(first,), kwargs=()),), ()
    if node.mutates and node.op == "aten.copy_.default" and not any(out in graph.users for out in node.outputs):
        yield "state not written", (), ()
    if len(node.outputs) == 1 and graph.spec(node.outputs[0]).dtype.is_float and not node.mutates:
        yield "rounded", *_rounded(graph, node)


def _with(node: Node, index: int, argument: Any) -> Node:
    return evolve(node, args=(*node.args[:index], argument, *node.args[index + 1:]))


def _other_weight(graph: Graph, name: str) -> str:
    """Another weight of the same shape; empty: there is none."""
    mine = graph.by_name[name]
    if mine.kind is not ValueKind.WEIGHT:
        return ""
    return next((v.name for v in graph.values if v.kind is ValueKind.WEIGHT and v.spec == mine.spec and v.name != name), "")


def _rounded(graph: Graph, node: Node) -> tuple[tuple[Node, ...], tuple[Value, ...]]:
    """The node with its result rounded to half the digits, in two more nodes behind it."""
    (out,), spec = node.outputs, graph.spec(node.outputs[0])
    exact, half = f"{out}.exact", f"{out}.half"
    narrow = "bfloat16" if spec.dtype.value == "float32" else "float8_e4m3fn"
    to: list[Node] = [
        evolve(node, name=f"{node.name}.{name}", op="aten._to_copy.default", kind="to", args=(Ref(given),),
               kwargs=(("dtype", Symbol("dtype", dtype)),), outputs=(made,))
        for name, given, dtype, made in (("half", exact, narrow, half), ("back", half, spec.dtype.value, out))
    ]
    made = tuple(Value(name=name, spec=TensorSpec(shape=spec.shape, dtype=spec.dtype)) for name in (exact, half))
    assert getattr(torch, narrow) is not None
    return (evolve(node, outputs=(exact,)), *to), made
