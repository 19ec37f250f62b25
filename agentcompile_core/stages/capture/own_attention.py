"""Attention that a model writes out itself, around cached K and V and a causal mask, becomes one ``agentcompile.attention``.

While such a model is traced, what its cache hands out and what its mask is added to are marked by operators that compute nothing
(``agentcompile.cached``, ``agentcompile.masked``). Behind the trace every mark must have become part of an attention.
"""

import math

from attrs import evolve, frozen

from ...ir.graph import Argument, Graph, KVSpec, Node, Ref, Symbol, TensorSpec, Value, ValueKind
from ...ops.schema import argument as argument_of
from .attention import Unsupported
from .rewrite import View, beside, eliminate_dead_code, rebuild

CACHED, MASKED = "agentcompile.cached.default", "agentcompile.masked.default"
_PRODUCTS = ("aten.matmul.default", "aten.bmm.default")
_SOFTMAX = ("aten.softmax.int", "aten._softmax.default")
_SCALES = ("aten.mul.Tensor", "aten.div.Tensor")
_LIMITS = ("aten.max.other", "aten.maximum.default")


@frozen(kw_only=True)
class _Own:
    """One attention: the queries [1, H, T, D], the layer whose K and V it reads, and how."""

    q: Ref
    layer: int
    scale: float
    window: int


def collapse_attention(graph: Graph, kv: KVSpec) -> Graph:
    """Replace each ``softmax(q k^T * scale + mask) v`` over marked K and V by the operator that appends and attends.

    Raises:
        Unsupported: a marked value is used otherwise, or not every layer attends once.
    """
    shape = (1, kv.capacity, kv.kv_heads, kv.head_dim)
    caches = [Value(name=name, spec=TensorSpec(shape=shape, dtype=kv.dtype), kind=ValueKind.STATE, source=name)
              for name in (f"kv.{part}.{layer}" for part in ("key", "value") for layer in range(kv.layers))]
    known = {value.name for value in graph.values}
    graph = evolve(graph, values=(*graph.values, *(value for value in caches if value.name not in known)))
    view = View(graph)
    position = "session.position" if not any(value.name == "start" for value in graph.values) else "start"
    nodes: list[Node] = []
    values: list[Value] = []
    seen: list[int] = []
    for node in graph.nodes:
        own = _own(view, node)
        if own is None:
            nodes.append(node)
            continue
        seen.append(own.layer)
        made, named = _attention(view, node, own, position)
        nodes += made
        values += named
    done = eliminate_dead_code(rebuild(evolve(graph, values=(*graph.values, *values)), nodes))
    if any(node.op in (CACHED, MASKED) for node in done.nodes) or sorted(seen) != list(range(kv.layers)):
        raise Unsupported("it computes attention itself, in a way that is not understood")
    return done


def _own(view: View, node: Node) -> _Own | None:
    if node.op not in _PRODUCTS:
        return None
    soft = view.node(_before(view, node.args[0])[0])
    value = view.node(_before(view, node.args[1])[0], CACHED)
    if soft is None or soft.op not in _SOFTMAX or value is None or argument_of(value, "is_value") is not True:
        return None
    if view.dim(soft) != len(view.shape(soft.args[0])) - 1:
        return None
    outer, after = _before(view, soft.args[0], limits=True)
    masked = view.node(outer, MASKED)
    inner, before = _before(view, masked.args[0]) if masked is not None else (None, 1.0)
    product = view.node(inner)
    if masked is None or product is None or product.op not in _PRODUCTS:
        return None
    turned = view.node(product.args[1])
    key = view.node(_before(view, turned.args[0])[0], CACHED) if turned is not None and _swaps_last(view, turned) else None
    q = _queries(view, product.args[0])
    if key is None or q is None or argument_of(key, "layer") != argument_of(value, "layer") or argument_of(key, "is_value") is True:
        return None
    layer, window = argument_of(key, "layer"), argument_of(masked, "window")
    return _Own(q=q, layer=layer, scale=after * before, window=window) if isinstance(layer, int) and isinstance(window, int) else None


