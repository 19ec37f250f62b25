"""Growing a match over the pointwise nodes behind it, and writing what they compute as an Expression."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from attrs import frozen

from ..ir.expression import Expression, Operation, PointwiseKind
from ..ir.graph import Argument, DType, Node, Ref
from .region_view import KERNEL_TYPES, RegionView, is_contiguous
from .schema import argument

K = PointwiseKind
Operand = str | int | float  # of an Operation: argument name, index of an earlier operation, literal

_BINARY = {"add": K.ADD, "sub": K.SUB, "mul": K.MUL, "multiply": K.MUL, "div": K.DIV, "divide": K.DIV}
_BINARY_OPS = {f"aten.{name}.{overload}": kind for name, kind in _BINARY.items() for overload in ("Tensor", "Scalar")}
_SCALED = ("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar")  # their ``alpha`` multiplies ``other``
_REVERSED = ("aten.rsub.Tensor", "aten.rsub.Scalar")  # other - alpha * self
_ROUNDING = {f"aten.{name}.{overload}" for name in ("div", "divide") for overload in ("Tensor_mode", "Scalar_mode")}
_UNARY = {
    f"aten.{kind.value}.default": kind
    for kind in (K.NEG, K.SILU, K.RELU, K.SIGMOID, K.TANH, K.EXP, K.RSQRT)
}
_GELU = {"none": K.GELU, "tanh": K.GELU_TANH}
_CASTS = (
    "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten._to_copy.default", "aten.type_as.default",
)
MOST_NODES = 8


@frozen(kw_only=True)
class Growth:
    """Pointwise nodes behind a match whose only result is ``output``. ``external`` are the values of aux0, aux1, ..."""

    nodes: tuple[str, ...]
    output: str
    expression: Expression
    external: tuple[str, ...]


Parts = tuple[tuple[PointwiseKind, tuple[Argument, ...]], ...]


def translate(view: RegionView, node: Node) -> Parts | None:
    """The scalar operations of a node over its own arguments; None if it is outside the grammar.

    Only overloads that are listed here by name, and of those only calls whose every argument the operations account for.
    A ``Ref("")`` argument means the result of the operation before it; no operations at all mean the identity.
    """
    if node.op in _CASTS:
        return _cast(view, node)
    if node.op in _UNARY:
        return ((_UNARY[node.op], (argument(node, "self"),)),)
    if node.op == "aten.gelu.default":
        kind = _GELU.get(str(argument(node, "approximate")))
        return ((kind, (argument(node, "self"),)),) if kind is not None else None
    if node.op in ("aten.square.default", "aten.pow.Tensor_Scalar"):
        return _power(argument(node, "self"), 2 if node.op == "aten.square.default" else argument(node, "exponent"))
    return _binary(node)


def _binary(node: Node) -> Parts | None:
    kind = _BINARY_OPS.get(node.op)
    if kind is not None and (node.op not in _SCALED or argument(node, "alpha") == 1):
        return ((kind, (argument(node, "self"), argument(node, "other"))),)
    if node.op in _ROUNDING and argument(node, "rounding_mode") is None:
        return ((K.DIV, (argument(node, "self"), argument(node, "other"))),)
    if node.op in _REVERSED and argument(node, "alpha") == 1:
        return ((K.SUB, (argument(node, "other"), argument(node, "self"))),)
    return None


def _power(base: Argument, exponent: Argument) -> Parts | None:
    if isinstance(exponent, Ref) or exponent not in (2, 3):
        return None
    square = (K.MUL, (base, base))
    return (square,) if exponent == 2 else (square, (K.MUL, (Ref(""), base)))


def _cast(view: RegionView, node: Node) -> Parts | None:
    """A cast to float32 keeps every number, one from float32 rounds; between float16 and bfloat16 the ranges differ."""
    if len(node.outputs) != 1:
        return None
    given, made = (view.graph.spec(name).dtype for name in (node.inputs[0], node.outputs[0]))
    if given is made or made is DType.F32:
        return ()
    return ((K.ROUND, (argument(node, "self"),)),) if given is DType.F32 else None


def has_one_rounding(view: RegionView, nodes: Iterable[str], output: str) -> bool:
    """Whether every cast to a narrower type among ``nodes`` is to the type of ``output``: an Expression rounds to one type."""
    casts = [node for node in map(view.graph.node_by_name.__getitem__, nodes) if node.op in _CASTS]
    targets = {view.graph.spec(node.outputs[0]).dtype for node in casts if _cast(view, node)}
    return targets <= {view.graph.spec(output).dtype}


def is_pointwise(view: RegionView, node: Node) -> bool:
    """Whether a node computes a float tensor element by element within the grammar."""
    if len(node.outputs) != 1 or not node.inputs or node.mutates:
        return False
    operations = translate(view, node)
    if operations is None or not all(_is_scalar(given) for _, arguments in operations for given in arguments):
        return False
    specs = [view.graph.spec(value) for value in (*node.inputs, *node.outputs)]
    return all(spec.dtype in KERNEL_TYPES and is_contiguous(spec) for spec in specs)


def _is_scalar(given: Argument) -> bool:
    return isinstance(given, Ref) or (isinstance(given, int | float) and not isinstance(given, bool))


class _Builder:
    """Collects operations. Values map to an argument name or to the index of an operation."""

    def __init__(self, view: RegionView, seeds: Mapping[str, str]) -> None:
        self.view = view
        self.operands: dict[str, Operand] = dict(seeds)
        self.arguments = list(dict.fromkeys(seeds.values()))
        self.operations: list[Operation] = []

    def add_argument(self, value: str, name: str) -> None:
        self.operands[value] = name
        self.arguments.append(name)

    def alias(self, source: str, result: str) -> None:
        self.operands[result] = self.operands[source]

    def add(self, node: Node) -> None:
        parts = translate(self.view, node) or ()
        if not parts:
            self.alias(node.inputs[0], node.outputs[0])
            return
        for kind, arguments in parts:
            self.operations.append(Operation(kind, tuple(self._operand(a) for a in arguments)))
        self.operands[node.outputs[0]] = len(self.operations) - 1

    def _operand(self, given: Argument) -> Operand:
        if isinstance(given, Ref):
            return self.operands[given.value] if given.value else len(self.operations) - 1
        assert isinstance(given, int | float)
        return float(given)  # an int would be the index of an operation

    def expression(self) -> Expression:
        return Expression(arguments=tuple(self.arguments), operations=tuple(self.operations))


def express(view: RegionView, node: Node, names: Mapping[str, str]) -> Expression:
    """What one pointwise node computes over its inputs, which are called ``names``."""
    return expressed(view, (node,), names)


def expressed(view: RegionView, nodes: Iterable[Node], names: Mapping[str, str]) -> Expression:
    """What pointwise nodes and free views, in graph order and with one result, compute over their inputs, called ``names``."""
    builder = _Builder(view, names)
    for node in nodes:
        if view.is_free(node):
            builder.alias(node.inputs[0], node.outputs[0])
        else:
            builder.add(node)
    return builder.expression()


def grow(view: RegionView, seeds: Mapping[str, str], inside: frozenset[str], *, prefix: str, limit: int,
         fits: Callable[[str], bool], first: int = 0) -> Iterator[Growth]:
    """Every way to extend a match over the pointwise nodes behind it, shortest first.

    ``seeds`` maps the values the match starts from to argument names (``acc0``). Nodes are taken in graph order; other
    values they read become ``<prefix><first>`` and so on, at most ``limit`` of them, if ``fits`` accepts them and they do not depend on the
    match itself. A growth is yielded wherever exactly one value of it is read outside.
    """
    deps = view.deps
    start = deps.mask(inside)
    after = deps.descendants_of(start)
    builder = _Builder(view, seeds)
    numel = view.graph.spec(next(iter(seeds))).numel
    taken: list[str] = []
    external: list[str] = []
    for node in view.graph.nodes:
        if not after & deps.mask([node.name]) or node.name in inside or not set(node.inputs) & builder.operands.keys():
            continue
        if len(taken) >= MOST_NODES:
            return
        if view.is_free(node):
            builder.alias(node.inputs[0], node.outputs[0])
            taken.append(node.name)
            continue
        new = _new_externals(view, node, builder.operands, after, fits)
        if new is None or len(external) + len(new) > limit or view.graph.spec(node.outputs[0]).numel != numel:
            continue
        for value in new:
            builder.add_argument(value, f"{prefix}{first + len(external)}")
            external.append(value)
        builder.add(node)
        taken.append(node.name)
        used = _used(view, seeds, taken, node)
        if used is not None and has_one_rounding(view, used, node.outputs[0]):
            yield Growth(nodes=used, output=node.outputs[0], expression=builder.expression(), external=tuple(external))


def _new_externals(view: RegionView, node: Node, known: Mapping[str, Operand], after: int,
                   fits: Callable[[str], bool]) -> list[str] | None:
    """Values from outside that ``node`` brings in; None if it cannot be taken."""
    if not is_pointwise(view, node):
        return None
    new = [value for value in node.inputs if value not in known]
    for value in new:
        producer = view.producer(value)
        depends = producer is not None and after & view.deps.mask([producer.name])
        if depends or not fits(value):
            return None
    return new


def _used(view: RegionView, seeds: Mapping[str, str], taken: list[str], last: Node) -> tuple[str, ...] | None:
    """The nodes of the growth that end in ``last``, without views nothing in it needs; None if another value is read outside."""
    output = last.outputs[0]
    nodes = [view.graph.node_by_name[name] for name in taken]
    needed = {last.name}
    wanted = set(last.inputs)
    for node in reversed(nodes[:-1]):
        if set(node.outputs) & wanted:
            needed.add(node.name)
            wanted |= set(node.inputs)
    # A node the result does not need would compute a second result, or be a view that belongs to somebody else.
    if any(not view.is_free(node) for node in nodes if node.name not in needed):
        return None
    made = [out for node in nodes if node.name in needed for out in node.outputs if out != output]
    if not all(seed in wanted for seed in seeds):
        return None
    if all(view.only_used_by(value, needed | {last.name}) for value in (*seeds, *made)):
        return tuple(name for name in taken if name in needed)
    return None
