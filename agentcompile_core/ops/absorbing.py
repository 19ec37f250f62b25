"""Taking in the pointwise nodes before a match: what they compute becomes an Expression over the values that they read."""

from collections.abc import Iterator

from attrs import frozen

from ..ir.expression import Expression
from ..ir.graph import Node, TensorSpec
from .growth import MOST_NODES, expressed, is_pointwise
from .region_view import RegionView, is_contiguous


@frozen(kw_only=True)
class Prologue:
    """Pointwise nodes whose only result the match alone reads.

    Element i of that result is ``expression`` over element i modulo its size of every one of ``inputs``, which it calls in0,
    in1, ...; without nodes there is no ``expression``, and the one input is the result itself.
    """

    nodes: tuple[str, ...]
    expression: Expression | None
    inputs: tuple[str, ...]


def prologues(view: RegionView, value: str, readers: frozenset[str], *, limit: int) -> Iterator[Prologue]:
    """Every way to take in pointwise nodes before ``value``, which only the nodes ``readers`` may read; none of them first.

    Nodes are taken from the last on, with the views between them. What they read besides must repeat along the leading axes
    (``[T, T]`` of ``[B, H, T, T]``, a row, one element). At most ``limit`` values are read.
    """
    yield Prologue(nodes=(), expression=None, inputs=(value,))
    wanted, inside = {value}, set(readers)
    taken: list[Node] = []
    for node in reversed(view.graph.nodes):
        if len(taken) >= MOST_NODES:
            return
        if not set(node.outputs) & wanted or not _can_be_taken(view, node, value, inside):
            continue
        wanted.remove(node.outputs[0])
        wanted.update(node.inputs)
        taken.insert(0, node)
        inside.add(node.name)
        if not view.is_free(node) and len(wanted) <= limit:
            yield _prologue(view, taken, wanted)


def repeats(spec: TensorSpec, result: TensorSpec) -> bool:
    """Whether element i of ``result`` reads element i modulo its size of an operand that is broadcast to it."""
    shape = spec.shape
    while shape and shape[0] == 1:
        shape = shape[1:]
    return is_contiguous(spec) and shape == result.shape[len(result.shape) - len(shape):]


def _can_be_taken(view: RegionView, node: Node, value: str, inside: set[str]) -> bool:
    """Whether only what is taken reads the one result of ``node``, as large as ``value``: nothing is computed twice or again."""
    if len(node.outputs) != 1 or not view.only_used_by(node.outputs[0], inside):
        return False
    result = view.graph.spec(node.outputs[0])
    if result.numel != view.graph.spec(value).numel:
        return False
    return view.is_free(node) or (is_pointwise(view, node) and all(repeats(view.graph.spec(name), result) for name in node.inputs))


def _prologue(view: RegionView, taken: list[Node], wanted: set[str]) -> Prologue:
    inputs = tuple(name for name in dict.fromkeys(name for node in taken for name in node.inputs) if name in wanted)
    expression = expressed(view, taken, {name: f"in{i}" for i, name in enumerate(inputs)})
    return Prologue(nodes=tuple(node.name for node in taken), expression=expression, inputs=inputs)
