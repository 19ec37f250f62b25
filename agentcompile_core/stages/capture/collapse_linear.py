"""Products with matrices, and parts picked out by constant indices, as the operators that the rest is made of."""

from collections.abc import Sequence

from attrs import evolve

from ...ir.graph import Argument, Graph, Node, Ref, TensorSpec, Value, ValueKind
from ...ir.weight_source import parameter_of, transposed
from ...ops.region_view import is_contiguous
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical
from .rewrite import View, fuse

_RESHAPED = frozenset({"aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints",
                       "aten.unflatten.int", "aten.unsqueeze.default", "aten.squeeze.dim"})
_TURNED = {"aten.t.default": (), "aten.numpy_T.default": (), "aten.mT.default": (), "aten.transpose.int": ("dim0", "dim1")}


def collapse_linear(graph: Graph) -> Graph:
    """One ``linear`` for a product with a weight, a slice for a part at a constant index.

    Before: ``matmul(x, t(W))``; ``addmm(b, x, t(W))``; for one token ``index(x, [None, None, full([1], -2)])``; ``addmm(b, x, V)``
    of a parameter V that nothing else is done with.
    After: ``linear(x, W)``; ``linear(x, W, b)``; ``slice(x, 2, n - 2, n - 1)``; ``linear(x, V..T, b)``, see ``ir.weight_source``.
    """
    view = View(graph)
    turned = {name: transposed(name) for name in _multiplied_alone(view)}
    found = {node.name: new for node in graph.nodes if (new := _linear(view, node, turned) or _part(view, node)) is not None}
    given = (graph.by_name[name] for name in turned)
    values = [evolve(value, name=turned[value.name], source=transposed(value.source), spec=TensorSpec(
        shape=value.spec.shape[::-1], dtype=value.spec.dtype)) for value in given]
    return fuse(evolve(graph, values=(*graph.values, *values)), found) if found else graph


def linear_in_place(graph: Graph) -> Graph:
    """Rows of a linear layer stay in the axes that they lie in.

    Before: ``view(linear(view(x, [-1, K]), W), [B, T, N])`` of an x [B, T, K]. After: ``linear(x, W)``.
    """
    view = View(graph)
    found = {node.name: new for node in graph.nodes if (new := _of_rows(view, node)) is not None}
    return fuse(graph, found) if found else graph


def _of_rows(view: View, node: Node) -> Node | None:
    """The linear layer whose flattened rows ``node`` puts back into their axes, which nothing else reads."""
    product = view.node(node.args[0], "aten.linear.default") if node.op in _RESHAPED and node.args else None
    flat = view.node(product.args[0]) if product is not None and view.private((product,), node) else None
    if product is None or flat is None or flat.op not in _RESHAPED or view.crosses_a_write((flat, product), node):
        return None
    if len(product.args) > 2 and not is_contiguous(view.graph.spec(flat.inputs[0])):
        return None  # the framework adds a bias behind a product of such rows, which rounds once more
    before, after = view.shape(flat.args[0]), view.graph.spec(node.outputs[0]).shape
    if not before or before[:-1] != after[:-1] or view.shape(product.args[0])[-1:] != before[-1:]:
        return None
    if view.graph.spec(product.outputs[0]).shape[-1:] != after[-1:]:
        return None
    return canonical(evolve(product, name=node.name, args=(flat.args[0], *product.args[1:]), outputs=node.outputs))


def rows_where_read(graphs: Sequence[Graph]) -> list[Graph]:
    """``graphs`` of one model, of which none reads a parameter by columns that another one reads as it is.

    Before: ``linear(x, V..T)`` where another graph reads V. After: ``linear(x, t(V))``.
    """
    read = {value.source for graph in graphs for value in graph.values if value.kind is ValueKind.WEIGHT}
    both = frozenset(source for source in read if (of := parameter_of(source))[1] and of[0] in read)
    return [_written_out(graph, both) for graph in graphs] if both else list(graphs)


