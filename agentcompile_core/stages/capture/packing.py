"""Operands that lie apart are packed where a kernel wants them in one piece: the parts of interleaved Q, K and V."""

from attrs import evolve

from ...ir.graph import Graph, Node, Ref, TensorSpec, Value
from ...ops.operator_names import ATEN_LAYER_NORM, ATTENTION, LAYER_NORM, RMS_NORM, ROPE, SPLITS
from ...ops.region_view import is_contiguous
from ...ops.schema import argument as argument_of
from ...ops.schema import with_argument
from .rewrite import View, beside, eliminate_dead_code, rebuild

_WANTED = {
    ATTENTION: ("q", "k", "v"), ROPE: ("x",), RMS_NORM: ("x",),
    LAYER_NORM: ("x",), ATEN_LAYER_NORM: ("input",),
}
SDPA = "aten.scaled_dot_product_attention.default"
_MOVING = ("aten.slice.Tensor", "aten.select.int", "aten.transpose.int", "aten.permute.default", "aten.reshape.default",
           "aten.view.default", *SPLITS)  # what a reshape makes of a part is one where it lies apart, else a copy


def pack_operands(graph: Graph) -> Graph:
    """For one token, copy the strided operands of norms, rotations and attention into one piece.

    Before: ``rope(chunk(transpose(view(x, [1, 1, H, 3 D]), 1, 2), 3, -1)[0], ...)``, each head's part 3 D apart.
    After: ``rope(clone(slice(transpose(...), -1, 0, D)), ...)``: views of its own and one copy, which a kernel can be.
    """
    if graph.tokens != 1:
        return graph
    view = View(graph)
    values: dict[str, Value] = {}
    packed: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        for name in _WANTED.get(node.op, ()):
            operand = argument_of(node, name)
            if not isinstance(operand, Ref) or is_contiguous(graph.spec(operand.value)):
                continue
            if operand.value not in packed:
                made = _packed(view, operand.value, values)
                if not made:
                    continue
                nodes += made
                packed[operand.value] = made[-1].outputs[0]
            node = with_argument(node, name, Ref(packed[operand.value]))
        nodes.append(node)
    return eliminate_dead_code(rebuild(evolve(graph, values=(*graph.values, *values.values())), nodes)) if packed else graph


def repeat_no_masks(graph: Graph) -> Graph:
    """Masks of attention as they are made, where they were only repeated along axes for it: attention repeats them itself.

    Before: ``scaled_dot_product_attention(q, k, v, expand(mask, [B, 1, T, S]))`` of a mask [B, 1, 1, S]. After: of the mask.
    """
    nodes = []
    for node in graph.nodes:
        mask = argument_of(node, "attn_mask") if node.op == SDPA else None
        made = graph.producer.get(mask.value) if isinstance(mask, Ref) else None
        if made is not None and made.op == "aten.expand.default" and _is_as_long(graph, made):
            node = with_argument(node, "attn_mask", made.args[0])
        nodes.append(node)
    return eliminate_dead_code(rebuild(graph, nodes)) if nodes != list(graph.nodes) else graph


def _is_as_long(graph: Graph, expand: Node) -> bool:
    """Whether it has as many axes before as after, at least the two that every mask has."""
    before, after = (graph.spec(name).shape for name in (expand.inputs[0], expand.outputs[0]))
    return len(before) == len(after) >= 2


def _packed(view: View, value: str, values: dict[str, Value]) -> list[Node]:
    """Views of its own from the contiguous value that ``value`` is a part of, and the copy behind them; none where it is not."""
    chain: list[tuple[Node, str]] = []
    source = value
    while not is_contiguous(view.graph.spec(source)):
        node = view.graph.producer.get(source)
        if node is None or node.op not in _MOVING or not isinstance(node.args[0], Ref):
            return []
        chain.append((node, source))
        source = node.args[0].value
    made: list[Node] = []
    for i, (node, out) in enumerate(reversed(chain)):
        name, spec = f"{value}.part{i}", view.graph.spec(out)
        cut = view.slice_of(Ref(out)) if node.op in SPLITS else None
        if node.op in SPLITS:
            if cut is None:
                return []
            made.append(beside(node, name, "aten.slice.Tensor", "view", (Ref(source), len(spec.shape) - 1, cut[1], cut[2])))
        else:
            made.append(beside(node, name, node.op, "view", (Ref(source), *node.args[1:])))
        values[name] = Value(name=name, spec=spec)
        source = name
    spec = view.graph.spec(value)
    name = f"{value}.packed"
    values[name] = Value(name=name, spec=TensorSpec(shape=spec.shape, dtype=spec.dtype))
    return [*made, beside(chain[0][0], name, "aten.contiguous.default", "copy", (Ref(source),))]
