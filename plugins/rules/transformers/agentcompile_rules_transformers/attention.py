"""Decode attention with KV append: bare, with RoPE, with q/k norms and RoPE. Views up to the projections are taken in."""

from collections.abc import Iterable, Iterator

from attrs import evolve, frozen

from agentcompile_core.plugin_api import (
    ATTENTION,
    KERNEL_TYPES,
    DType,
    Graph,
    Match,
    Node,
    Operand,
    RegionRule,
    RegionView,
    Role,
    Scalar,
    SemanticLabel,
    Target,
    argument,
    is_contiguous,
    operator_names,
    ref,
)

from . import kinds
from .norm import NormNode, norm_of
from .rope import RopeNode, rope_of
from .router import CASTS

MOST_POSITIONS = 512  # KV positions that state_bytes counts at the most


@frozen(kw_only=True)
class Attention:
    """``agentcompile.attention`` of one token, by value names and numbers."""

    node: Node
    q: str
    k: str
    v: str
    k_cache: str
    v_cache: str
    position: str
    sinks: str
    scale: float
    window: int
    chunk: int
    softcap: float
    slopes: tuple[float, ...]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    capacity: int
    element_bytes: int


@frozen(kw_only=True)
class Source:
    """Where one of q, k, v comes from: ``value`` is contiguous [heads * head_dim]; the nodes on the way are taken in."""

    value: str
    nodes: tuple[str, ...] = ()
    rope: RopeNode | None = None
    norm: NormNode | None = None


