"""Rotations that a model writes out pair by pair become one ``agentcompile.rope`` each."""

from collections.abc import Iterator
from typing import Any

from attrs import evolve, frozen

from ...ir.graph import Argument, Graph, Node, Ref, Value
from ...ops.operator_names import ROPE, ROTARY
from ...ops.overloads import operator_of
from ...ops.schema import argument as argument_of
from .importer import spec_of
from .laid_out import without_memory
from .rewrite import View, beside, both_orders, eliminate_dead_code, rebuild

_NARROW = ("float16", "bfloat16")
_PAIRS, _HALVES = "pairs", "halves"


@frozen
class _Part:
    """The first (0) or second (1) partners of all channels of ``x``, which stand beside each other or half of them apart."""

    x: Argument
    layout: str
    number: int


@frozen
class _Table:
    """Cosines or sines of all pairs [1, T, R / 2], and at which axis they are repeated for all heads: 1, or 2 where tokens come first."""

    value: Ref
    axis: int


def rotate_pairs(graph: Graph) -> Graph:
    """One rotation for two sums of products that are put together again.

    Before: ``flatten(stack(a * c - b * s, a * s + b * c))`` or ``cat(a * c - b * s, b * c + a * s)`` where a and b are every second
    channel of x [1, H, T, R] or, with ``cat``, its halves; c and s are ``unsqueeze(table, 1)`` of [1, T, R / 2].
    After: ``rope(x, repeat_interleave(c, 2, -1), ..., interleaved)``; behind ``cat`` ``rope(x, cat(c, c), ...)``, of pairs behind
    a copy of x with every second channel first (DeepSeek-V3); between two transpositions where x is [1, T, H, R] (Llama 4). A cast of x
    to the type of wider tables is left to the products.
    """
    made = _Made(View(graph))
    for node in graph.nodes:
        if not made.replace(node):
            made.nodes.append(node)
    if not made.found:
        return graph
    return eliminate_dead_code(rebuild(evolve(graph, values=(*graph.values, *made.values.values())), made.nodes))


