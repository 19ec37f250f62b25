"""Attention of all rows of a module at once, with or without a mask: ``scaled_dot_product_attention`` and the views around it."""

from collections.abc import Iterable

from attrs import frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    MASKED_ATTENTION,
    DType,
    Graph,
    Match,
    Node,
    RegionRule,
    RegionView,
    Scalar,
    SemanticLabel,
    Target,
    argument,
    is_contiguous,
    ref,
)

from . import masked_attention_kind
from .parts import offset_of, strides_of

OPERATOR = "aten.scaled_dot_product_attention.default"
AXES = ("batch", "head", "row", "column")
TURNED = ("aten.transpose.int", "aten.permute.default")
MASKS = {DType.BOOL: "seen", **dict.fromkeys(KERNEL_TYPES, "added")}


@frozen(kw_only=True)
class Source:
    """An operand as a kernel reads it: the value in one piece that it is a view of, where it begins there, its steps, the views."""

    value: str
    offset: int
    steps: tuple[int, ...]
    nodes: tuple[str, ...]


class MaskedAttentionRule(RegionRule):
    """``masked_attention`` matches: every attention of four axes, with the views that it alone reads its operands through."""

    name = "masked_attention"
    version = 1
    kinds = (masked_attention_kind.MASKED_ATTENTION,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """One match for each."""
        view = RegionView(graph=graph)
        found = (_match(view, node) for node in graph.nodes if node.op == OPERATOR)
        return [match for match in found if match is not None]


def _match(view: RegionView, node: Node) -> Match | None:
    given = {name: ref(argument(node, name)) for name in ("query", "key", "value", "attn_mask")}
    names = [given[name] for name in ("query", "key", "value")]
    if None in names or not _shapes_fit(view, node, [name for name in names if name is not None], given["attn_mask"]):
        return None
    sources = {name: _source(view, value) for name, value in zip("qkv", names, strict=True) if value is not None}
    if given["attn_mask"] is not None:
        sources["mask"] = _source(view, given["attn_mask"])
    found = {name: source for name, source in sources.items() if source is not None}
    out = _result(view, node)
    if len(found) != len(sources) or out is None or any(found[name].steps[-1] > 1 for name in "qkv"):
        return None
    nodes = {name for source in found.values() for name in source.nodes} | {node.name, *out[1]}
    made = [value for name in nodes for value in view.graph.node_by_name[name].outputs if value != out[0]]
    if not all(view.only_used_by(value, nodes) for value in made):
        return None
    reads = tuple(view.read(name, source.value) for name, source in found.items())
    return Match(kind=MASKED_ATTENTION, label=SemanticLabel.ATTENTION, nodes=view.deps.members(view.deps.mask(nodes)),
                 operands=(*reads, view.write("out", out[0])), attributes=_attributes(view, node, found))


def _shapes_fit(view: RegionView, node: Node, names: list[str], mask: str | None) -> bool:
    """Floats of one kernel type with four axes, heads of K and V that divide those of Q, a mask that can be repeated to the scores."""
    q, k, v = (view.graph.spec(name) for name in names)
    if len({spec.dtype for spec in (q, k, v)}) != 1 or q.dtype not in KERNEL_TYPES or not all(len(s.shape) == 4 for s in (q, k, v)):
        return False
    if not all(spec.numel for spec in (q, k, v)) or argument(node, "dropout_p") != 0.0:
        return False
    same = q.shape[0] == k.shape[0] == v.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]
    grouped = q.shape[1] == k.shape[1] or (argument(node, "enable_gqa") is True and q.shape[1] % k.shape[1] == 0)
    if not same or not grouped or mask is None:
        return bool(same and grouped)
    spec, scores = view.graph.spec(mask), (*q.shape[:3], k.shape[2])
    if spec.dtype not in MASKS or len(spec.shape) > 4 or argument(node, "is_causal"):
        return False
    return all(extent in (1, whole) for extent, whole in zip(reversed(spec.shape), reversed(scores), strict=False))


def _source(view: RegionView, value: str) -> Source | None:
    """Back through transpositions, slices, repetitions and cuts to a value that lies in one piece; steps of four axes, 0: repeated."""
    spec = view.graph.spec(value)
    steps = (*(0,) * (4 - len(spec.shape)), *(0 if extent == 1 else step
                                              for extent, step in zip(spec.shape, strides_of(spec), strict=True)))
    offset, nodes = 0, []
    while not is_contiguous(view.graph.spec(value)):
        node = view.producer(value)
        begin = _begin(view, node, value) if node is not None else None
        if node is None or begin is None:
            return None
        offset += begin
        nodes.append(node.name)
        value = node.inputs[0]
    return Source(value=value, offset=offset, steps=steps, nodes=tuple(nodes))


def _begin(view: RegionView, node: Node, value: str) -> int | None:
    """By how many elements one of the results of a view begins behind its operand."""
    axis = argument(node, "dim") if node.op == "aten.unbind.int" else None
    if isinstance(axis, int):
        return node.outputs.index(value) * strides_of(view.graph.spec(node.inputs[0]))[axis]
    return offset_of(view, node, value)


def _result(view: RegionView, node: Node) -> tuple[str, tuple[str, ...]] | None:
    """The value in one piece that is written, and the nodes that only turn the result to it."""
    out = node.outputs[0]
    if is_contiguous(view.graph.spec(out)):
        return out, ()
    users = view.users(out)
    if len(users) != 1 or view.leaves(out) or users[0].op not in TURNED or not is_contiguous(view.graph.spec(users[0].outputs[0])):
        return None
    return users[0].outputs[0], (users[0].name,)


def _attributes(view: RegionView, node: Node, found: dict[str, Source]) -> tuple[tuple[str, Scalar], ...]:
    names = [ref(argument(node, name)) or "" for name in ("query", "key", "value", "attn_mask")]
    q, k, v = (view.graph.spec(name).shape for name in names[:3])
    given = argument(node, "scale")
    sizes: list[tuple[str, Scalar]] = [
        ("batch", q[0]), ("heads", q[1]), ("kv_heads", k[1]), ("rows", q[2]), ("keys", k[2]), ("head_dim", q[3]), ("value_dim", v[3]),
        ("scale", float(given) if isinstance(given, int | float) else q[3] ** -0.5), ("causal", argument(node, "is_causal") is True),
        ("mask", MASKS[view.graph.spec(names[3]).dtype] if names[3] else "none"),
    ]
    for name, source in found.items():
        sizes += [(f"{name}_offset", source.offset), *((f"{name}_{axis}", step) for axis, step in zip(AXES, source.steps, strict=True))]
    steps = strides_of(view.graph.spec(node.outputs[0]))
    return (*sizes, *((f"out_{axis}", step) for axis, step in zip(AXES[:3], steps, strict=False)))
