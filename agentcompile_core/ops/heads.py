"""Heads of a prompt chunk on their way into a call of attention: the norm and the rotation that only this call reads."""

from collections.abc import Container

from attrs import field, frozen

from ..ir.graph import DType, Graph, Node, Ref
from .aliasing import only_part
from .operator_names import RMS_NORM, ROPE
from .schema import named
from .write_order import written_between

OPERANDS = ("q", "k", "v")
_COPIES = ("aten.clone.default", "aten.contiguous.default")


@frozen(kw_only=True)
class Way:
    """From the value ``source`` through an RMS norm and then a rotation, where there are such, to an operand [1, H, T, D].

    ``swapped``: ``source`` is [1, T, H, D]. ``wide``: the rotation is in float32, between two casts. ``nodes``: all on the way, in
    the graph's order; nothing else reads what they make.
    """

    source: str
    swapped: bool = False
    norm: Node | None = None
    rope: Node | None = None
    wide: bool = False
    nodes: tuple[str, ...] = field(default=(), converter=tuple)


def ways_in(graph: Graph, attention: Node, held: Container[str]) -> dict[str, Way]:
    """How ``q``, ``k`` and ``v`` of a call of attention are made. ``held``: nodes that something else runs, so that no way has them."""
    given = named(attention.op, attention.args, dict(attention.kwargs))
    return {name: _way(graph, attention, given[name], held) for name in OPERANDS}  # type: ignore[arg-type]


def _way(graph: Graph, attention: Node, operand: Ref, held: Container[str]) -> Way:
    way, reader = Way(source=operand.value), attention
    narrow: Way | None = None  # up to a rotation in float32, as long as nothing is known to cast to it
    while (node := _maker(graph, way.source, reader, held)) is not None:
        kept = {"swapped": way.swapped, "norm": way.norm, "rope": way.rope, "wide": way.wide}
        part = only_part(graph, node)  # how it lies is nobody's business here
        first = Ref(part) if part else next(iter(node.args), None)
        if _swaps(node):
            kept["swapped"] = not way.swapped
        elif node.op in _COPIES or part:
            pass
        elif node.op == ROPE and way.rope is way.norm is None and not way.swapped:
            kept["rope"] = node
        elif node.op == RMS_NORM and way.norm is None and narrow is None:
            kept["norm"] = node
        elif node.kind == "cast" and way.rope is way.norm is None and narrow is None and _type(graph, node.inputs[0]) is DType.F32:
            narrow = way
        elif narrow is not None and way.rope is not None and _widens(graph, node, operand.value):
            narrow, kept["wide"] = None, True
        else:
            break
        if not isinstance(first, Ref):
            break
        way, reader = Way(source=first.value, nodes=(node.name, *way.nodes), **kept), node  # type: ignore[arg-type]
    way = way if narrow is None else narrow
    return Way(source=operand.value) if _written_meanwhile(graph, way, attention) else way


def _type(graph: Graph, value: str) -> DType:
    return graph.spec(value).dtype


def _widens(graph: Graph, node: Node, operand: str) -> bool:
    """Whether it casts from the type of ``operand`` to float32."""
    return node.kind == "cast" and _type(graph, node.inputs[0]) is _type(graph, operand) and _type(graph, node.outputs[0]) is DType.F32


def _maker(graph: Graph, value: str, reader: Node, held: Container[str]) -> Node | None:
    """The node that makes ``value`` for ``reader`` alone."""
    readers = {user.name for user in graph.users.get(value, ())}
    node = graph.producer.get(value)
    if node is None or readers != {reader.name} or value in graph.outputs or node.name in held or len(node.outputs) != 1 or node.mutates:
        return None
    return node


def _swaps(node: Node) -> bool:
    """Whether it is the transpose of heads and tokens, of four axes."""
    if node.op == "aten.transpose.int":
        return {axis % 4 for axis in node.args[1:3] if isinstance(axis, int)} == {1, 2}
    return node.op == "aten.permute.default" and node.args[1] == (0, 2, 1, 3)


def _written_meanwhile(graph: Graph, way: Way, attention: Node) -> bool:
    """Whether anything but attention, which writes caches, writes in place between the first node of a way and its end."""
    return bool(way.nodes) and written_between(graph, way.nodes[0], attention.name, by_attention=False)
