"""Graph -> Graph passes of capture: what every HuggingFace model writes out in full becomes one node per concept.

Every pass keeps the results bitwise, since the operators of namespace agentcompile round where the originals do, but for
``collapse_products`` and ``turn_streams``, which add the same products in another order, ``collapse_linear``, whose products with a
parameter's columns may, ``turn_products``, whose products may, ``scale_behind``, which rounds results and not operands,
``share_lines``, whose sums a GPU may add otherwise where there are fewer of them, and ``collapse_activations``, which round once.
"""

from collections.abc import Callable

from attrs import evolve

from ...ir.graph import DType, Graph, Node, Ref, Symbol
from ...ops.aliasing import memory_roots, only_part
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical, with_argument
from .chosen_parts import choose_parts
from .collapse_activations import collapse_activations
from .collapse_linear import collapse_linear, linear_in_place
from .collapse_norms import collapse_norms
from .collapse_pairs import rotate_pairs
from .collapse_products import collapse_products
from .collapse_rope import collapse_rope, interleave_tables, rotate_by_heads
from .filled import join_parts
from .full_masks import drop_full_masks
from .functional import without_writes
from .invariants import hoist_invariants
from .lookups import look_up_positions
from .packing import pack_operands, repeat_no_masks
from .rewrite import eliminate_dead_code, lasting, rebuild, resolve_chain
from .scaled_behind import scale_behind
from .shared_lines import share_lines
from .turned_products import turn_products
from .turned_streams import turn_streams
from .write_out import drop_expansions, write_out
from .written_parts import join_written


def normalize(graph: Graph) -> Graph:
    """Apply every pass in order and verify the result."""
    for one in PASSES:
        graph = one(graph)
    return graph.verify()


def drop_noise(graph: Graph) -> Graph:
    """Remove calls that return their operand unchanged.

    Before: ``a = to(x, float32)`` of a float32 x; ``b = dropout(a, 0.1, False)``; ``c = slice(b, 1, 0, FULL)``;
    ``d = cat([c, e])`` with an empty e; ``f = mul(d, 1.0)``; ``g = pad(f, [0, 0])``.
    After: x.
    """
    renamed: dict[str, str] = {}
    copies: dict[str, str] = {}
    for node in graph.nodes:
        if _is_identity(graph, node):
            (copies if _makes_a_copy(node) else renamed)[node.outputs[0]] = node.inputs[0]
        elif (only := only_part(graph, node)) and graph.spec(only) == graph.spec(node.outputs[0]):
            copies[node.outputs[0]] = only
    renamed |= lasting(graph, copies)
    return rebuild(graph, [node for node in graph.nodes if not renamed.keys() & set(node.outputs)], resolve_chain(renamed))


def plain_casts(graph: Graph) -> Graph:
    """Casts read what they cast, and nothing for the sake of its type; those to a wider type and back read nothing.

    Before: ``a = type_as(x, y)``; ``b = to(to(w, float32), float16)`` of a float16 w. After: ``a = to(x, float16)``, where y is; b is w.
    """
    def plain(node: Node) -> Node:
        if node.op != "aten.type_as.default":
            return node
        dtype = Symbol("dtype", graph.spec(node.outputs[0]).dtype.value)
        return canonical(evolve(node, op="aten.to.dtype", kind="cast", args=(node.args[0], dtype), kwargs=()))

    nodes, roots = [plain(node) for node in graph.nodes], memory_roots(graph)
    written = {roots[name] for node in nodes for name in node.mutates}  # what is read of it as it was is no name of it
    back = {node.outputs[0]: before for node in nodes if (before := _before_widening(graph, node)) and roots[before] not in written}
    return rebuild(graph, [node for node in nodes if not back.keys() & set(node.outputs)], resolve_chain(back))


def _before_widening(graph: Graph, node: Node) -> str:
    """What a cast gives back as it was before another cast made it wider; empty: it is no such cast."""
    wide = graph.producer.get(node.inputs[0]) if node.kind == "cast" and len(node.inputs) == 1 else None
    if wide is None or wide.kind != "cast" or len(wide.inputs) != 1:
        return ""
    first, between, last = (graph.spec(value) for value in (wide.inputs[0], node.inputs[0], node.outputs[0]))
    exact = first.dtype in _HELD_BY and between.dtype in _HELD_BY[first.dtype]
    return wide.inputs[0] if exact and first == last else ""


def sort_choices(graph: Graph) -> Graph:
    """The largest elements come largest first, which is one of the orders that a choice without an order allows.

    Before: ``topk(x, 6, -1, True, False)``. After: ``topk(x, 6, -1, True, True)``.
    """
    def ordered(node: Node) -> Node:
        return with_argument(node, "sorted", True) if node.op == "aten.topk.default" else node

    return rebuild(graph, [ordered(node) for node in graph.nodes])


# Operators that may return their operand as it is; whether one does is read from shapes, strides and types.
_SHAPED = frozenset({
    "aten.view.default", "aten.reshape.default", "aten.expand.default", "aten.contiguous.default", "aten.slice.Tensor",
    "aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten.to.other", "aten._to_copy.default", "aten.type_as.default",
    "aten.alias.default", "aten.detach.default", "aten.lift_fresh.default", "aten.lift_fresh_copy.default", "aten.clone.default",
    "aten.flatten.using_ints", "aten.squeeze.default", "aten.squeeze.dim", "aten.view_as.default",
})
_HELD_BY = {DType.F16: (DType.F32, DType.F64), DType.BF16: (DType.F32, DType.F64), DType.F32: (DType.F64,)}  # types that hold all of a type
_COPIES = frozenset({"aten.clone.default", "aten._to_copy.default", "aten.lift_fresh_copy.default"})
_PADDING = ("aten.pad.default", "aten.constant_pad_nd.default")
_SCALINGS = ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar")
_BY_ONE = ((1,), (1.0,))
_DROPOUT = frozenset({"aten.dropout.default", "aten.feature_dropout.default", "aten.native_dropout.default"})


def _is_identity(graph: Graph, node: Node) -> bool:
    """Whether the result of ``node`` is what its operand is when it runs."""
    if len(node.outputs) != 1 or not node.args or not isinstance(node.args[0], Ref):
        return False
    if node.op in _DROPOUT:
        return argument_of(node, "train") is False
    if graph.spec(node.outputs[0]) != graph.spec(node.args[0].value):
        return False
    if node.op in _SCALINGS:
        return node.args[1:] in _BY_ONE and not node.kwargs
    if node.op in _PADDING:
        pads = argument_of(node, "pad")
        return isinstance(pads, tuple) and not any(pads)
    return node.op in _SHAPED


def _makes_a_copy(node: Node) -> bool:
    """Whether an operator that returns its operand unchanged returns it in memory of its own."""
    return node.op in _COPIES or node.op in _SCALINGS or node.op in _PADDING


PASSES: tuple[Callable[[Graph], Graph], ...] = (
    without_writes, join_written, turn_streams, join_parts, drop_noise, plain_casts, sort_choices, drop_full_masks, look_up_positions,
    collapse_linear, turn_products, linear_in_place, collapse_activations, collapse_norms, scale_behind, rotate_pairs, interleave_tables,
    rotate_by_heads, collapse_rope, collapse_products, repeat_no_masks, drop_expansions, write_out, pack_operands, share_lines,
    hoist_invariants, choose_parts, eliminate_dead_code,
)