def _before(view: View, argument: Argument, limits: bool = False) -> tuple[Argument, float]:
    """Back through views, copies, casts and products with numbers: the value before them, and the product of the numbers."""
    factor = 1.0
    while (node := view.node(argument)) is not None:
        number = node.args[1] if node.op in _SCALES and len(node.args) == 2 else None
        if isinstance(number, int | float) and number:
            factor = factor * number if node.op == "aten.mul.Tensor" else factor / number
        elif not (_reshapes(view, node) or (limits and node.op in _LIMITS and _is_lowest(view, node.args[1]))):
            break
        argument = node.args[0]
    return argument, factor


def _reshapes(view: View, node: Node) -> bool:
    """Whether a node gives the same elements in the same order, in whatever type; an axis of one may move."""
    if node.kind == "cast" or node.op in ("aten.clone.default", "aten.contiguous.default"):
        return True
    return node.kind in ("view", "copy") and node.op.split(".")[1] in ("view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze")


def _is_lowest(view: View, argument: Argument) -> bool:
    """Whether an argument is the lowest finite number of a type, below which no score lies."""
    node = view.node(argument, "aten.full.default")
    while node is None and (cast := view.node(argument)) is not None and cast.kind in ("cast", "view"):
        argument = cast.args[0]
        node = view.node(argument, "aten.full.default")
    fill = argument_of(node, "fill_value") if node is not None else None
    return isinstance(fill, int | float) and fill <= -65504.0


def _swaps_last(view: View, node: Node) -> bool:
    rank = len(view.shape(node.args[0]))
    if node.op != "aten.transpose.int":
        return False
    axes = {int(axis) % rank for name in ("dim0", "dim1") if isinstance(axis := argument_of(node, name), int)}
    return axes == {rank - 2, rank - 1}


def _queries(view: View, argument: Argument) -> Ref | None:
    """The queries [1, H, T, D] in the type of the model: before casts, and before heads are flattened into the batch."""
    while (node := view.node(argument)) is not None and _reshapes(view, node):
        shape = view.shape(argument)
        if len(shape) == 4 and shape[0] == 1 and node.kind != "cast":
            break
        argument = node.args[0]
    shape = view.shape(argument)
    return argument if isinstance(argument, Ref) and len(shape) == 4 and shape[0] == 1 else None


def _attention(view: View, node: Node, own: _Own, position: str) -> tuple[list[Node], list[Value]]:
    """The operator and the views that give its result [1, T, H, D] the shape and type of ``node``'s."""
    graph, name = view.graph, f"attention.{own.layer}"
    marks = {argument_of(n, "is_value"): n.args[0] for n in graph.nodes if n.op == CACHED and argument_of(n, "layer") == own.layer}
    spec, result = graph.spec(own.q.value), graph.spec(node.outputs[0])
    _, heads, count, _ = spec.shape
    caches = (Ref(f"kv.key.{own.layer}"), Ref(f"kv.value.{own.layer}"))
    width = view.shape(marks[True])[-1]
    if math.prod(result.shape) != heads * count * width or spec.dtype is not graph.spec(caches[0].value).dtype:
        raise Unsupported("it computes attention itself, in a way that is not understood")
    arguments = (own.q, marks[False], marks[True], *caches, Ref(position), own.scale, own.window)
    attended = TensorSpec(shape=(1, count, heads, width), dtype=spec.dtype)
    turned = TensorSpec(shape=(1, heads, count, width), dtype=spec.dtype)
    if count > 1:
        turned = evolve(turned, strides=(heads * count * width, width, heads * width, 1))
    shaped = node.name if result.dtype is spec.dtype else f"{name}.shaped"
    attention = beside(node, name, "agentcompile.attention.default", "attention", arguments)
    nodes = [
        evolve(attention, mutates=tuple(cache.value for cache in caches)),
        beside(node, f"{name}.turned", "aten.transpose.int", "view", (Ref(name), 1, 2)),
        beside(node, shaped, "aten.reshape.default", "copy" if count > 1 else "view", (Ref(f"{name}.turned"), result.shape),
               node.outputs if shaped == node.name else ()),
    ]
    values = [Value(name=name, spec=attended), Value(name=f"{name}.turned", spec=turned)]
    if shaped != node.name:
        values.append(Value(name=shaped, spec=evolve(result, dtype=spec.dtype)))
        cast = (Ref(shaped), Symbol("dtype", result.dtype.value))
        nodes.append(beside(node, node.name, "aten.to.dtype", "cast", cast, node.outputs))
    return nodes, values