class AttentionRule(RegionRule):
    """``attention`` matches, each with the views behind it."""

    name = "attention"
    version = 5
    kinds = (kinds.ATTENTION,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Bare first, then with RoPE, then with q/k norms and RoPE."""
        view = RegionView(graph=graph)
        found: list[Match] = []
        for node in graph.nodes:
            attention = attention_of(view, node)
            if attention is not None:
                found += _variants(view, attention)
        return found


def attention_of(view: RegionView, node: Node) -> Attention | None:
    """The attention of a node, if it decodes one token and its operands are contiguous."""
    if node.op != operator_names.ATTENTION:
        return None
    names = [ref(argument(node, name)) for name in ("q", "k", "v", "k_cache", "v_cache", "position")]
    if None in names or argument(node, "fresh"):
        return None
    q, k, v, k_cache, v_cache, position = (str(name) for name in names)
    specs = [view.graph.spec(name) for name in (q, k, v, k_cache, v_cache)]
    if any(len(spec.shape) != 4 or spec.shape[0] != 1 or not is_contiguous(spec) for spec in specs):
        return None
    queries, keys, values, k_kept, v_kept = specs
    head_dim = queries.shape[3]
    same = all(spec.dtype is queries.dtype for spec in specs) and queries.dtype in KERNEL_TYPES
    if not same or queries.shape[2] != 1 or keys.shape[:3] != values.shape[:3] or keys.shape[2] != 1 or keys.shape[3] != head_dim:
        return None
    rows = (k_kept.shape[2:], v_kept.shape[2:]) == ((keys.shape[1], head_dim), (keys.shape[1], values.shape[3]))
    if not rows or k_kept.shape[1] != v_kept.shape[1] or queries.shape[1] % keys.shape[1]:
        return None
    at = view.graph.spec(position)
    sinks = argument(node, "sinks")
    if at.dtype is not DType.I64 or at.numel != 1 or (sinks is not None and not view.is_weight(sinks, queries.shape[1])):
        return None
    scale, softcap, window, chunk = (argument(node, name) for name in ("scale", "softcap", "window", "chunk"))
    slopes = argument(node, "slopes") or ()
    if not isinstance(scale, int | float) or not isinstance(softcap, int | float):
        return None
    if not isinstance(window, int) or not isinstance(chunk, int):
        return None
    if not isinstance(slopes, tuple) or len(slopes) not in (0, queries.shape[1]) or not all(isinstance(one, float) for one in slopes):
        return None
    return Attention(
        node=node, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, position=position, sinks=ref(sinks) or "",
        scale=float(scale), window=window, chunk=chunk, softcap=float(softcap),
        slopes=tuple(float(one) for one in slopes if isinstance(one, float)), heads=queries.shape[1], kv_heads=keys.shape[1],
        head_dim=head_dim, value_dim=values.shape[3], capacity=k_kept.shape[1], element_bytes=queries.dtype.bytes,
    )


def _variants(view: RegionView, attention: Attention) -> Iterator[Match]:
    inside = {attention.node.name}
    bare = [_views(view, value, inside) for value in (attention.q, attention.k, attention.v)]
    sources = [bare]
    roped = [_roped(view, value, inside) or _roped_wide(view, value, inside) for value in (attention.q, attention.k)]
    if _agree(roped):
        sources.append([_unwrapped(view, source, inside) for source in roped if source] + bare[2:])
        normed = [_normed(view, source, inside, attention.head_dim) for source in roped if source]
        if all(source is not None for source in normed) and _same_norm([s.norm for s in normed if s]):
            sources.append([source for source in normed if source] + bare[2:])
    out, behind = view.forward(attention.node.outputs[0])
    for some in sources:
        yield _match(view, attention, some, out, behind)


def _views(view: RegionView, value: str, inside: set[str]) -> Source:
    source, views = view.back(value, inside)
    return Source(value=source, nodes=views)


def _roped(view: RegionView, value: str, inside: set[str]) -> Source | None:
    """The rotation right before ``value``; its operand is not followed further yet."""
    value, views = view.back(value, inside)
    node = view.producer(value)
    rope = rope_of(view, node) if node is not None else None
    if rope is None or not view.only_used_by(value, inside | set(views)):
        return None
    return Source(value=rope.x, nodes=(*views, rope.node.name), rope=rope)


def _roped_wide(view: RegionView, value: str, inside: set[str]) -> Source | None:
    """The same where heads are cast to float32 for it, and back: the kernel rotates in float32, and rounds once, in any case."""
    value, views = view.back(value, inside)
    narrow = view.graph.spec(value).dtype
    back, taken = view.producer(value), {*inside, *views}
    if back is None or back.op not in CASTS or narrow is DType.F32 or not view.only_used_by(value, taken):
        return None
    turned, more = view.back(back.inputs[0], {*taken, back.name})
    taken |= {back.name, *more}
    node = view.producer(turned)
    rope = rope_of(view, node, narrow) if node is not None else None
    if rope is None or view.graph.spec(rope.x).dtype is not DType.F32 or not view.only_used_by(turned, taken):
        return None
    wide, between = view.back(rope.x, {rope.node.name})
    cast = view.producer(wide)
    if cast is None or cast.op not in CASTS:
        return None
    given = view.graph.spec(cast.inputs[0])
    if given.dtype is not narrow or not is_contiguous(given):
        return None
    widening = (cast.name,) if view.only_used_by(wide, {rope.node.name, *between}) else ()
    return Source(value=cast.inputs[0], nodes=(*views, back.name, *more, rope.node.name, *between, *widening), rope=rope)


def _unwrapped(view: RegionView, source: Source, inside: set[str]) -> Source:
    value, views = view.back(source.value, inside | set(source.nodes))
    return evolve(source, value=value, nodes=(*source.nodes, *views))


def _normed(view: RegionView, roped: Source, inside: set[str], head_dim: int) -> Source | None:
    source = _unwrapped(view, roped, inside)
    node = view.producer(source.value)
    norm = norm_of(view, node) if node is not None else None
    if norm is None or norm.columns != head_dim or norm.kind == "layer" or not norm.weight:
        return None
    if view.graph.spec(norm.weight).dtype is not view.graph.spec(norm.x).dtype:
        return None
    if not view.only_used_by(source.value, inside | set(source.nodes)):
        return None
    taken = (*source.nodes, norm.node.name)
    value, views = view.back(norm.x, inside | set(taken))
    return evolve(source, value=value, nodes=(*taken, *views), norm=norm)


def _agree(roped: list[Source | None]) -> bool:
    """Whether q and k are both rotated by one table, and alike."""
    ropes = [source.rope for source in roped if source is not None and source.rope is not None]
    return len(ropes) == 2 and len({(rope.cos, rope.sin, rope.style) for rope in ropes}) == 1


def _same_norm(norms: list[NormNode | None]) -> bool:
    return len({(norm.kind, norm.eps) for norm in norms if norm is not None}) == 1


def _match(view: RegionView, attention: Attention, sources: list[Source], out: str, behind: tuple[str, ...]) -> Match:
    rope, norm = sources[0].rope, sources[0].norm
    nodes = {attention.node.name, *behind, *(node for source in sources for node in source.nodes)}
    positions = min(attention.capacity // 2, MOST_POSITIONS)
    positions = min(positions, *(most for most in (attention.window, attention.chunk) if most > 0), positions)
    row_bytes = attention.kv_heads * (attention.head_dim + attention.value_dim) * attention.element_bytes
    attributes: tuple[tuple[str, Scalar], ...] = (
        ("heads", attention.heads), ("kv_heads", attention.kv_heads), ("head_dim", attention.head_dim),
        ("value_dim", attention.value_dim),
        ("capacity", attention.capacity), ("scale", attention.scale), ("window", attention.window),
        ("chunk", attention.chunk), ("softcap", attention.softcap), ("alibi", bool(attention.slopes)),
        *((f"slope{head}", slope) for head, slope in enumerate(attention.slopes)),
        ("qk_norm", norm is not None), ("rope", rope is not None),
        ("norm", norm.kind if norm else "none"), ("norm_eps", norm.eps if norm else 0.0),
        ("interleaved", rope is not None and rope.style == "interleaved"),
        ("state_bytes", positions * row_bytes),
    )
    return Match(kind=ATTENTION, label=SemanticLabel.ATTENTION, nodes=view.deps.members(view.deps.mask(nodes)),
                 operands=tuple(_operands(view, attention, sources, out)), attributes=attributes)


def _operands(view: RegionView, attention: Attention, sources: list[Source], out: str) -> Iterator[Operand]:
    for name, source in zip(("q", "k", "v"), sources, strict=True):
        yield view.read(name, source.value)
    for name, source in zip(("q_norm", "k_norm"), sources, strict=False):
        if source.norm is not None:
            yield view.read(name, source.norm.weight)
    rope = sources[0].rope
    if rope is not None:
        yield view.read("cos", rope.cos)
        yield view.read("sin", rope.sin)
    yield view.state("k_cache", attention.k_cache)
    yield view.state("v_cache", attention.v_cache)
    yield view.read("position", attention.position, role=Role.LENGTH)
    if attention.sinks:
        yield view.read("sinks", attention.sinks)
    yield view.write("out", out)
