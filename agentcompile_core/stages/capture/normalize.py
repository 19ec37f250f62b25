"""Graph -> Graph passes of capture: what every HuggingFace model writes out in full becomes one node per concept.

Every pass keeps the results bitwise: the operators of namespace agentcompile round where the originals do.
"""

from collections.abc import Callable

from ...ir.graph import Graph, Node, Ref
from ...ops.schema import argument as argument_of
from .collapse_linear import collapse_linear
from .collapse_norms import collapse_norms
from .collapse_rope import collapse_rope, interleave_tables, rotate_by_heads
from .filled import join_parts
from .functional import without_writes
from .lookups import look_up_positions
from .packing import pack_operands, repeat_no_masks
from .rewrite import eliminate_dead_code, rebuild, resolve_chain


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


PASSES: tuple[Callable[[Graph], Graph], ...] = (
    without_writes, join_parts, drop_noise, look_up_positions, collapse_linear, collapse_norms, interleave_tables, rotate_by_heads,
    collapse_rope, repeat_no_masks, pack_operands, eliminate_dead_code,
)
