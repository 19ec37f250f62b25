"""Products that mix a few streams by a small matrix, in the order in which the streams lie (AltUp, hyper-connections)."""

from attrs import evolve

from ...ir.graph import Argument, Graph, Node, Ref, TensorSpec, Value
from ...ops.region_view import is_contiguous
from ...ops.schema import argument as argument_of
from .laid_out import laid_out_anew
from .rewrite import View, beside, rebuild

_PERMUTE, _MATMUL = "aten.permute.default", "aten.matmul.default"


def turn_streams(graph: Graph) -> Graph:
    """For one token, streams that are turned to be mixed and turned back are multiplied from the left, where they are.

    Before: ``permute(matmul(permute(x, [1, 2, 3, 0]), C), [3, 0, 1, 2])`` of an x [S, 1, 1, H] and a C [1, 1, S, O], whose elements
    lie O apart. After: ``reshape(matmul(permute(C), reshape(x, [S, H])), [O, 1, 1, H])`` in one piece.
    """
    if graph.tokens != 1:
        return graph
    view, made, values, changed = View(graph), dict[str, list[Node]](), list[Value](), dict[str, TensorSpec]()
    for node in graph.nodes:
        found = _mixed(view, node)
        if found is None:
            continue
        x, base, dims = found
        shape, result = view.shape(x), graph.spec(node.outputs[0])
        streams, mixed, width, dtype = shape[0], result.shape[0], shape[-1], result.dtype
        left, right, product = (f"{node.name}.{part}" for part in ("factors", "streams", "mixed"))
        turned, flat = f"{node.name}.turned", (mixed, streams)
        made[node.name] = [
            beside(node, turned, _PERMUTE, "view", (base, dims)), beside(node, left, "aten.reshape.default", "view", (Ref(turned), flat)),
            beside(node, right, "aten.reshape.default", "view", (x, (streams, width))),
            beside(node, product, _MATMUL, "matmul", (Ref(left), Ref(right))),
            beside(node, node.name, "aten.reshape.default", "view", (Ref(product), result.shape), node.outputs)]
        values += [Value(name=turned, spec=TensorSpec(shape=(mixed, streams, *(1,) * (len(shape) - 2)), dtype=dtype)),
                   Value(name=left, spec=TensorSpec(shape=flat, dtype=dtype)),
                   Value(name=right, spec=TensorSpec(shape=(streams, width), dtype=dtype)),
                   Value(name=product, spec=TensorSpec(shape=(mixed, width), dtype=dtype))]
        changed[node.outputs[0]] = evolve(result, strides=())
    anew = laid_out_anew(graph, changed) if changed else None
    if anew is None:
        return graph
    nodes = [one for node in graph.nodes for one in made.get(node.name, [node])]
    return rebuild(evolve(anew, values=(*anew.values, *values)), nodes)


def _mixed(view: View, node: Node) -> tuple[Argument, Argument, tuple[int, ...]] | None:
    """The streams, what the factors are a permutation of, and which one has them as [O, S, 1, ..]; None for other nodes."""
    product = view.node(node.args[0], _MATMUL) if node.op == _PERMUTE else None
    turned = view.node(product.args[0], _PERMUTE) if product is not None else None
    if product is None or turned is None or not view.private([turned, product], node):
        return None
    x, factors = turned.args[0], product.args[1]
    rank, shape = len(view.shape(x)), view.shape(factors)
    if rank < 3 or len(shape) != rank or _dims(turned) != (*range(1, rank), 0) or _dims(node) != (rank - 1, *range(rank - 1)):
        return None
    if not isinstance(x, Ref) or not is_contiguous(view.graph.spec(x.value)):
        return None
    if any(one != 1 for one in (*view.shape(x)[1:-1], *shape[:-2])):
        return None
    base, dims = factors, (rank - 1, rank - 2, *range(rank - 2))
    before = view.node(factors, _PERMUTE)
    if before is not None:
        own = _dims(before)
        base, dims = before.args[0], tuple(own[axis] for axis in dims)
    spec = view.graph.spec(base.value) if isinstance(base, Ref) else None
    moved = [axis for axis in dims if spec is not None and spec.shape[axis] != 1]
    return (x, base, dims) if spec is not None and is_contiguous(spec) and moved == sorted(moved) else None


def _dims(node: Node) -> tuple[int, ...]:
    given = argument_of(node, "dims")
    axes = given if isinstance(given, tuple) else ()
    return tuple(axis % len(axes) for axis in axes if isinstance(axis, int))
