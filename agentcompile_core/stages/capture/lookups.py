"""Rows of tables by position."""

from attrs import evolve

from ...ir.graph import Argument, Graph, Node, Ref, Value, ValueKind
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical, with_argument
from .rewrite import View, rebuild

_COUNTED = ("session.position", "session.ids", "start", "prompt")
_REPEATED = ("aten.repeat.default", "aten.clone.default", "aten.clamp_max.default")
_TABLES = {"aten.embedding.default": ("weight", "indices"), "aten.index_select.default": ("self", "index")}


def look_up_positions(graph: Graph) -> Graph:
    """A row of a table by the position of the session is a lookup like that of a token.

    Before: ``index(table, [position])``, ``index_select(table, 0, position)`` or a ``gather`` of whole rows, of a
    two-dimensional weight. After: ``embedding(table, position)``. Other indices may
    be negative, which counts from the end in one and is refused in the other.
    """
    view = View(graph)
    nodes = [_as_lookup(view, node) or node for node in graph.nodes]
    return rebuild(graph, nodes)


def _as_lookup(view: View, node: Node) -> Node | None:
    found = _indexed(view, node) or _gathered(view, node)
    if found is None or not _counts(view, found[1]):
        return None
    return canonical(evolve(node, op="aten.embedding.default", kind="embedding", args=found, kwargs=()))


def _indexed(view: View, node: Node) -> tuple[Ref, Argument] | None:
    """Table and indices of ``table[indices]``."""
    if node.op == "aten.index_select.default":
        table, index = argument_of(node, "self"), argument_of(node, "index")
        return (table, index) if view.dim(node) == 0 and isinstance(table, Ref) and _is_table(view, table) else None
    if node.op != "aten.index.Tensor" or not isinstance(node.args[0], Ref) or not isinstance(node.args[1], tuple):
        return None
    table, indices = node.args[0], [one for one in node.args[1] if one is not None]
    if not _is_table(view, table) or len(indices) != 1 or node.args[1][0] is None:
        return None
    return table, indices[0]


def _gathered(view: View, node: Node) -> tuple[Ref, Argument] | None:
    """Table and indices of ``gather(repeat(table, (1, 1, 1)), 1, repeat(unsqueeze(indices, -1), (1, 1, C)))``: whole rows (GPT-J)."""
    if node.op != "aten.gather.default" or view.dim(node) != 1:
        return None
    widened, wide = view.node(node.args[0], "aten.repeat.default"), view.node(argument_of(node, "index"), "aten.repeat.default")
    column = view.node(wide.args[0], "aten.unsqueeze.default") if wide is not None else None
    if widened is None or wide is None or column is None or widened.args[1] != (1, 1, 1) or not isinstance(widened.args[0], Ref):
        return None
    table = widened.args[0]
    rows = _is_table(view, table) and wide.args[1] == (1, 1, view.shape(table)[-1]) and argument_of(column, "dim") in (2, -1)
    return (table, column.args[0]) if rows and len(view.shape(column.args[0])) == 2 else None


def _is_table(view: View, table: Ref) -> bool:
    return view.graph.kind_of(table.value) in (ValueKind.WEIGHT, ValueKind.CONSTANT) and len(view.shape(table)) == 2


def _counts(view: View, argument: Argument) -> bool:
    """Whether ``argument`` is a position or a token, or made of such by what keeps it at least 0."""
    if not isinstance(argument, Ref):
        return isinstance(argument, int) and argument >= 0
    node = view.node(argument)
    if node is None:
        return argument.value in _COUNTED
    if node.op == "aten.arange.default":
        return True
    if node.op == "aten.add.Tensor":
        return not node.kwargs and all(_counts(view, one) for one in node.args)
    return (node.kind == "view" or node.op in _REPEATED) and _counts(view, node.args[0])


def within_tables(graph: Graph, start: str = "start") -> Graph:
    """Positions that a model counts from ``start`` on stay within the tables that it looks them up in.

    The last rows of a chunk may be padding, whose positions may lie behind the last row of a table; what is read for them is
    not used. Before: ``embedding(table, arange(T) + start)``. After: the indices are at most the last row.
    """
    counted = {start}
    nodes: list[Node] = []
    values: list[Value] = []
    for node in graph.nodes:
        names = _TABLES.get(node.op)
        index = argument_of(node, names[1]) if names else None
        if names and isinstance(index, Ref) and index.value in counted:
            table = argument_of(node, names[0])
            assert isinstance(table, Ref)
            made = f"{node.name}.within"
            nodes.append(canonical(Node(name=made, op="aten.clamp_max.default", kind="clamp_max", outputs=(made,), module=node.module,
                                        layer=node.layer, args=(index, graph.spec(table.value).shape[0] - 1))))
            values.append(Value(name=made, spec=graph.spec(index.value)))
            node = with_argument(node, names[1], Ref(made))
        elif counted.intersection(node.inputs):
            counted.update(out for out in node.outputs if not graph.spec(out).dtype.is_float)
        nodes.append(node)
    return rebuild(evolve(graph, values=(*graph.values, *values)), nodes)
