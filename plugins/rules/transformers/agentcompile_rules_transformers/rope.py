"""Rotary embeddings: the table of one position, and the rotation of one token's heads."""

from collections.abc import Iterable

from attrs import frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    ROPE,
    ROPE_TABLE,
    DType,
    Graph,
    Match,
    Node,
    Ref,
    RegionRule,
    RegionView,
    Role,
    SemanticLabel,
    Target,
    argument,
    is_contiguous,
    operator_names,
    ref,
)

from . import kinds


@frozen(kw_only=True)
class RopeNode:
    """``agentcompile.rope`` of one token: x [1, heads, 1, head_dim], cos and sin [1, 1, rotary_dim]; ``style`` half or interleaved."""

    node: Node
    x: str
    cos: str
    sin: str
    heads: int
    head_dim: int
    rotary_dim: int
    style: str


def rope_of(view: RegionView, node: Node, table: DType | None = None) -> RopeNode | None:
    """The rotation of a node, if it is of one token and its operands are contiguous and of one type; ``table``: that of cos and sin."""
    if node.op != operator_names.ROPE:
        return None
    x, cos, sin = (ref(argument(node, name)) for name in ("x", "cos", "sin"))
    if x is None or cos is None or sin is None:
        return None
    specs = [view.graph.spec(value) for value in (x, cos, sin)]
    shape = specs[0].shape
    rotary_dim = specs[1].shape[-1]
    if len(shape) != 4 or shape[0] != 1 or shape[2] != 1 or any(spec.numel != rotary_dim for spec in specs[1:]):
        return None
    if any(spec.dtype is not (table or specs[0].dtype) for spec in specs[1:]) or specs[0].dtype not in KERNEL_TYPES:
        return None
    if not all(is_contiguous(spec) for spec in specs):
        return None
    return RopeNode(node=node, x=x, cos=cos, sin=sin, heads=shape[1], head_dim=shape[3], rotary_dim=rotary_dim,
                    style=_style(node))


def _style(node: Node) -> str:
    return "interleaved" if argument(node, "interleaved") else "half"


class RopeRule(RegionRule):
    """``rope`` matches: rotations that stand alone (where attention does not take them in)."""

    name = "rope"
    version = 3
    kinds = (kinds.ROPE,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Every rotation of one token."""
        view = RegionView(graph=graph)
        return [_rope(view, rope) for rope in (rope_of(view, node) for node in graph.nodes) if rope is not None]


def _rope(view: RegionView, rope: RopeNode) -> Match:
    return Match(
        kind=ROPE, label=SemanticLabel.ROPE, nodes=(rope.node.name,),
        operands=(view.read("x", rope.x), view.read("cos", rope.cos), view.read("sin", rope.sin),
                  view.write("out", rope.node.outputs[0])),
        attributes=(("heads", rope.heads), ("head_dim", rope.head_dim), ("rotary_dim", rope.rotary_dim), ("style", rope.style),
                    ("x_step", rope.head_dim), ("rest_first", rope.rotary_dim), ("rest_step", rope.head_dim)),
    )


class RopeTableRule(RegionRule):
    """``rope_table`` matches: cos and sin of the position of one token."""

    name = "rope_table"
    version = 2
    kinds = (kinds.ROPE_TABLE,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Every rotary_embedding of one position, with the view that shapes the position where nothing else reads it."""
        view = RegionView(graph=graph)
        found = []
        for node in graph.nodes:
            if node.op == operator_names.ROTARY:
                match = _table(view, node)
                found += [match] if match is not None else []
        return found


def _table(view: RegionView, node: Node) -> Match | None:
    given, frequencies = ref(argument(node, "position_ids")), ref(argument(node, "inv_freq"))
    scaling = argument(node, "attention_scaling")
    if given is None or frequencies is None or not view.is_weight(Ref(frequencies)) or not isinstance(scaling, int | float):
        return None
    position, views = view.back(given, {node.name})
    spec, inv_freq = view.graph.spec(position), view.graph.spec(frequencies)
    if spec.numel != 1 or spec.dtype is not DType.I64 or inv_freq.dtype is not DType.F32 or len(inv_freq.shape) != 1:
        return None
    cos, sin = node.outputs
    if view.graph.spec(cos).dtype not in KERNEL_TYPES:
        return None
    return Match(
        kind=ROPE_TABLE, label=SemanticLabel.ROPE_TABLE, nodes=view.deps.members(view.deps.mask((*views, node.name))),
        operands=(view.read("position", position, role=Role.LENGTH), view.read("inv_freq", frequencies),
                  view.write("cos", cos), view.write("sin", sin)),
        attributes=(("half", inv_freq.shape[0]), ("attention_scaling", float(scaling)), ("style", _style(node))),
    )
