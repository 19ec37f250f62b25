"""What several layers compute alike from what no layer makes (tables of positions) is computed once, in front of them."""

from collections import defaultdict

import torch
from attrs import evolve

from ...ir.graph import Graph, Node, map_refs
from ...ops.aliasing import memory_roots
from ...ops.overloads import is_pointwise, operator_of
from .rewrite import rebuild

_MADE = frozenset({"cat", "stack", "arange", "full", "full_like", "zeros", "zeros_like", "ones", "ones_like", "embedding", "index_select"})
_FREE = "view"


def hoist_invariants(graph: Graph) -> Graph:
    """Nodes of different layers that compute the same from the same are one node, which belongs to no layer; so is one that several read.

    Before, in every layer: ``c = cat([cos, cos], -1)`` of a table in front of the layers; ``s = log(floor(position / 16384) + 1)``.
    After: one of each, in front of them.

    Only what moves or computes elements by themselves, and never what is written in place, or read on both sides of a write.
    """
    numbers = _numbered(graph)
    by_number = defaultdict[str, list[Node]](list)
    for node in graph.nodes:
        if node.name in numbers:
            by_number[numbers[node.name]].append(node)
    alike = {number: nodes for number, nodes in by_number.items() if len(_layers(graph, nodes)) > 1}
    wanted = _worth(graph, alike, numbers)
    if not wanted:
        return graph
    renamed = {other: first for number in wanted for node in alike[number][1:]
               for other, first in zip(node.outputs, alike[number][0].outputs, strict=True)}
    firsts = {alike[number][0].name for number in wanted}
    gone = {node.name for number in wanted for node in alike[number][1:]}
    kept = [node for node in graph.nodes if node.name not in gone | firsts]
    for first in (node for node in graph.nodes if node.name in firsts):
        names = {renamed.get(name, name) for name in first.inputs if name in graph.producer}
        place = 1 + max((i for i, node in enumerate(kept) if names.intersection(node.outputs)), default=-1)
        kept.insert(place, evolve(first, layer=-1))
    return rebuild(graph, kept, renamed)


def _numbered(graph: Graph) -> dict[str, str]:
    """By node of a layer that depends on no layer, a number that is the same for nodes that compute the same."""
    roots = memory_roots(graph)
    written = {roots[name]: place for place, node in reversed(list(enumerate(graph.nodes))) for name in node.mutates}
    found: dict[str, str] = {}
    values: dict[str, str] = {}  # results that are told apart by their numbers, each with the name of one that is alike
    known: dict[str, tuple[str, ...]] = {}
    for place, node in enumerate(graph.nodes):
        free = node.layer >= 0 and not node.mutates and (node.kind == _FREE or node.kind in _MADE or _is_pointwise(node.op))
        if not free or not all(_is_outside(graph, name) or name in values for name in node.inputs):
            continue
        if any(written.get(roots[name], len(graph.nodes)) < place for name in (*node.inputs, *node.outputs)):
            continue
        args = tuple(map_refs(one, values) for one in node.args)
        # As text: 0.0 and -0.0 are equal, and so are 1 and True.
        number = repr((node.op, args, [(key, map_refs(one, values)) for key, one in node.kwargs], [graph.spec(o) for o in node.outputs]))
        found[node.name] = number
        values |= dict(zip(node.outputs, known.setdefault(number, node.outputs), strict=True))
    return found


def _is_pointwise(op: str) -> bool:
    return is_pointwise(op) and torch.Tag.nondeterministic_seeded not in operator_of(op).tags  # type: ignore[attr-defined]


def _layers(graph: Graph, nodes: list[Node]) -> set[int]:
    """The layers that compute or read what ``nodes`` are."""
    users = (user for node in nodes for name in node.outputs for user in graph.users.get(name, ()))
    return {node.layer for node in (*nodes, *users)} - {-1}


def _is_outside(graph: Graph, name: str) -> bool:
    made = graph.producer.get(name)
    return made is None or made.layer < 0


def _worth(graph: Graph, alike: dict[str, list[Node]], numbers: dict[str, str]) -> list[str]:
    """Those that cost something in each layer, with the views that they are made of; written ones never."""
    roots = memory_roots(graph)
    written = {roots[name] for node in graph.nodes for name in node.mutates if name in graph.producer}
    wanted = {number for number, nodes in alike.items()
              if nodes[0].kind != _FREE and not any(roots[name] in written for node in nodes for name in node.outputs)}
    for number, nodes in reversed(alike.items()):  # a view stands in front of what is made of it
        users = {numbers.get(user.name) for name in nodes[0].outputs for user in graph.users.get(name, ())}
        if nodes[0].kind == _FREE and users & wanted:
            wanted.add(number)
    # What is moved in front of the layers reads nothing that stays in them.
    return [number for number, nodes in alike.items() if number in wanted and all(
        _is_outside(graph, name) or numbers[graph.producer[name].name] in wanted for name in nodes[0].inputs)]