class _Made:
    """The nodes of the new graph, and the values that are new in it."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.nodes: list[Node] = []
        self.values: dict[str, Value] = {}
        self.found = 0

    def replace(self, node: Node) -> bool:
        """Whether ``node`` ends a rotation, which now stands in its place."""
        together, apart = self.view.stacked(node), self.view.joined(node)
        parts = together or apart
        found = _turned(self.view, parts) if parts is not None else None
        if found is None or (together is not None and found[0].layout == _HALVES):
            return False
        part, cos, sin = found
        x = self._uncast(part.x, cos.value)
        if apart is not None and part.layout == _PAIRS:
            x = self._halves_first(node, x)
        tables = [self._behind_itself(node, half.value) if apart is not None else self._twice(node, half.value) for half in (cos, sin)]
        self.found += 1
        if cos.axis == 1:
            self.nodes.append(beside(node, node.name, ROPE, "rope", (x, *tables, apart is None), node.outputs))
            return True
        turned = self._add(node, f"{node.name}.heads", "aten.transpose.int", "view", (x, 1, 2))
        rotated = self._add(node, f"{node.name}.rotated", ROPE, "rope", (turned, *tables, apart is None))
        self.nodes.append(beside(node, node.name, "aten.transpose.int", "view", (rotated, 1, 2), node.outputs))
        return True

    def _uncast(self, x: Argument, table: Ref) -> Ref:
        source, cast = self.view.through_cast(x)
        widened = cast is not None and self.view.dtype(source) in _NARROW and self.view.dtype(table) == self.view.dtype(x) == "float32"
        found = source if widened else x
        assert isinstance(found, Ref)
        return found

    def _add(self, node: Node, name: str, op: str, kind: str, args: tuple[Argument, ...]) -> Ref:
        """A new node beside ``node``, once per name."""
        if name not in self.values:
            self.nodes.append(beside(node, name, op, kind, args))
            result = operator_of(op)(*(self._shown(one) for one in args))
            self.values[name] = Value(name=name, spec=spec_of(result))
        return Ref(name)

    def _shown(self, argument: Argument) -> Any:
        if isinstance(argument, tuple):
            return [self._shown(one) for one in argument]
        if not isinstance(argument, Ref):
            return argument
        value = self.values.get(argument.value)
        return without_memory(value.spec if value is not None else self.view.graph.spec(argument.value))

    def _halves_first(self, node: Node, x: Ref) -> Ref:
        shape = self.view.shape(x)
        paired = self._add(node, f"{x.value}.pairs", "aten.reshape.default", "view", (x, (*shape[:-1], shape[-1] // 2, 2)))
        turned = self._add(node, f"{x.value}.turned", "aten.transpose.int", "view", (paired, -2, -1))
        copied = self._add(node, f"{x.value}.apart", "aten.contiguous.default", "copy", (turned,))
        return self._add(node, f"{x.value}.halves", "aten.view.default", "view", (copied, shape))

    def _twice(self, node: Node, half: Ref) -> Ref:
        return self._add(node, f"{half.value}.twice", "aten.repeat_interleave.self_int", "repeat_interleave", (half, 2, -1))

    def _behind_itself(self, node: Node, half: Ref) -> Ref:
        cut = self.view.slice_of(half)
        whole = cut[0] if cut is not None and cut[1] == 0 and self.view.shape(cut[0])[-1] == 2 * cut[2] else None
        made = self.view.graph.producer.get(whole.value) if isinstance(whole, Ref) else None
        if isinstance(whole, Ref) and made is not None and made.op == ROTARY and not argument_of(made, "interleaved"):
            return whole
        return self._add(node, f"{half.value}.behind", "aten.cat.default", "cat", ((half, half), -1))


def _turned(view: View, parts: tuple[Argument, Argument]) -> tuple[_Part, _Table, _Table] | None:
    """The first partners and the tables, cos first, where ``parts`` are the two sums of a rotation."""
    less = view.node(parts[0], "aten.sub.Tensor")
    for first, second in both_orders(less, "aten.sub.Tensor")[:1] if less is not None else ():
        for (a, cos), (b, sin) in _pairs(view, first, second):
            plus = view.node(parts[1], "aten.add.Tensor")
            sums = both_orders(plus, "aten.add.Tensor") if plus is not None else ()
            crossed = ((a, sin), (b, cos))
            if a.number == 0 and b == evolve(a, number=1) and any(crossed in _pairs(view, *both) for both in sums):
                return (a, cos, sin) if _fits(view, a, cos, sin) else None
    return None


def _pairs(view: View, first: Argument, second: Argument) -> list[tuple[tuple[_Part, _Table], tuple[_Part, _Table]]]:
    """Two products of partners and tables."""
    return [(one, other) for one in _product(view, first) for other in _product(view, second)]


def _product(view: View, argument: Argument) -> Iterator[tuple[_Part, _Table]]:
    node = view.node(argument, "aten.mul.Tensor")
    for value, table in both_orders(node, "aten.mul.Tensor") if node is not None else ():
        part, half = _part(view, value), _half(view, table)
        if part is not None and half is not None:
            yield part, half


def _part(view: View, argument: Argument) -> _Part | None:
    second, cut, picked = view.every_second(argument), view.slice_of(argument), view.node(argument, "aten.select.int")
    if second is not None:
        return _Part(second[0], _PAIRS, second[1])
    if cut is not None and view.shape(cut[0])[-1] == 2 * (cut[2] - cut[1]) and cut[1] in (0, cut[2] - cut[1]):
        return _Part(cut[0], _HALVES, int(cut[1] > 0))
    paired = view.node(picked.args[0]) if picked is not None and view.dim(picked) == len(view.shape(picked.args[0])) - 1 else None
    if picked is None or paired is None or paired.kind not in ("view", "copy") or not isinstance(paired.args[0], Ref):
        return None
    number, width = argument_of(picked, "index"), view.shape(paired.args[0])
    rows = view.graph.spec(paired.outputs[0]).shape == (*width[:-1], width[-1] // 2, 2)
    return _Part(paired.args[0], _PAIRS, number) if rows and isinstance(number, int) and number in (0, 1) else None


def _half(view: View, argument: Argument) -> _Table | None:
    """The table under ``unsqueeze(table, 1)``, or 2; a part of one is cut before that."""
    node = view.node(argument, "aten.unsqueeze.default")
    axis, table = (argument_of(node, "dim"), node.args[0]) if node is not None else (None, None)
    known = isinstance(table, Ref) and len(view.shape(table)) == 3 and view.shape(table)[0] == 1 and axis in (1, 2)
    return _Table(table, axis) if known and isinstance(table, Ref) and isinstance(axis, int) else None


def _fits(view: View, part: _Part, cos: _Table, sin: _Table) -> bool:
    shape = view.shape(part.x)
    wanted = (1, shape[3 - cos.axis], shape[3] // 2) if len(shape) == 4 and shape[0] == 1 else ()
    same = cos.axis == sin.axis and view.shape(cos.value) == view.shape(sin.value) == wanted
    return bool(wanted) and same and view.dtype(cos.value) == view.dtype(sin.value)
