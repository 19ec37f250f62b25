"""Attention that a model writes out itself, around cached K and V and a causal mask, becomes one ``agentcompile.attention``.

While such a model is traced, what its cache hands out and what its mask is added to are marked by operators that compute nothing
(``agentcompile.cached``, ``agentcompile.masked``). Behind the trace every mark must have become part of an attention.
"""

import math
from collections.abc import Callable

from attrs import evolve, frozen
from torch import Tensor

from ...ir.graph import Argument, DType, Graph, KVSpec, Node, Ref, Symbol, TensorSpec, Value, ValueKind
from ...ops.operator_names import ATTENTION, CACHED, MASKED
from ...ops.schema import argument as argument_of
from .attention import Unsupported
from .own_scores import Constants, reshapes, scores_of
from .rewrite import View, beside, eliminate_dead_code, rebuild

_PRODUCTS = ("aten.matmul.default", "aten.bmm.default")
_SOFTMAX = ("aten.softmax.int", "aten._softmax.default")


@frozen(kw_only=True)
class _Own:
    """One attention: the queries [1, H, T, D], the layer whose K and V it reads, and how."""

    q: Ref
    layer: int
    scale: float
    window: int
    slopes: tuple[float, ...]


def collapse_attention(graph: Graph, kv: KVSpec, buffers: Callable[[str], Tensor | None]) -> Graph:
    """Replace each ``softmax(q k^T * scale + mask + bias) v`` over marked K and V by the operator that appends and attends.

    ``buffers``: those of the model by name, in which it may keep masks and biases; None where one has no data.

    Raises:
        Unsupported: a marked value is used otherwise, or not every layer attends once.
    """
    caches = [Value(name=name, spec=TensorSpec(shape=shape, dtype=kv.dtype), kind=ValueKind.STATE, source=name)
              for part, shapes in (("key", kv.key_shapes), ("value", kv.value_shapes))
              for name, shape in ((f"kv.{part}.{layer}", shape) for layer, shape in enumerate(shapes))]
    known = {value.name for value in graph.values}
    graph = evolve(graph, values=(*graph.values, *(value for value in caches if value.name not in known)))
    view, constants = View(graph), Constants(graph, buffers)
    position = "session.position" if not any(value.name == "start" for value in graph.values) else "start"
    nodes: list[Node] = []
    values: list[Value] = []
    seen: list[int] = []
    for node in graph.nodes:
        own = _own(view, node, constants)
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


def _own(view: View, node: Node, constants: Constants) -> _Own | None:
    if node.op not in _PRODUCTS:
        return None
    soft = view.node(_before(view, node.args[0]))
    value = view.node(_before(view, node.args[1]), CACHED)
    if soft is None or soft.op not in _SOFTMAX or value is None or argument_of(value, "is_value") is not True:
        return None
    if view.dim(soft) != len(view.shape(soft.args[0])) - 1:
        return None
    scored = scores_of(view, soft.args[0], constants)
    turned = view.node(scored.keys) if scored is not None else None
    if scored is None or turned is None or not _swaps_last(view, turned):
        return None
    key = view.node(_before(view, turned.args[0]), CACHED)
    q = _queries(view, scored.queries)
    if key is None or q is None or argument_of(key, "layer") != argument_of(value, "layer") or argument_of(key, "is_value") is True:
        return None
    layer = argument_of(key, "layer")
    heads = view.shape(q)[1]
    slopes = scored.slopes * heads if len(scored.slopes) == 1 else scored.slopes
    if not isinstance(layer, int) or (slopes and len(slopes) != heads):
        return None
    return _Own(q=q, layer=layer, scale=scored.scale, window=scored.window, slopes=slopes)


def _before(view: View, argument: Argument) -> Argument:
    """The value before views, copies and casts."""
    while (node := view.node(argument)) is not None and reshapes(view, node):
        argument = node.args[0]
    return argument


def _swaps_last(view: View, node: Node) -> bool:
    rank = len(view.shape(node.args[0]))
    if node.op != "aten.transpose.int":
        return False
    axes = {int(axis) % rank for name in ("dim0", "dim1") if isinstance(axis := argument_of(node, name), int)}
    return axes == {rank - 2, rank - 1}


def _queries(view: View, argument: Argument) -> Ref | None:
    """The queries [1, H, T, D] in the type of the model: before casts, and before heads are flattened into the batch."""
    while (node := view.node(argument)) is not None and reshapes(view, node):
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
    width, cached = view.shape(marks[True])[-1], graph.spec(caches[0].value).dtype
    is_wider = spec.dtype is DType.F32 and cached in (DType.F16, DType.BF16)  # rotated in float32, beside keys that are rounded
    if math.prod(result.shape) != heads * count * width or not (spec.dtype is cached or is_wider):
        raise Unsupported("it computes attention itself, in a way that is not understood")
    q, spec = Ref(f"{name}.q") if is_wider else own.q, evolve(spec, dtype=cached)
    arguments = (q, marks[False], marks[True], *caches, Ref(position), own.scale, own.window, 0.0, None, False, own.slopes or None)
    attended = TensorSpec(shape=(1, count, heads, width), dtype=spec.dtype)
    turned = TensorSpec(shape=(1, heads, count, width), dtype=spec.dtype)
    if count > 1:
        turned = evolve(turned, strides=(heads * count * width, width, heads * width, 1))
    shaped = node.name if result.dtype is spec.dtype else f"{name}.shaped"
    attention = beside(node, name, ATTENTION, "attention", arguments)
    nodes = [
        evolve(attention, mutates=tuple(cache.value for cache in caches)),
        beside(node, f"{name}.turned", "aten.transpose.int", "view", (Ref(name), 1, 2)),
        beside(node, shaped, "aten.reshape.default", "copy" if count > 1 else "view", (Ref(f"{name}.turned"), result.shape),
               node.outputs if shaped == node.name else ()),
    ]
    values = [Value(name=name, spec=attended), Value(name=f"{name}.turned", spec=turned)]
    if is_wider:
        nodes.insert(0, beside(node, q.value, "aten.to.dtype", "cast", (own.q, Symbol("dtype", cached.value))))
        values.append(Value(name=q.value, spec=spec))
    if shaped != node.name:
        values.append(Value(name=shaped, spec=evolve(result, dtype=spec.dtype)))
        cast = (Ref(shaped), Symbol("dtype", result.dtype.value))
        nodes.append(beside(node, node.name, "aten.to.dtype", "cast", cast, node.outputs))
    return nodes, values
