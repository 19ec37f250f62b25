"""Norms that a model writes out become one operator each, with the model's roundings."""

from collections.abc import Callable

from ...ir.graph import Argument, Graph, Node, Ref
from ...ops.schema import argument as argument_of
from .rewrite import View, both_orders, call, fuse


def collapse_norms(graph: Graph) -> Graph:
    """One ``agentcompile.rms_norm`` or ``agentcompile.layer_norm`` for a norm over the last axis that is written out.

    Before: ``h = to(x, float32); r = rsqrt(mean(pow(h, 2), [-1], True) + eps); n = h * r`` and then
    ``w * to(n, dtype of x)`` (Llama), ``to(n * (1 + to(w, float32)), dtype of x)`` (Gemma), ``to(w * n, dtype of x)`` with a weight of
    any type (OLMo 2), or ``to(n, dtype of x)`` (nanochat); ``h`` is squared by ``pow``, ``square`` or a product with itself, and may be
    x where its type widens (T5); ``c = h - mean(h); to(w * (c * rsqrt(mean(pow(c, 2)) + eps)), dtype of x)`` (Cohere);
    ``to(aten.layer_norm(h, [n], None, None, eps), dtype of x)`` (OLMo).
    After: ``rms_norm(x, w, eps, one_plus, once)``, ``layer_norm(x, w, eps)``.
    """
    # In float32 a weight of 1 + w is a weight as well, and every norm holds one without a weight: the most specific first.
    for find in (_rms_one_plus, _rms_plain, _rms_once, _layer, _layer_bare, _rms_bare):
        graph = _collapse(graph, find)
    return graph


_FLOATS = ("float32", "bfloat16", "float16")
_Found = tuple[str, tuple[Argument, ...]]


def _collapse(graph: Graph, find: Callable[[View, Node], _Found | None]) -> Graph:
    view = View(graph)
    found: dict[str, Node] = {}
    for node in graph.nodes:
        match = find(view, node)
        if match is not None:
            kind, arguments = match
            found[node.name] = call(node, kind, arguments, f"{find.__name__.strip('_')}.{len(found)}")
    return fuse(graph, found) if found else graph


def _rms_plain(view: View, node: Node) -> _Found | None:
    for weight, scaled in both_orders(node, "aten.mul.Tensor"):
        rounded, cast = view.through_cast(scaled)
        core = _rms_core(view, rounded)
        if core is None or not _is_row(view, weight, core[0]):
            continue
        x, eps, interior = core
        if view.dtype(x) != view.dtype(scaled) or view.dtype(weight) != view.dtype(x):
            continue
        if view.private([*interior, *([cast] if cast else [])], node):
            return "rms_norm", (x, weight, eps)
    return None


def _rms_one_plus(view: View, node: Node) -> _Found | None:
    # The cast back is the last node; a float32 model has none.
    product = view.node(node.args[0]) if node.kind == "cast" else node
    if product is None:
        return None
    for gain, scaled in both_orders(product, "aten.mul.Tensor"):
        core = _rms_core(view, scaled)
        plus = view.node(gain, "aten.add.Tensor")
        if core is None or plus is None or 1.0 not in plus.args or plus.kwargs or view.dtype(gain) != "float32":
            continue  # a sum in half precision is rounded
        x, eps, interior = core
        weight, cast = view.through_cast(plus.args[0] if isinstance(plus.args[0], Ref) else plus.args[1])
        if not _is_row(view, weight, x) or view.dtype(Ref(node.outputs[0])) != view.dtype(x):
            continue
        last = [product] if product is not node else []
        if view.private([*interior, *last, plus, *([cast] if cast else [])], node):
            return "rms_norm", (x, weight, eps, True)
    return None


def _rms_once(view: View, node: Node) -> _Found | None:
    product = view.node(node.args[0]) if node.kind == "cast" and node.args else None
    for gain, scaled in both_orders(product, "aten.mul.Tensor") if product is not None else ():
        core = _rms_core(view, scaled)
        weight, cast = view.through_cast(gain)
        if core is None or product is None or not _is_row(view, weight, core[0]) or view.dtype(weight) not in _FLOATS:
            continue
        x, eps, interior = core
        exact = cast is None or view.dtype(gain) == "float32"
        taken = [*interior, product, *([cast] if cast else [])]
        if exact and view.dtype(Ref(node.outputs[0])) == view.dtype(x) and view.private(taken, node):
            return "rms_norm", (x, weight, eps, False, True)
    return None


def _rms_bare(view: View, node: Node) -> _Found | None:
    # The cast back is the last node; a float32 model has none.
    if node.kind == "cast":
        core = _rms_core(view, node.args[0])
    else:
        core = _rms_core(view, Ref(node.outputs[0])) if node.op == "aten.mul.Tensor" else None
    if core is None or view.dtype(Ref(node.outputs[0])) != view.dtype(core[0]):
        return None
    x, eps, interior = core
    rest = [one for one in interior if one.name != node.name]
    return ("rms_norm", (x, None, eps)) if view.private(rest, node) else None


