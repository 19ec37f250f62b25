"""Rotations that a model writes out become one ``agentcompile.rope`` each, in either style."""

from collections.abc import Callable, Iterator

from attrs import define, evolve, field

from ...ir.graph import Argument, Graph, Node, Ref, TensorSpec, Value
from ...ops.operator_names import ATTENTION, ROPE, ROTARY
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical, with_argument
from .rewrite import View, beside, both_orders, call, eliminate_dead_code, fuse, rebuild

CAST = "aten.to.dtype"


@define
class _Additions:
    """Nodes that a pass puts right behind those that make their operands, each once."""

    graph: Graph
    behind: dict[str, list[Node]] = field(factory=dict)  # name of the node before (empty: of none) -> nodes
    values: dict[str, Value] = field(factory=dict)

    def add(self, before: str, node: Node) -> tuple[Ref, ...]:
        """``node`` behind the node called ``before`` (empty: before all); its results have the specs of the values it names."""
        new = canonical(evolve(node, outputs=tuple(f"{node.name}.{i}" for i in range(len(node.outputs)))))
        if new.outputs[0] not in self.values:
            self.behind.setdefault(before, []).append(new)
            for name, like in zip(new.outputs, node.outputs, strict=True):
                self.values[name] = Value(name=name, spec=self.graph.spec(like))
        return tuple(Ref(name) for name in new.outputs)

    def done(self, replaced: dict[str, Node]) -> Graph:
        """The graph with these nodes, and with others in the place of those named in ``replaced``."""
        grown = evolve(self.graph, values=(*self.graph.values, *self.values.values()))
        nodes = [*self.behind.get("", ()), *(one for node in grown.nodes for one in (node, *self.behind.get(node.name, ())))]
        return fuse(rebuild(grown, nodes), replaced)


def interleave_tables(graph: Graph) -> Graph:
    """Tables whose frequencies are made to stand two times behind each other are made so from the start.

    Before: ``c = rotary_embedding(...)``, each frequency once in either half; ``repeat_interleave(c[..., :half], 2, -1)``.
    After: ``rotary_embedding(..., interleaved)``, one for all layers.
    """
    view, added = View(graph), _Additions(graph)
    replaced: dict[str, Node] = {}
    for node in graph.nodes:
        half = view.slice_of(node.args[0]) if node.op == "aten.repeat_interleave.self_int" and node.args[1:] == (2, -1) else None
        if half is None or half[1] != 0 or half[2] * 2 != view.shape(half[0])[-1]:
            continue
        shaped = view.node(half[0], "aten.unsqueeze.default")
        table = shaped.args[0] if shaped is not None else half[0]
        made = graph.producer.get(table.value) if isinstance(table, Ref) else None
        if made is None or made.op != ROTARY or argument_of(made, "interleaved") or not isinstance(table, Ref):
            continue
        twin = added.add(made.name, evolve(with_argument(made, "interleaved", True), name=f"{made.name}.interleaved"))
        new = twin[made.outputs.index(table.value)]
        like = shaped or Node(name=node.name, op="aten.alias.default", kind="view", args=(new,), outputs=node.outputs)
        replaced[node.name] = canonical(evolve(like, name=node.name, args=(new, *like.args[1:]), outputs=node.outputs))
    return added.done(replaced) if replaced else graph


