"""Products of matrices: linear layers of several rows, batched products with either side transposed, and what happens to the results."""

from collections.abc import Iterable, Iterator, Sequence

from attrs import frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    MATMUL,
    Argument,
    Expression,
    Graph,
    Match,
    Node,
    Operation,
    PointwiseKind,
    RegionRule,
    RegionView,
    Scalar,
    SemanticLabel,
    Target,
    TensorSpec,
    argument,
    grow,
    is_contiguous,
    ref,
    repeats,
)

from . import kinds
from .contraction import Labelled, Layout, contraction
from .elementwise import composed
from .linear import linear_of
from .parts import offset_of, strides_of

MOST_AUX = 3
FACTORS = {  # names of the factors and of what is added to their product
    "aten.linear.default": ("input", "weight", "bias"), "aten.matmul.default": ("self", "other", ""),
    "aten.mm.default": ("self", "mat2", ""), "aten.bmm.default": ("self", "mat2", ""), "aten.addmm.default": ("mat1", "mat2", "self"),
    "aten.baddbmm.default": ("batch1", "batch2", "self"),
}
EINSUM = "aten.einsum.default"


@frozen(kw_only=True)
class Factor:
    """A factor as a kernel reads it: the value in one piece that it is a view of, where it begins there, and the nodes of the view."""

    value: str
    offset: int
    nodes: tuple[str, ...]


@frozen(kw_only=True)
class Product:
    """A product node with its factors, in the order of its layout, and what is added (empty: nothing)."""

    node: Node
    a: Factor
    b: Factor
    layout: Layout
    added: str = ""


