"""Graph -> Graph passes of capture: what every HuggingFace model writes out in full becomes one node per concept.

Every pass keeps the results bitwise: the operators of namespace agentcompile round where the originals do.
"""

from collections.abc import Callable

from attrs import evolve

from ...ir.graph import Argument, Graph, Node, Ref, ValueKind
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical
from .collapse_norms import collapse_norms
from .collapse_rope import collapse_rope, interleave_tables
from .functional import without_writes
from .rewrite import View, eliminate_dead_code, rebuild, resolve_chain


def normalize(graph: Graph) -> Graph:
    """Apply every pass in order and verify the result."""
    for one in PASSES:
        graph = one(graph)
    return graph.verify()


def drop_noise(graph: Graph) -> Graph:
    """Remove calls that return their operand unchanged.

    Before: ``a = to(x, float32)`` of a float32 x; ``b = dropout(a, 0.1, False)``; ``c = slice(b, 1, 0, FULL)``;
    ``d = cat([c, e])`` with an empty e.
    After: x.
    """
    in_place = any(name not in _states(graph) for node in graph.nodes for name in node.mutates)
    renamed: dict[str, str] = {}
    kept = []
    for node in graph.nodes:
        if _is_identity(graph, node, in_place):
            renamed[node.outputs[0]] = node.inputs[0]
        elif not in_place and (only := _only_part(graph, node)):
            renamed[node.outputs[0]] = only
        else:
            kept.append(node)
    return rebuild(graph, kept, resolve_chain(renamed))


def _states(graph: Graph) -> set[str]:
    return {value.name for value in graph.values if value.name not in graph.producer}


# Operators that may return their operand as it is; whether one does is read from shapes, strides and types.
_SHAPED = frozenset({
    "aten.view.default", "aten.reshape.default", "aten.expand.default", "aten.contiguous.default", "aten.slice.Tensor",
    "aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten.to.other", "aten._to_copy.default", "aten.type_as.default",
    "aten.alias.default", "aten.detach.default", "aten.lift_fresh.default", "aten.lift_fresh_copy.default", "aten.clone.default",
    "aten.flatten.using_ints", "aten.squeeze.default", "aten.squeeze.dim", "aten.view_as.default",
})
_COPIES = frozenset({"aten.clone.default", "aten._to_copy.default", "aten.lift_fresh_copy.default"})
_DROPOUT = frozenset({"aten.dropout.default", "aten.feature_dropout.default", "aten.native_dropout.default"})


def _only_part(graph: Graph, node: Node) -> str:
    """The one operand of a concatenation that is not empty, where there is just one."""
    if node.op != "aten.cat.default" or not isinstance(node.args[0], tuple):
        return ""
    parts = [part.value for part in node.args[0] if isinstance(part, Ref) and graph.spec(part.value).numel]
    same = len(parts) == 1 and graph.spec(parts[0]) == graph.spec(node.outputs[0])
    return parts[0] if same else ""


def _is_identity(graph: Graph, node: Node, in_place: bool) -> bool:
    if len(node.outputs) != 1 or not node.args or not isinstance(node.args[0], Ref):
        return False
    if node.op in _DROPOUT:
        return argument_of(node, "train") is False
    if node.op not in _SHAPED or graph.spec(node.outputs[0]) != graph.spec(node.args[0].value):
        return False
    # A copy of something that is written in place later is no identity.
    return not (node.op in _COPIES and in_place)


def look_up_positions(graph: Graph) -> Graph:
    """A row of a table by the position of the session is a lookup like that of a token.

    Before: ``index(table, [position])`` of a two-dimensional weight. After: ``embedding(table, position)``. Other indices may
    be negative, which counts from the end in one and is refused in the other.
    """
    view = View(graph)
    nodes = [_as_lookup(view, node) or node for node in graph.nodes]
    return rebuild(graph, nodes)


def _as_lookup(view: View, node: Node) -> Node | None:
    if node.op != "aten.index.Tensor" or not isinstance(node.args[0], Ref) or not isinstance(node.args[1], tuple):
        return None
    table, indices = node.args[0], [one for one in node.args[1] if one is not None]
    owned = view.graph.kind_of(table.value) in (ValueKind.WEIGHT, ValueKind.CONSTANT)
    if not owned or len(view.shape(table)) != 2 or len(indices) != 1 or node.args[1][0] is None:
        return None
    source: Argument = indices[0]
    while (made := view.node(source)) is not None and made.kind == "view":
        source = made.args[0]
    if not isinstance(source, Ref) or source.value not in ("session.position", "session.ids"):
        return None
    return canonical(evolve(node, op="aten.embedding.default", kind="embedding", args=(table, indices[0]), kwargs=()))


PASSES: tuple[Callable[[Graph], Graph], ...] = (
    without_writes, drop_noise, look_up_positions, collapse_norms, interleave_tables, collapse_rope, eliminate_dead_code,
)