def _layer(view: View, node: Node) -> _Found | None:
    # As above: the cast back, or the product with the weight.
    product = view.node(node.args[0]) if node.kind == "cast" and node.args else node
    if product is None:
        return None
    for gain, normal in both_orders(product, "aten.mul.Tensor"):
        weight, cast = view.through_cast(gain)
        core = _layer_core(view, normal)
        if core is None or not _is_row(view, weight, core[0]) or view.dtype(Ref(node.outputs[0])) != view.dtype(core[0]):
            continue
        x, eps, interior = core
        last = [product] if product is not node else []
        if view.dtype(weight) == view.dtype(x) and view.private([*interior, *last, *([cast] if cast else [])], node):
            return "layer_norm", (x, weight, eps)
    return None


def _layer_bare(view: View, node: Node) -> _Found | None:
    norm = view.node(node.args[0], "aten.layer_norm.default") if node.kind == "cast" and node.args else None
    if norm is None or argument_of(norm, "weight") is not None or argument_of(norm, "bias") is not None:
        return None
    x, cast = view.through_cast(norm.args[0])
    eps, shape = argument_of(norm, "eps"), argument_of(norm, "normalized_shape")
    if cast is None or view.dtype(norm.args[0]) != "float32" or not isinstance(eps, float) or shape != view.shape(x)[-1:]:
        return None
    same = view.dtype(Ref(node.outputs[0])) == view.dtype(x)
    return ("layer_norm", (x, None, eps)) if same and view.private([norm], node) else None


def _layer_core(view: View, argument: Argument) -> tuple[Argument, float, list[Node]] | None:
    """(x, eps, nodes) where ``argument`` is ``c * rsqrt(mean(c ** 2) + eps)``, c is h - mean(h) and h is x in float32."""
    product = view.node(argument, "aten.mul.Tensor")
    if product is None:
        return None
    for centred, factor in both_orders(product, "aten.mul.Tensor"):
        less = view.node(centred, "aten.sub.Tensor")
        root = _inverse_root(view, factor)
        if less is None or less.kwargs or root is None:
            continue
        squared, eps, interior = root
        again, middle = view.node(squared, "aten.sub.Tensor"), view.node(less.args[1])
        if again is None or again.args != less.args or again.kwargs or middle is None or not _is_mean(view, middle):
            continue
        wide = less.args[0]
        if middle.args[0] != wide or view.dtype(wide) != "float32":
            continue
        x, cast = view.through_cast(wide)
        return x, eps, [product, less, again, middle, *interior, *([cast] if cast else [])]
    return None


def _inverse_root(view: View, argument: Argument) -> tuple[Argument, float, list[Node]] | None:
    """(h, eps, nodes) where ``argument`` is ``rsqrt(mean(h ** 2) + eps)`` over the last axis."""
    root = view.node(argument, "aten.rsqrt.default") or view.node(argument, "aten.pow.Tensor_Scalar")
    if root is None or (root.op != "aten.rsqrt.default" and root.args[1] != -0.5):
        return None
    total = view.node(root.args[0], "aten.add.Tensor")
    mean = total and view.node(total.args[0])
    power = mean and _is_mean(view, mean) and view.node(mean.args[0])
    if not (total and mean and power) or total.kwargs or not isinstance(total.args[1], float) or not _is_square(power):
        return None
    return power.args[0], total.args[1], [root, total, mean, power]


def _is_square(node: Node) -> bool:
    """Whether a node multiplies every element with itself."""
    if node.op == "aten.pow.Tensor_Scalar":
        return node.args[1] == 2
    return node.op == "aten.square.default" or (node.op == "aten.mul.Tensor" and len(node.args) == 2 and node.args[0] == node.args[1])


def _is_mean(view: View, node: Node) -> bool:
    """Whether a node is the mean over the last axis, which stays as one element."""
    if node.op != "aten.mean.dim" or node.kwargs:
        return False
    last = len(view.shape(node.args[0])) - 1
    return argument_of(node, "dim") in ((-1,), (last,)) and argument_of(node, "keepdim") is True


def _rms_core(view: View, argument: Argument) -> tuple[Argument, float, list[Node]] | None:
    """(x, eps, nodes) where ``argument`` is ``h * rsqrt(mean(h ** 2) + eps)`` and h is x in float32, which the product may widen itself."""
    product = view.node(argument, "aten.mul.Tensor")
    if product is None or view.dtype(Ref(product.outputs[0])) != "float32":
        return None
    for wide, factor in both_orders(product, "aten.mul.Tensor"):
        root = _inverse_root(view, factor)
        if root is None or view.dtype(root[0]) != "float32":
            continue
        (x, cast), (squared, again) = view.through_cast(wide), view.through_cast(root[0])
        if wide == squared:
            x, cast = wide, None
        if x == squared:
            return x, root[1], [product, *root[2], *{one.name: one for one in (cast, again) if one is not None}.values()]
    return None


def _is_row(view: View, weight: Argument, x: Argument) -> bool:
    return bool(view.shape(x)) and view.shape(weight) == view.shape(x)[-1:]
