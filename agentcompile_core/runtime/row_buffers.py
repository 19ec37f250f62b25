"""Values of a program of several rows that lie inside others, so that nothing copies them: rows that steps read or write."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from attrs import frozen

from ..ir.graph import Graph, Ref, ValueKind
from ..ir.region import Role
from ..ops.aliasing import ALIGNMENT_BYTES, alias_roots
from ..ops.joint_products import joint_runs
from ..ops.schema import argument
from .program import Segment

if TYPE_CHECKING:
    import torch

_SLICE, _CAT = "aten.slice.Tensor", "aten.cat.default"


@frozen(kw_only=True)
class Inside:
    """A value is ``count`` elements of ``whole`` from ``start`` on along ``axis``; in front of that axis there is one element each."""

    whole: str
    axis: int
    start: int
    count: int


def rows_of_operands(graph: Graph, segments: Sequence[Segment]) -> dict[str, Inside]:
    """Operands of steps that are slices of another value and lie in one piece of it."""
    found: dict[str, Inside] = {}
    for value in dict.fromkeys(value for segment in segments for _, values in segment.operands for value in values):
        node = graph.producer.get(value)
        if node is None or node.op != _SLICE or not isinstance(node.args[0], Ref):
            continue
        base, axis, first = node.args[0].value, argument(node, "dim"), argument(node, "start")
        if not isinstance(axis, int) or not isinstance(first, int) or min(axis, first) < 0 or argument(node, "step") != 1:
            continue
        has_states = graph.kind_of(base) is ValueKind.STATE
        if not graph.spec(base).strides and (has_states or base in graph.producer) and _in_one_piece(graph, value, base, axis, first):
            found[value] = Inside(whole=base, axis=axis, start=first, count=graph.spec(value).shape[axis])
    return found


def without_taken(graph: Graph, segments: Sequence[Segment], taken: Mapping[str, Inside]) -> tuple[Segment, ...]:
    """Drop framework segments that hold nothing but slices which only steps read, from where they are ``taken``."""
    by_steps = {name for segment in segments if segment.step is not None for name in segment.nodes}

    def needless(name: str) -> bool:
        node = graph.node_by_name[name]
        readers = {user.name for value in node.outputs for user in graph.users.get(value, ())}
        is_taken = all(value in taken and value not in graph.outputs for value in node.outputs)
        return node.op == _SLICE and is_taken and readers <= by_steps

    return tuple(segment for segment in segments if segment.step is not None or not all(map(needless, segment.nodes)))


def joined_results(graph: Graph, segments: Sequence[Segment]) -> dict[str, Inside]:
    """Results of steps, by the values that own their memory, that the framework would only put behind each other: they may be written there
    at once."""
    roots, found = alias_roots(graph), dict[str, Inside]()
    made = {roots[values[0]] for segment in segments for name, values in segment.operands
            if segment.match is not None and segment.match.need(name).role is Role.OUTPUT and len(values) == 1}
    by_framework = {name for segment in segments if segment.step is None for name in segment.nodes}
    written = {roots[name] for node in graph.nodes for name in node.mutates}
    for node in graph.nodes:
        axis, whole = argument(node, "dim") if node.op == _CAT else None, node.outputs[:1]
        if not isinstance(axis, int) or axis < 0 or node.name not in by_framework or whole[0] in written:
            continue
        places, at = dict[str, Inside](), 0
        for value in node.inputs:
            count = graph.spec(value).shape[axis]
            if _in_one_piece(graph, value, whole[0], axis, at):
                places[roots[value]] = Inside(whole=whole[0], axis=axis, start=at, count=count)
            at += count
        free = made.difference(found, written)
        if len(places) == len(node.inputs) and free.issuperset(places) and at == graph.spec(whole[0]).shape[axis]:
            found |= places
    return found


def _in_one_piece(graph: Graph, value: str, whole: str, axis: int, start: int) -> bool:
    """Whether what begins at ``start`` lies in one piece of ``whole``, where kernels can read vectors from."""
    shape, one = graph.spec(whole).shape, graph.spec(value)
    at = start * prod(shape[axis + 1 :]) * one.dtype.bytes
    return prod(shape[:axis]) == 1 and (one.numel == 1 or at % ALIGNMENT_BYTES == 0)


def products_by_rows(graph: Graph, segments: Sequence[Segment], taken: Mapping[str, Inside],
                     weights: "Mapping[str, torch.Tensor]") -> tuple[tuple[str, ...], ...]:
    """Results of products of which steps read each row and nothing else, so that they may be the columns of one matrix each."""
    rows, found = _read_by_rows(graph, segments, taken), []
    for segment in segments:
        nodes = [graph.node_by_name[name] for name in segment.nodes] if segment.step is None else []
        for run in joint_runs(graph, nodes, (), weights, rows):
            values = tuple(node.outputs[0] for node in run)
            specs = [graph.spec(value) for value in values]
            if rows.issuperset(values) and all(spec.shape[-1] * spec.dtype.bytes % ALIGNMENT_BYTES == 0 for spec in specs):
                found.append(values)
    return tuple(found)


def _read_by_rows(graph: Graph, segments: Sequence[Segment], taken: Mapping[str, Inside]) -> frozenset[str]:
    """Values that steps read row by row and in no other way: the rows need not lie behind each other."""
    roots = alias_roots(graph)
    otherwise = {roots[one.whole] for one in taken.values() if roots[one.whole] != one.whole}
    otherwise |= {roots[value] for segment in segments for _, values in segment.operands for value in values if value not in taken}
    return frozenset({one.whole for one in taken.values()} - otherwise)


def columns_of(matrix: "torch.Tensor", shapes: Mapping[str, Sequence[int]]) -> "dict[str, torch.Tensor]":
    """Values of ``shapes`` as columns of ``matrix``, which is one piece of memory."""
    total = sum(shape[-1] for shape in shapes.values())
    rows, found, at = matrix.view(-1, total), dict["str", "torch.Tensor"](), 0
    for value, shape in shapes.items():
        found[value] = rows[:, at : at + shape[-1]].unflatten(0, tuple(shape[:-1]))
        at += shape[-1]
    return found
