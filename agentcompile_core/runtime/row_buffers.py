"""Values of a program that lie inside others, so that nothing copies them: rows that steps read or write, parts of one token."""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from attrs import frozen

from ..ir.graph import Graph, Node, Ref, ValueKind
from ..ir.region import PROMISED_BYTES, Role
from ..ops.aliasing import ALIGNMENT_BYTES, alias_roots, memory_roots
from ..ops.joint_products import joint_runs
from ..ops.operator_names import SPLITS
from ..ops.region_view import is_contiguous
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
    return _inside(graph, segments, (_SLICE,), ALIGNMENT_BYTES)


def parts_of_operands(graph: Graph, segments: Sequence[Segment]) -> dict[str, Inside]:
    """The same of one token, whose values are also split into what lies in one piece each: parts of what a step alone writes, to a place
    of its own."""
    roots, memory = alias_roots(graph), memory_roots(graph)
    made = {roots[values[0]] for segment in segments for name, values in segment.operands
            if segment.match is not None and segment.match.need(name).role is Role.OUTPUT and len(values) == 1}
    written = {memory[name] for node in graph.nodes for name in node.mutates}
    found = _inside(graph, segments, (_SLICE, *SPLITS), PROMISED_BYTES)
    return {value: one for value, one in found.items() if roots[one.whole] in made and memory[one.whole] not in written}


def _inside(graph: Graph, segments: Sequence[Segment], ops: Collection[str], alignment_bytes: int) -> dict[str, Inside]:
    found: dict[str, Inside] = {}
    by_steps = {name for segment in segments if segment.step is not None for name in segment.nodes}
    for value in dict.fromkeys(value for segment in segments for _, values in segment.operands for value in values):
        node = graph.producer.get(value)
        if node is None or node.op not in ops or node.name in by_steps or not isinstance(node.args[0], Ref):
            continue  # a step that cuts its result writes the parts
        base, axis, first = node.args[0].value, argument(node, "dim"), _start(graph, node, value)
        if not isinstance(axis, int) or first is None:
            continue
        axis %= len(graph.spec(base).shape)
        is_placed = is_contiguous(graph.spec(base)) and (graph.kind_of(base) is ValueKind.STATE or base in graph.producer)
        if is_placed and _in_one_piece(graph, value, base, axis, first, alignment_bytes):
            found[value] = Inside(whole=base, axis=axis, start=first, count=graph.spec(value).shape[axis])
    return found


def _start(graph: Graph, node: Node, value: str) -> int | None:
    """Where a part begins along its axis; None: not known."""
    axis = argument(node, "dim")
    if node.op != _SLICE:
        return sum(graph.spec(out).shape[axis] for out in node.outputs[: node.outputs.index(value)]) if isinstance(axis, int) else None
    first = argument(node, "start")
    return first if isinstance(first, int) and first >= 0 and argument(node, "step") == 1 else None


def without_taken(graph: Graph, segments: Sequence[Segment], taken: Mapping[str, Inside]) -> tuple[Segment, ...]:
    """Drop framework segments that hold nothing but parts which only steps read, from where they are ``taken``."""
    by_steps = {name for segment in segments if segment.step is not None for name in segment.nodes}

    def needless(name: str) -> bool:
        node = graph.node_by_name[name]
        readers = {user.name for value in node.outputs for user in graph.users.get(value, ())}
        is_taken = all((value in taken or not graph.users.get(value)) and value not in graph.outputs for value in node.outputs)
        return node.op in (_SLICE, *SPLITS) and is_taken and readers <= by_steps

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


def _in_one_piece(graph: Graph, value: str, whole: str, axis: int, start: int, alignment_bytes: int = ALIGNMENT_BYTES) -> bool:
    """Whether what begins at ``start`` lies in one piece of ``whole``, where kernels can read vectors from."""
    shape, one = graph.spec(whole).shape, graph.spec(value)
    at = start * prod(shape[axis + 1 :]) * one.dtype.bytes
    return prod(shape[:axis]) == 1 and (one.numel == 1 or at % alignment_bytes == 0)


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
