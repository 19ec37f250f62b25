"""Products of the same rows with weights that lie behind each other in memory, as one product: Q, K and V, or gate and up.

One product of many columns fills the device better than several of few, and a short prompt waits for one launch instead of three. What
came apart are slices of its rows afterwards, so only values are joined whose readers take slices.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from ..ir.graph import Graph, Node, Ref
from .bodies import is_of_weights
from .operator_names import ATTENTION, LINEAR, RMS_NORM, ROPE, operator
from .overloads import is_pointwise
from .write_order import written_between

if TYPE_CHECKING:
    from torch import Tensor

# They give a dense tensor of a slice, as every pointwise operator does.
_TAKE_SLICES = frozenset({"linear", "clone", "cat"})
# They give another slice, or a view of one.
_PASS_ON = frozenset({"transpose", "permute", "slice", "select", "narrow", "unsqueeze", "split", "split_with_sizes", "unbind", "chunk"})
_RESHAPE = frozenset({"view", "_unsafe_view", "reshape", "unflatten"})
_OURS = frozenset({RMS_NORM, ROPE, ATTENTION})


@frozen(kw_only=True)
class Memory:
    """By value name, where ``weights`` lie from now on, and where some ``results`` are wanted; ``joins``: whether products may be one."""

    weights: "Mapping[str, Tensor]" = field(factory=dict)
    results: "Mapping[str, Tensor]" = field(factory=dict)
    joins: bool = True


def with_joint_products(
    graph: Graph, nodes: Sequence[Node], outputs: Collection[str], memory: Memory, body: Callable[..., Any] | None = None
) -> tuple[list[Node], dict[str, Callable[..., Any]], frozenset[str]]:
    """``nodes`` where the first of several products became all of them, callables of those by name, and the results that lie where they
    are wanted: products write those that are the columns of one matrix there. ``outputs``: values that somebody reads as they lie.
    ``body``: the device's own product, see ``Backend.body``.
    """
    found: dict[str, Callable[..., Any]] = {}
    merged: dict[str, Node] = {}
    gone: set[str] = set()
    written: set[str] = set()
    tensors, wanted, places = memory.weights, memory.results, {node.name: place for place, node in enumerate(nodes)}
    for several in joint_runs(graph, nodes, set(outputs).difference(wanted), tensors, wanted):
        values = [node.outputs[0] for node in several]
        columns = [wanted[value] for value in values if value in wanted]
        matrix = _matrix_of(columns) if len(columns) == len(values) else None
        if matrix is None and len(several) == 1:
            continue
        first = min(several, key=lambda node: places[node.name])
        merged[first.name] = evolve(first, args=first.args[:1], outputs=tuple(values))
        operands = [[tensors[_name(node, place)] for node in several] for place in range(1, len(first.args))]
        found[first.name] = joint(operands, body) if matrix is None else _written(operands, matrix, columns, body)
        written.update(values if matrix is not None else ())
        gone.update(node.name for node in several if node is not first)
    return [merged.get(node.name, node) for node in nodes if node.name not in gone], found, frozenset(written)


def joint_runs(graph: Graph, nodes: Sequence[Node], outputs: Collection[str], tensors: "Mapping[str, Tensor]",
               alone: Collection[str] = ()) -> list[list[Node]]:
    """Products that may be one, in the order of their weights; also those of one product each whose result is ``alone``."""
    runs = [run for several in _siblings(graph, nodes, outputs) for run in _adjacent(several, tensors)]
    known = {node.name for run in runs for node in run}
    return runs + [[node] for node in nodes if node.name not in known and node.op == LINEAR and node.outputs[0] in alone
                   and is_of_weights(graph, node)]


def _siblings(graph: Graph, nodes: Sequence[Node], outputs: Collection[str]) -> list[list[Node]]:
    """Products of one value each, where nothing writes in place from the first of them to the last, and slices will do."""
    by_rows: dict[tuple[str, int], list[Node]] = {}
    for node in nodes:
        if node.op == LINEAR and is_of_weights(graph, node) and node.outputs[0] not in (*outputs, *graph.outputs):
            by_rows.setdefault((_name(node, 0), len(node.args)), []).append(node)
    return [several for several in by_rows.values() if len(several) > 1 and not written_between(graph, several[0].name, several[-1].name)
            and all(_slice_will_do(graph, node.outputs[0]) for node in several)]


def _name(node: Node, place: int) -> str:
    given = node.args[place]
    assert isinstance(given, Ref)
    return given.value


def _slice_will_do(graph: Graph, value: str) -> bool:
    """Whether every reader of a value takes a slice of wider rows for it, and nobody writes to it."""
    for node in graph.users.get(value, ()):
        name = operator(node)[0]
        if value in node.mutates:
            return False
        if name in _PASS_ON or (name in _RESHAPE and _splits_rows(graph, node)):
            if any(out in graph.outputs or not _slice_will_do(graph, out) for out in node.outputs):
                return False
        elif name not in _TAKE_SLICES and node.op not in _OURS and not is_pointwise(node.op):
            return False
    return True


def _splits_rows(graph: Graph, node: Node) -> bool:
    """Whether a reshape leaves all axes but the last, which it may divide: that is possible for slices of rows."""
    before, after = graph.spec(node.inputs[0]).shape, graph.spec(node.outputs[0]).shape
    return operator(node)[1] != "dtype" and len(after) >= len(before) and after[: len(before) - 1] == before[:-1]


def _adjacent(several: Sequence[Node], tensors: "Mapping[str, Tensor]") -> list[list[Node]]:
    """Of products of one value those whose weights, and biases, lie behind each other, in that order."""
    ordered = sorted(several, key=lambda node: tensors[_name(node, 1)].data_ptr())
    found = [[ordered[0]]]
    for node in ordered[1:]:
        last = found[-1][-1]
        if all(lie_behind(tensors[_name(last, place)], tensors[_name(node, place)]) for place in range(1, len(node.args))):
            found[-1].append(node)
        else:
            found.append([node])
    return [run for run in found if len(run) > 1]


def lie_behind(first: "Tensor", second: "Tensor") -> bool:
    """Whether ``second`` begins where ``first`` ends, within one piece of memory, so that both are rows of one matrix."""
    same = first.dtype is second.dtype and first.shape[1:] == second.shape[1:] and first.is_contiguous() and second.is_contiguous()
    ends = first.data_ptr() + first.numel() * first.element_size()
    return same and first.numel() > 0 and ends == second.data_ptr() and (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr())


def joint(operands: "Sequence[Sequence[Tensor]]", body: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The product with the weights of ``operands``, and their biases if there are, whose columns are dealt to several results."""
    import torch

    sizes, joined = [weight.shape[0] for weight in operands[0]], _joined(operands)

    def run(x: "Tensor") -> "tuple[Tensor, ...]":
        found = body(x, *joined) if body is not None else None
        return (torch.nn.functional.linear(x, *joined) if found is None else found).split(sizes, -1)

    return run


