"""Single numbers that a graph computes of nothing but numbers are computed once, here (thresholds of activation sparsity)."""

import math

import torch
from attrs import evolve

from ...ir.graph import Argument, Graph, Node, Ref
from ...ops.aliasing import memory_roots
from ...ops.dtypes import torch_dtype
from ...ops.interpreter import compile_nodes
from ...ops.overloads import is_pointwise
from .rewrite import rebuild

_HANDED_ON = frozenset(f"aten.{name}" for name in (
    "lift_fresh_copy.default", "detach.default", "detach_.default", "alias.default", "clone.default", "to.dtype",
    "broadcast_tensors.default"))
_DETACH = "aten.detach_.default"
_TAKING_NUMBERS = frozenset(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))


def fold_numbers(graph: Graph) -> Graph:
    """Literals instead of single numbers that depend on nothing, where pointwise operators read them.

    Before: ``c = to(mul(erfinv(sub(mul(full([], 0.95), 2), 1)), 1.414), bfloat16); mul(std, c)``. After: ``mul(std, 1.6484375)``.
    """
    if not any(node.op == "aten.full.default" and not node.inputs for node in graph.nodes):
        return graph
    known = _known(graph)
    numbers = _computed(graph, known)
    nodes = [node if node.name in known else _with_numbers(graph, node, numbers) for node in graph.nodes]
    live = {name for node in nodes if node.name not in known for name in node.inputs} | set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.name not in known or not live.isdisjoint(node.outputs):
            live.update(node.inputs)
            kept.append(node)
    return rebuild(graph, reversed(kept))


def _known(graph: Graph) -> set[str]:
    """Names of the nodes that make one number of numbers alone, in memory that nothing writes."""
    roots = memory_roots(graph)
    written = {roots[name] for node in graph.nodes if node.op != _DETACH for name in node.mutates}
    made: set[str] = set()
    found: set[str] = set()
    for node in graph.nodes:
        single = bool(node.outputs) and all(not graph.spec(name).shape and graph.spec(name).dtype.is_float for name in node.outputs)
        free = single and all(roots[name] not in written for name in node.outputs) and made.issuperset(node.inputs)
        begins = node.op == "aten.full.default"
        if free and (begins or (node.inputs and (node.op in _HANDED_ON or (is_pointwise(node.op) and not node.mutates)))):
            found.add(node.name)
            made.update(node.outputs)
    return found


def _computed(graph: Graph, known: set[str]) -> dict[str, float]:
    nodes = tuple(node for node in graph.nodes if node.name in known)
    if not nodes:
        return {}
    results = tuple(name for node in nodes for name in node.outputs)
    part = evolve(graph, nodes=nodes, outputs=results, inputs=(), values=tuple(v for v in graph.values if v.name in set(results)))
    return {name: float(value) for name, value in zip(results, compile_nodes(part, device="cpu").bind({})(), strict=True)}


def _with_numbers(graph: Graph, node: Node, numbers: dict[str, float]) -> Node:
    """``node`` with a literal for its second operand, where it rounds that as it would the tensor."""
    if node.op not in _TAKING_NUMBERS or node.mutates or len(node.args) < 2 or not isinstance(node.args[0], Ref):
        return node
    other: Argument = node.args[1]
    number = numbers.get(other.value) if isinstance(other, Ref) else None
    if number is None or not isinstance(other, Ref) or not math.isfinite(number):
        return node
    given, result = graph.spec(node.args[0].value), graph.spec(node.outputs[0])
    exact = float(torch.tensor(number, dtype=torch.float64).to(torch_dtype(result.dtype))) == number
    return evolve(node, args=(node.args[0], number, *node.args[2:])) if given.dtype is result.dtype and exact else node
