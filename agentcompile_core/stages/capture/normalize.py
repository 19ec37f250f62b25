"""Graph -> Graph passes of capture: what every HuggingFace model writes out in full becomes one node per concept.

Every pass keeps the results bitwise: the operators of namespace agentcompile round where the originals do.
"""

from collections.abc import Callable

from ...ir.graph import Argument, Graph, Node, Ref
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical
from .functional import without_writes
from .rewrite import View, eliminate_dead_code, fuse, rebuild, resolve_chain


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


def collapse_rms_norm(graph: Graph) -> Graph:
    """One ``agentcompile.rms_norm`` for a root-mean-square norm written out, in either of HuggingFace's roundings.

    Before: ``h = to(x, float32); r = rsqrt(mean(pow(h, 2), [-1], True) + eps); n = h * r`` and then
    ``w * to(n, dtype of x)`` (Llama), or ``to(n * (1 + to(w, float32)), dtype of x)`` (Gemma).
    After: ``rms_norm(x, w, eps, one_plus)``.
    """
    view = View(graph)
    found: dict[str, Node] = {}
    for node in graph.nodes:
        match = _rms_plain(view, node) or _rms_one_plus(view, node)
        if match is not None:
            x, weight, eps, one_plus = match
            found[node.name] = _call(node, "rms_norm", (x, weight, eps, one_plus), len(found))
    return fuse(graph, found)


_Norm = tuple[Argument, Argument, float, bool]


def _rms_plain(view: View, node: Node) -> _Norm | None:
    for weight, scaled in _both_orders(node, "aten.mul.Tensor"):
        rounded, cast = view.through_cast(scaled)
        core = _rms_core(view, rounded)
        if core is None or not _is_row(view, weight, core[0]):
            continue
        x, eps, interior = core
        if view.dtype(x) != view.dtype(scaled) or view.dtype(weight) != view.dtype(x):
            continue
        if view.private([*interior, *([cast] if cast else [])], node):
            return x, weight, eps, False
    return None


def _rms_one_plus(view: View, node: Node) -> _Norm | None:
    # The cast back is the last node; a float32 model has none.
    product = view.node(node.args[0]) if node.kind == "cast" else node
    if product is None:
        return None
    for gain, scaled in _both_orders(product, "aten.mul.Tensor"):
        core = _rms_core(view, scaled)
        plus = view.node(gain, "aten.add.Tensor")
        if core is None or plus is None or 1.0 not in plus.args or plus.kwargs:
            continue
        x, eps, interior = core
        weight, cast = view.through_cast(plus.args[0] if isinstance(plus.args[0], Ref) else plus.args[1])
        if not _is_row(view, weight, x) or view.dtype(Ref(node.outputs[0])) != view.dtype(x):
            continue
        last = [product] if product is not node else []
        if view.private([*interior, *last, plus, *([cast] if cast else [])], node):
            return x, weight, eps, True
    return None


def _rms_core(view: View, argument: Argument) -> tuple[Argument, float, list[Node]] | None:
    """(x, eps, nodes) where ``argument`` is ``h * rsqrt(mean(h ** 2) + eps)`` and h is x in float32."""
    product = view.node(argument, "aten.mul.Tensor")
    if product is None:
        return None
    for wide, factor in _both_orders(product, "aten.mul.Tensor"):
        root = view.node(factor, "aten.rsqrt.default")
        total = root and view.node(root.args[0], "aten.add.Tensor")
        mean = total and view.node(total.args[0], "aten.mean.dim")
        power = mean and view.node(mean.args[0], "aten.pow.Tensor_Scalar")
        if not (root and total and mean and power) or power.args != (wide, 2) or view.dtype(wide) != "float32":
            continue
        last_axis = len(view.shape(wide)) - 1
        if argument_of(mean, "dim") not in ((-1,), (last_axis,)) or argument_of(mean, "keepdim") is not True or mean.kwargs or total.kwargs:
            continue
        if not isinstance(total.args[1], float):
            continue
        x, cast = view.through_cast(wide)
        return x, total.args[1], [product, root, total, mean, power, *([cast] if cast else [])]
    return None