def _joined(operands: "Sequence[Sequence[Tensor]]") -> "list[Tensor]":
    """Weights behind each other, and biases, as one each."""
    rows = sum(weight.shape[0] for weight in operands[0])
    return [one[0].as_strided((rows, *one[0].shape[1:]), one[0].stride()) for one in operands]


def _written(operands: "Sequence[Sequence[Tensor]]", matrix: "Tensor", columns: "Sequence[Tensor]",
             body: Callable[..., Any] | None) -> Callable[..., Any]:
    """The product with the weights of ``operands`` written to ``matrix``, whose ``columns`` are the results."""
    import torch

    weight, *bias = _joined(operands)
    turned, results = weight.t(), columns[0] if len(columns) == 1 else tuple(columns)

    def run(x: "Tensor") -> Any:
        rows = x.reshape(matrix.shape[0], -1)
        if body is not None and body(rows, weight, *bias, out=matrix) is not None:
            return results
        if bias:
            torch.addmm(bias[0], rows, turned, out=matrix)
        else:
            torch.mm(rows, turned, out=matrix)
        return results

    return run


def _matrix_of(columns: "Sequence[Tensor]") -> "Tensor | None":
    """The matrix [rows, all columns] of which these are columns, from left to right and without gaps; None: there is none."""
    first, total = columns[0], sum(one.shape[-1] for one in columns)
    at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for one in columns:
        if (one.data_ptr(), one.untyped_storage().data_ptr()) != (at, storage) or one.dtype is not first.dtype:
            return None
        if one.shape[:-1] != first.shape[:-1] or not _in_rows_of(total, one):
            return None
        at += one.shape[-1] * one.element_size()
    rows = first.numel() // max(1, first.shape[-1])
    return first.as_strided((rows, total), (total, 1), first.storage_offset()) if first.numel() else None


def _in_rows_of(total: int, one: "Tensor") -> bool:
    """Whether a tensor's rows lie ``total`` elements apart, in order; axes of one element have no say."""
    strides, step = [1], total
    for extent in reversed(one.shape[:-1]):
        strides.append(step)
        step *= extent
    return all(extent == 1 or stride == wanted for extent, stride, wanted in zip(one.shape, one.stride(), strides[::-1], strict=True))