def rotate_by_heads(graph: Graph) -> Graph:
    """A rotation of [1, T, H, D], tokens first, is one of [1, H, T, D] between two transpositions.

    Before: ``x * c + swapped * s`` with tables [1, T, 1, R] that are ``repeat_interleave(unsqueeze(t, 2), 2, 3)`` (GPT-J, CodeGen),
    or ``unsqueeze(t, 2)`` in either style (Gemma 4).
    After: ``transpose(rope(transpose(x), repeat_interleave(t, 2, -1), ..., interleaved))``, or by t as it is.
    """
    view = View(graph)
    nodes: list[Node] = []
    values: list[Value] = []
    tables: dict[str, str] = {}
    laid: dict[str, TensorSpec] = {}
    for node in graph.nodes:
        found = _by_tokens(view, node)
        if found is None:
            nodes.append(node)
            continue
        x, given, interleaved = found
        shape = view.shape(x)
        for half in given if view.shape(given[0])[-1] < shape[-1] else ():
            if half.value not in tables:
                tables[half.value] = twice = f"{half.value}.twice"
                nodes.append(beside(node, twice, "aten.repeat_interleave.self_int", "repeat_interleave", (half, 2, -1)))
                spec = graph.spec(half.value)
                values.append(Value(name=twice, spec=evolve(spec, shape=(*spec.shape[:-1], 2 * spec.shape[-1]), strides=())))
        turned, rotated = f"{node.name}.turned", f"{node.name}.rotated"
        by_heads = (shape[0], shape[2], shape[1], shape[3])
        spec = evolve(graph.spec(node.outputs[0]), shape=by_heads, strides=())  # what is rotated is packed first
        apart = graph.spec(x.value).strides
        across = evolve(spec, strides=(apart[0], apart[2], apart[1], apart[3]) if apart else _swapped(shape))
        laid[node.outputs[0]] = evolve(spec, shape=shape, strides=_swapped(by_heads))
        if given[0].value not in tables:  # then its users turn it back
            laid.update((one.outputs[0], spec) for one in graph.users.get(node.outputs[0], ()) if 1 not in shape[1:3])
        cos, sin = (Ref(tables.get(table.value, table.value)) for table in given)
        values += [Value(name=turned, spec=across), Value(name=rotated, spec=spec)]
        nodes += [
            beside(node, turned, "aten.transpose.int", "view", (x, 1, 2)),
            beside(node, rotated, ROPE, "rope", (Ref(turned), cos, sin, interleaved)),
            beside(node, node.name, "aten.transpose.int", "view", (Ref(rotated), 1, 2), node.outputs),
        ]
    kept = (evolve(value, spec=laid.get(value.name, value.spec)) for value in graph.values)
    return eliminate_dead_code(rebuild(evolve(graph, values=(*kept, *values)), nodes)) if values else graph


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the transposition of a contiguous [1, A, B, D] along A and B; empty where it is contiguous as well."""
    _, tokens, heads, width = shape
    return () if tokens == 1 or heads == 1 else (tokens * heads * width, width, heads * width, 1)


def _products(view: View, node: Node) -> Iterator[tuple[Argument, Argument, Argument, Argument]]:
    """``x * cos + swapped * sin`` read in every order of its sum and products."""
    for first, second in both_orders(node, "aten.add.Tensor"):
        straight, turned = view.node(first, "aten.mul.Tensor"), view.node(second, "aten.mul.Tensor")
        if straight is None or turned is None:
            continue
        for x, cos in both_orders(straight, "aten.mul.Tensor"):
            for swapped, sin in both_orders(turned, "aten.mul.Tensor"):
                yield x, cos, swapped, sin


def _by_tokens(view: View, node: Node) -> tuple[Ref, tuple[Ref, Ref], bool] | None:
    """x, its tables, cos first, or the halves of them, and whether neighbours turn together."""
    for x, cos, swapped, sin in _products(view, node):
        if not isinstance(x, Ref) or len(view.shape(x)) != 4 or view.shape(x)[0] != 1:
            continue
        if view.graph.tokens != 1 and view.graph.spec(x.value).strides:
            continue
        style, width = _swap_of(view, swapped, x), view.shape(x)[-1]
        halves, wholes = ((look(view, cos), look(view, sin)) for look in (_half_table, _whole_table))
        if style == "interleaved" and halves[0] and halves[1] and all(2 * view.shape(half)[-1] == width for half in halves):
            return x, (halves[0], halves[1]), True
        rows = (view.shape(x)[1], width)
        if style in ("interleaved", "half") and wholes[0] and wholes[1] and all(view.shape(table)[1:] == rows for table in wholes):
            return (x, (wholes[0], wholes[1]), style == "interleaved") if _lies_anyhow(view, node) else None
    return None


def _lies_anyhow(view: View, node: Node) -> bool:
    """Whether it does not matter where the elements of a result [1, T, H, D] lie: rotated by heads they lie as [1, H, T, D].

    Either there is one token or one head, or attention alone reads it, by heads.
    """
    graph, shape = view.graph, view.shape(Ref(node.outputs[0]))
    if 1 in shape[1:3]:
        return True
    turned = graph.users.get(node.outputs[0], ())
    readers = [user for one in turned for user in graph.users.get(one.outputs[0], ())]
    by_heads = all(one.op == "aten.transpose.int" and {one.args[1], one.args[2]} in ({1, 2}, {-3, -2}) for one in turned)
    leaving = {node.outputs[0], *(one.outputs[0] for one in turned)}.intersection(graph.outputs)
    return bool(readers) and by_heads and not leaving and all(reader.op == ATTENTION for reader in readers)


def _whole_table(view: View, argument: Argument) -> Ref | None:
    """The [1, T, R] table under ``unsqueeze(t, 2)``."""
    column = view.node(argument, "aten.unsqueeze.default")
    found = column.args[0] if column is not None and argument_of(column, "dim") == 2 else None
    return found if isinstance(found, Ref) and len(view.shape(found)) == 3 and view.shape(found)[0] == 1 else None


def _half_table(view: View, argument: Argument) -> Ref | None:
    """The [1, T, R / 2] table under ``repeat_interleave(unsqueeze(t, 2), 2, 3)``."""
    twice = view.node(argument, "aten.repeat_interleave.self_int")
    return _whole_table(view, twice.args[0]) if twice is not None and twice.args[1:] in ((2, 3), (2, -1)) else None


def collapse_rope(graph: Graph) -> Graph:
    """One ``agentcompile.rope`` for a rotation in either style, of all channels or of the first R.

    Before: ``x * unsqueeze(cos, 1) + swapped * unsqueeze(sin, 1)`` where ``swapped`` is ``cat(neg(x[..., half:]), x[..., :half])``,
    or ``flatten(stack(neg(x[..., 1::2]), x[..., 0::2]))``; for a part of the channels with ``cat(that, x[..., R:])`` behind it.
    After: ``rope(x, cos, sin, interleaved)``. Where the other half is negated (nanochat), ``sin`` is instead.
    """
    view, added = View(graph), _Additions(graph)
    found: dict[str, Node] = {}
    for node in graph.nodes:
        rotation = _rotation(view, node, added)
        if rotation is not None:
            found[node.name] = call(node, "rope", rotation, len(found))
    whole = added.done(found)
    view = View(whole)
    partial: dict[str, Node] = {}
    for node in whole.nodes:
        widened = _partial_rotation(view, node)
        if widened is not None:
            partial[node.name] = call(node, "rope", widened, len(found) + len(partial))
    return fuse(whole, partial)


_Rotation = tuple[Argument, Argument, Argument, bool]


def _rotation(view: View, node: Node, added: _Additions) -> _Rotation | None:
    for x, cos, swapped, sin in _products(view, node):
        tables = _table(view, cos), _table(view, sin)
        if None in tables or len(view.shape(x)) != 4 or view.shape(tables[0])[-1] != view.shape(x)[-1]:
            continue
        style = _swap_of(view, swapped, x)
        if style == "flipped":
            return x, tables[0], _negated(view, tables[1], added), False
        if style:
            return x, tables[0], tables[1], style == "interleaved"
    return None


def _table(view: View, argument: Argument) -> Argument:
    """The [1, T, R] table under ``unsqueeze(table, 1)``, or None."""
    node = view.node(argument, "aten.unsqueeze.default")
    if node is None or argument_of(node, "dim") != 1 or len(view.shape(node.args[0])) != 3:
        return None
    return node.args[0]


def _negated(view: View, table: Argument, added: _Additions) -> Argument:
    """``neg(table)``, which every rotation by it shares."""
    assert isinstance(table, Ref)
    made = view.graph.producer.get(table.value)
    negated = Node(name=f"{table.value}.negated", op="aten.neg.default", kind="neg", args=(table,), outputs=(table.value,))
    if made is not None:
        negated = evolve(negated, module=made.module, layer=made.layer)
    return added.add(made.name if made is not None else "", negated)[0]


def _swap_of(view: View, argument: Argument, x: Argument) -> str:
    """In which style ``argument`` is ``x`` with the partners of all channels in their places; empty: in none.

    half: ``cat(neg(x[..., half:]), x[..., :half])``; flipped: ``cat(x[..., half:], neg(x[..., :half]))``; interleaved:
    ``flatten(stack(neg(x[..., 1::2]), x[..., 0::2]))``. Where x is cast, the cast may be behind the swap (Ernie 4.5).
    """
    node, width = view.node(argument), view.shape(x)[-1]
    cast = view.node(x, CAST)
    if (node is not None and cast is not None and node.op == CAST and node.args[1:] == cast.args[1:]
            and "float" in view.dtype(cast.args[0])):  # of unsigned integers nothing is negative
        return _swap_of(view, node.args[0], cast.args[0])
    half = width // 2
    pair = view.joined(node)
    if pair is not None:
        upper, lower = (x, half, width), (x, 0, half)
        if (_under_neg(view, pair[0], view.slice_of), view.slice_of(pair[1])) == (upper, lower):
            return "half"
        return "flipped" if (view.slice_of(pair[0]), _under_neg(view, pair[1], view.slice_of)) == (upper, lower) else ""
    pair = view.stacked(node)
    if pair is None or width % 2:
        return ""
    odd, even = _under_neg(view, pair[0], view.every_second), view.every_second(pair[1])
    return "interleaved" if (odd, even) == ((x, 1), (x, 0)) else ""


def _under_neg(view: View, argument: Argument, look: Callable[[Argument], object]) -> object:
    node = view.node(argument, "aten.neg.default")
    return look(node.args[0]) if node is not None else None


def _partial_rotation(view: View, node: Node) -> _Rotation | None:
    pair = view.joined(node)
    if pair is None:
        return None
    turned, rest = pair
    inner = view.node(turned, ROPE)
    if inner is None or not view.private([inner], node):
        return None
    first, second = view.slice_of(inner.args[0]), view.slice_of(rest)
    if first is None or second is None or first[0] != second[0]:
        return None
    width = view.shape(first[0])[-1]
    if first[1:] != (0, view.shape(inner.args[1])[-1]) or second[1:] != (first[2], width):
        return None
    return first[0], inner.args[1], inner.args[2], argument_of(inner, "interleaved") is True