def _is_row(view: View, weight: Argument, x: Argument) -> bool:
    return bool(view.shape(x)) and view.shape(weight) == view.shape(x)[-1:]


def _both_orders(node: Node, op: str) -> tuple[tuple[Argument, Argument], ...]:
    if node.op != op or len(node.args) != 2 or node.kwargs:
        return ()
    return (node.args[0], node.args[1]), (node.args[1], node.args[0])  # type: ignore[return-value]


def collapse_rope(graph: Graph) -> Graph:
    """One ``agentcompile.rope`` for a rotation in half style, of all channels or of the first R.

    Before: ``x * unsqueeze(cos, 1) + cat(neg(x[..., half:]), x[..., :half]) * unsqueeze(sin, 1)``, for a part of the
    channels with ``cat(that, x[..., R:])`` behind it. After: ``rope(x, cos, sin)``.
    """
    view = View(graph)
    found: dict[str, Node] = {}
    for node in graph.nodes:
        rotation = _rotation(view, node)
        if rotation is not None:
            found[node.name] = _call(node, "rope", rotation, len(found))
    whole = fuse(graph, found)
    view = View(whole)
    partial: dict[str, Node] = {}
    for node in whole.nodes:
        widened = _partial_rotation(view, node)
        if widened is not None:
            partial[node.name] = _call(node, "rope", widened, len(found) + len(partial))
    return fuse(whole, partial)


_Rotation = tuple[Argument, Argument, Argument]


def _rotation(view: View, node: Node) -> _Rotation | None:
    for first, second in _both_orders(node, "aten.add.Tensor"):
        straight, turned = view.node(first, "aten.mul.Tensor"), view.node(second, "aten.mul.Tensor")
        if straight is None or turned is None:
            continue
        for x, cos in _both_orders(straight, "aten.mul.Tensor"):
            for swapped, sin in _both_orders(turned, "aten.mul.Tensor"):
                tables = _table(view, cos), _table(view, sin)
                if None not in tables and len(view.shape(x)) == 4 and _is_swap_of(view, swapped, x):
                    return x, tables[0], tables[1]
    return None


def _table(view: View, argument: Argument) -> Argument:
    """The [1, T, R] table under ``unsqueeze(table, 1)``, or None."""
    node = view.node(argument, "aten.unsqueeze.default")
    if node is None or argument_of(node, "dim") != 1 or len(view.shape(node.args[0])) != 3:
        return None
    return node.args[0]


def _is_swap_of(view: View, argument: Argument, x: Argument) -> bool:
    """Whether ``argument`` is ``cat(neg(x[..., half:]), x[..., :half])``."""
    pair = view.joined(view.node(argument))
    width = view.shape(x)[-1]
    if pair is None:
        return False
    negated = view.node(pair[0], "aten.neg.default")
    if negated is None:
        return False
    half = width // 2
    return view.slice_of(negated.args[0]) == (x, half, width) and view.slice_of(pair[1]) == (x, 0, half)


def _partial_rotation(view: View, node: Node) -> _Rotation | None:
    pair = view.joined(node)
    if pair is None:
        return None
    turned, rest = pair
    inner = view.node(turned, "agentcompile.rope.default")
    if inner is None or not view.private([inner], node):
        return None
    first, second = view.slice_of(inner.args[0]), view.slice_of(rest)
    if first is None or second is None or first[0] != second[0]:
        return None
    width = view.shape(first[0])[-1]
    if first[1:] != (0, view.shape(inner.args[1])[-1]) or second[1:] != (first[2], width):
        return None
    return first[0], inner.args[1], inner.args[2]


def _call(anchor: Node, kind: str, args: tuple[Argument, ...], index: int) -> Node:
    """A call of ``agentcompile.<kind>`` that takes the place and the result name of ``anchor``."""
    return canonical(Node(
        name=f"{kind}.{index}", op=f"agentcompile.{kind}.default", kind=kind, args=args, outputs=anchor.outputs,
        module=anchor.module, layer=anchor.layer,
    ))


PASSES: tuple[Callable[[Graph], Graph], ...] = (without_writes, drop_noise, collapse_rms_norm, collapse_rope, eliminate_dead_code)
