"""Growing a match over the pointwise nodes behind it, and writing what they compute as an Expression."""

from collections.abc import Callable, Iterator, Mapping

from attrs import frozen

from ..expression import Expression, Operation, PointwiseKind
from ..graph import Argument, Node, Ref
from .view import KERNEL_TYPES, RegionView, argument, is_contiguous

K = PointwiseKind
Operand = str | int | float  # of an Operation: argument name, index of an earlier operation, literal

_BINARY = {"add": K.ADD, "sub": K.SUB, "mul": K.MUL, "div": K.DIV}
_UNARY = {
    "neg": K.NEG, "silu": K.SILU, "gelu_tanh": K.GELU_TANH, "relu": K.RELU, "sigmoid": K.SIGMOID, "tanh": K.TANH,
    "exp": K.EXP, "rsqrt": K.RSQRT,
}
_SCALED = ("add", "sub")  # operators with an ``alpha`` that multiplies their second operand
MOST_NODES = 8


@frozen(kw_only=True)
class Growth:
    """Pointwise nodes behind a match whose only result is ``output``. ``external`` are the values of aux0, aux1, ..."""

    nodes: tuple[str, ...]
    output: str
    expression: Expression
    external: tuple[str, ...]


def translate(view: RegionView, node: Node) -> tuple[tuple[PointwiseKind, tuple[Argument, ...]], ...] | None:
    """The scalar operations of a node over its own arguments; None if it is outside the grammar.

    A ``Ref("")`` argument means the result of the operation before it; no operations at all mean the identity.
    """
    first = argument(node, 0, "self")
    before = Ref("")
    if node.kind in _BINARY:
        second = argument(node, 1, "other")
        scale = node.kwarg("alpha", 1)
        if node.kwarg("rounding_mode") is not None or (node.kind in _SCALED and scale != 1):
            return None
        return ((_BINARY[node.kind], (first, second)),)
    if node.kind == "gelu":
        tanh = argument(node, 1, "approximate", "none") == "tanh"
        return ((K.GELU_TANH if tanh else K.GELU, (first,)),)
    if node.kind == "square":
        return ((K.MUL, (first, first)),)
    if node.kind == "pow" and argument(node, 1, "exponent") in (2, 3):
        square = (K.MUL, (first, first))
        return (square,) if argument(node, 1, "exponent") == 2 else (square, (K.MUL, (before, first)))
    if node.kind == "rsub" and node.kwarg("alpha", 1) == 1:
        return ((K.SUB, (argument(node, 1, "other"), first)),)
    if node.kind in _UNARY:
        return ((_UNARY[node.kind], (first,)),)
    if node.kind == "cast":
        narrower = view.graph.spec(node.outputs[0]).dtype.bytes < view.graph.spec(node.inputs[0]).dtype.bytes
        return ((K.ROUND, (first,)),) if narrower else ()
    return None


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
    builder = _Builder(view, names)
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
        if used is not None:
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