def _written_out(graph: Graph, sources: frozenset[str]) -> Graph:
    """``graph`` with transpositions that ``sources`` say made of their parameters."""
    values, nodes = list[Value](), list[Node]()
    for value in graph.values:
        if value.kind is not ValueKind.WEIGHT or value.source not in sources:
            values.append(value)
            continue
        name, (rows, columns) = parameter_of(value.name)[0], value.spec.shape
        values += [
            evolve(value, name=name, source=parameter_of(value.source)[0], spec=evolve(value.spec, shape=(columns, rows))),
            Value(name=value.name, spec=evolve(value.spec, strides=(1, rows))),
        ]
        nodes.append(canonical(Node(name=value.name, op="aten.t.default", kind="view", args=(Ref(name),), outputs=(value.name,))))
    return evolve(graph, values=tuple(values), nodes=(*nodes, *graph.nodes)).verify() if nodes else graph


def _product(node: Node) -> tuple[Argument, Argument, Argument] | None:
    """The two factors of a product with a matrix, and what is added to it."""
    if node.op in ("aten.matmul.default", "aten.mm.default"):
        return node.args[0], node.args[1], None
    if node.op == "aten.addmm.default" and argument_of(node, "alpha") == 1 and argument_of(node, "beta") == 1:
        return node.args[1], node.args[2], node.args[0]
    return None


def _multiplied_alone(view: View) -> list[str]:
    """Matrices among the parameters that every reader multiplies with from the left."""
    matrices = [value for value in view.graph.values if value.kind is ValueKind.WEIGHT and len(value.spec.shape) == 2
                and value.spec.dtype.is_float and value.name not in view.graph.outputs]
    return [value.name for value in matrices if (users := view.graph.users.get(value.name))
            and all(_multiplies(view, user, value.name) for user in users)]


def _multiplies(view: View, node: Node, weight: str) -> bool:
    """Whether ``node`` is a product with ``weight`` that a linear layer with its transposition is too, and reads it nowhere else."""
    product = _product(node)
    if product is None or product[1] != Ref(weight) or Ref(weight) in (product[0], product[2]):
        return False
    return _fits(view, product[0], view.shape(Ref(weight))[::-1], product[2])


def _fits(view: View, x: Argument, weight: tuple[int, ...], bias: Argument) -> bool:
    return view.shape(x)[-1:] == weight[1:] and (bias is None or view.shape(bias) == weight[:1])


def _linear(view: View, node: Node, turned: dict[str, str]) -> Node | None:
    product = _product(node)
    if product is None:
        return None
    x, right, bias = product
    if isinstance(right, Ref) and right.value in turned:
        weight: Ref | None = Ref(turned[right.value])
    else:
        weight = _transposed(view, right)
        if weight is None or not _fits(view, x, view.shape(weight), bias):
            return None
    arguments = (x, weight) if bias is None else (x, weight, bias)
    return canonical(evolve(node, op="aten.linear.default", kind="linear", args=arguments, kwargs=()))


def _transposed(view: View, argument: Argument) -> Ref | None:
    """The two-dimensional weight under a transposition."""
    node = view.node(argument)
    if node is None or node.op not in _TURNED or not isinstance(node.args[0], Ref) or len(view.shape(node.args[0])) != 2:
        return None
    axes = {int(axis) % 2 for name in _TURNED[node.op] if isinstance(axis := argument_of(node, name), int)}
    owned = view.graph.kind_of(node.args[0].value) in (ValueKind.WEIGHT, ValueKind.CONSTANT)
    return node.args[0] if owned and axes in (set(), {0, 1}) else None


def _part(view: View, node: Node) -> Node | None:
    if node.op != "aten.index.Tensor" or view.graph.tokens != 1 or not isinstance(node.args[1], tuple) or not isinstance(node.args[0], Ref):
        return None
    places = [axis for axis, one in enumerate(node.args[1]) if one is not None]
    constant = view.node(node.args[1][places[0]], "aten.full.default") if len(places) == 1 else None
    if constant is None or argument_of(constant, "size") != (1,):
        return None
    axis, at, shape = places[0], argument_of(constant, "fill_value"), view.shape(node.args[0])
    # Behind axes of one element a part lies in order, as the copy does.
    if not isinstance(at, int) or any(extent != 1 for extent in shape[:axis]) or not -shape[axis] <= at < shape[axis]:
        return None
    at %= shape[axis]
    return canonical(evolve(node, op="aten.slice.Tensor", kind="view", args=(node.args[0], axis, at, at + 1), kwargs=()))