class MatmulRule(RegionRule):
    """``matmul`` matches: every product of two matrices, alone and with the pointwise tail; one row times a weight is ``linear``'s."""

    name = "matmul"
    version = 1
    kinds = (kinds.MATMUL,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Each product alone, then with growing tails."""
        view = RegionView(graph=graph)
        return [match for node in graph.nodes for match in _matches(view, node)]


def product_of(view: RegionView, node: Node) -> Product | None:
    """The product of a node, if a kernel can read its factors where they lie and both are of one type."""
    if len(node.outputs) != 1 or linear_of(view, node) is not None:
        return None
    named = _named(view, node)
    if named is None:
        return None
    given, labels, out = named
    specs = [view.graph.spec(value) for value in (*given, node.outputs[0])]
    if len({spec.dtype for spec in specs}) > 1 or specs[0].dtype not in KERNEL_TYPES or not all(spec.numel for spec in specs):
        return None
    factors = [_factor(view, value, node) for value in given]
    layout = contraction(*(Labelled(labels=each, shape=spec.shape, strides=strides_of(spec))
                           for each, spec in zip(labels, specs, strict=False)), out)
    if layout is None or not is_contiguous(specs[2]) or factors[0] is None or factors[1] is None:
        return None
    a, b = (factors[1], factors[0]) if layout.swapped else (factors[0], factors[1])
    added = (ref(argument(node, FACTORS[node.op][2])) or "") if FACTORS.get(node.op, ("",) * 3)[2] else ""
    if added and not (view.graph.spec(added).dtype in KERNEL_TYPES and repeats(view.graph.spec(added), specs[2])):
        return None
    return Product(node=node, a=a, b=b, layout=layout, added=added)


Named = tuple[tuple[str, str], tuple[Sequence[str], Sequence[str]], Sequence[str]]


def _named(view: RegionView, node: Node) -> Named | None:
    """The two factors of a node, the labels of their axes, and those of the result."""
    if node.op == EINSUM:
        return _einsum(view, argument(node, "equation"), argument(node, "tensors"))
    if node.op not in FACTORS:
        return None
    first, second = (ref(argument(node, name)) for name in FACTORS[node.op][:2])
    if first is None or second is None:
        return None
    ranks = [len(view.graph.spec(value).shape) for value in (first, second)]
    if min(ranks) < 1:
        return None
    batch = [f"batch{axis}" for axis in range(max(ranks) - 1, 0, -1)]
    if node.op == "aten.linear.default":
        rows = batch[len(batch) - ranks[0] + 1:]
        return ((first, second), ([*rows, "k"], ["n", "k"]), [*rows, "n"]) if ranks[1] == 2 else None
    labels = [["k"] if rank == 1 else [*batch[len(batch) - rank + 1:-1], *matrix]
              for rank, matrix in zip(ranks, (("m", "k"), ("k", "n")), strict=True)]
    out = [*batch[:-1], *(name for name, rank in zip("mn", ranks, strict=True) if rank > 1)]
    return (first, second), (labels[0], labels[1]), out


def _einsum(view: RegionView, equation: Argument, tensors: Argument) -> Named | None:
    """Two factors by a written-out equation without dots."""
    values = [ref(tensor) for tensor in tensors] if isinstance(tensors, tuple) else []
    text = equation.replace(" ", "") if isinstance(equation, str) else ""
    given, arrow, out = text.partition("->")
    sides = given.split(",")
    if len(values) != 2 or values[0] is None or values[1] is None or len(sides) != 2 or not arrow or "." in text:
        return None
    if any(len(side) != len(view.graph.spec(value).shape) for side, value in zip(sides, values, strict=True) if value is not None):
        return None
    return (values[0], values[1]), (sides[0], sides[1]), out


def _factor(view: RegionView, value: str, node: Node) -> Factor | None:
    """Back through transpositions, slices and repetitions that only this product reads, to a value that lies in one piece."""
    taken, offset = [], 0
    while not is_contiguous(view.graph.spec(value)):
        behind = view.producer(value)
        own = behind is not None and all(view.only_used_by(out, {node.name, *taken}) for out in behind.outputs)
        step = offset_of(view, behind, value) if behind is not None and own else None
        if behind is None or step is None:
            return None
        offset += step
        taken.append(behind.name)
        value = behind.inputs[0]
    return Factor(value=value, offset=offset, nodes=tuple(taken))


def _matches(view: RegionView, node: Node) -> Iterator[Match]:
    product = product_of(view, node)
    if product is None:
        return
    inside = tuple(dict.fromkeys((*product.a.nodes, *product.b.nodes, node.name)))
    first = _sum(node) if product.added else None
    added = (product.added,) if product.added else ()
    out, spec = node.outputs[0], view.graph.spec(node.outputs[0])
    yield _match(view, product, inside, added, out, first)
    for growth in grow(view, {out: "acc0"}, frozenset(inside), prefix="aux", first=len(added), limit=MOST_AUX - len(added),
                       fits=lambda value: repeats(view.graph.spec(value), spec) or _is_as_large(view.graph.spec(value), spec)):
        whole = composed(first, growth.expression) if first is not None else growth.expression
        yield _match(view, product, (*inside, *growth.nodes), (*added, *growth.external), growth.output, whole)


def _is_as_large(given: TensorSpec, result: TensorSpec) -> bool:
    """Whether each element of a result has its own in an operand, also of another shape: a view of the result is added to that."""
    return is_contiguous(given) and given.numel == result.numel


def _sum(node: Node) -> Expression:
    """beta * aux0 + alpha * acc0, of a linear layer acc0 + aux0; a beta of 0 leaves out what is added, whatever it is."""
    alpha, beta = (_number(node, name) for name in ("alpha", "beta"))
    operations: list[Operation] = []
    terms: list[str | int | float] = []
    for name, factor in (("acc0", alpha), ("aux0", beta)):
        if factor != 1.0:
            operations.append(Operation(PointwiseKind.MUL, (name, factor)))
        if name == "acc0" or factor != 0.0:
            terms.append(name if factor == 1.0 else len(operations) - 1)
    if len(terms) == 2:
        operations.append(Operation(PointwiseKind.ADD, (terms[0], terms[1])))
    elif not operations:
        operations.append(Operation(PointwiseKind.MUL, ("acc0", 1.0)))  # the result of an expression is an operation
    return Expression(arguments=("acc0", "aux0"), operations=tuple(operations))


def _number(node: Node, name: str) -> float:
    found = argument(node, name) if node.op != "aten.linear.default" else 1
    return float(found) if isinstance(found, int | float) else 1.0


def _match(view: RegionView, product: Product, nodes: tuple[str, ...], aux: tuple[str, ...], out: str,
           expression: Expression | None) -> Match:
    layout = product.layout
    steps: list[tuple[str, Scalar]] = [("outer", layout.outer.extent), ("inner", layout.inner.extent), ("m", layout.rows.extent),
                                       ("n", layout.columns.extent), ("k", layout.terms.extent)]
    steps += [("a_offset", product.a.offset), ("a_outer", layout.outer.a), ("a_inner", layout.inner.a), ("a_row", layout.rows.a),
              ("a_column", layout.terms.a)]
    steps += [("b_offset", product.b.offset), ("b_outer", layout.outer.b), ("b_inner", layout.inner.b), ("b_row", layout.terms.b),
              ("b_column", layout.columns.b)]
    operands = [view.read("a", product.a.value), view.read("b", product.b.value)]
    operands += [view.read(f"aux{i}", value) for i, value in enumerate(aux)]
    return Match(kind=MATMUL, label=SemanticLabel.GEMM, nodes=view.deps.members(view.deps.mask(nodes)),
                 operands=(*operands, view.write("out", out)), attributes=tuple(steps), epilogue=expression)



