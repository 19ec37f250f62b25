"""Growing a match over the pointwise nodes behind it, and writing what they compute as an Expression."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from attrs import frozen

from ..ir.expression import Expression, Operation
from ..ir.graph import Argument, DType, Node, Ref
from .grammar import COPIES, rounds, translate
from .region_view import KERNEL_TYPES, RegionView, is_contiguous

Operand = str | int | float  # of an Operation: argument name, index of an earlier operation, literal

MOST_NODES = 8
MOST_CONE_NODES = 24


@frozen(kw_only=True)
class Growth:
    """Pointwise nodes behind a match whose only result is ``output``. ``external`` are the values of aux0, aux1, ..."""

    nodes: tuple[str, ...]
    output: str
    expression: Expression
    external: tuple[str, ...]


def has_one_rounding(view: RegionView, nodes: Iterable[str], output: str) -> bool:
    """Whether every cast to a narrower type among ``nodes`` is to the type of ``output``: an Expression rounds to one type."""
    casts = [node for node in map(view.graph.node_by_name.__getitem__, nodes) if rounds(view, node)]
    targets = {view.graph.spec(node.outputs[0]).dtype for node in casts}
    return targets <= {view.graph.spec(output).dtype}


def is_pointwise(view: RegionView, node: Node, apart: Collection[str] = ()) -> bool:
    """Whether a node computes a float tensor element by element within the grammar; operands ``apart`` need not lie in one piece."""
    return _in_grammar(view, node, apart) and all(view.graph.spec(value).dtype in KERNEL_TYPES for value in (*node.inputs, *node.outputs))


def _in_grammar(view: RegionView, node: Node, apart: Collection[str] = ()) -> bool:
    """As ``is_pointwise``, for nodes inside an expression as well: a comparison is 1 or 0 there."""
    if len(node.outputs) != 1 or not node.inputs or node.mutates or node.op in COPIES:
        return False
    operations = translate(view, node)
    if operations is None or not all(_is_scalar(given) for _, arguments in operations for given in arguments):
        return False
    specs = {value: view.graph.spec(value) for value in (*node.inputs, *node.outputs)}
    return all(spec.dtype in (*KERNEL_TYPES, DType.BOOL) and (value in apart or is_contiguous(spec)) for value, spec in specs.items())


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
        first = len(self.operations)
        for kind, arguments in parts:
            self.operations.append(Operation(kind, tuple(self._operand(a, first) for a in arguments)))
        self.operands[node.outputs[0]] = len(self.operations) - 1

    def _operand(self, given: Argument, first: int) -> Operand:
        if isinstance(given, Ref):
            return first + int(given.value[1:]) if given.value.startswith("#") else self.operands[given.value]
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
        new = _new_externals(view, node, builder.operands, after, fits, seeds)
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


def _new_externals(view: RegionView, node: Node, known: Mapping[str, Operand], after: int, fits: Callable[[str], bool],
                   seeds: Collection[str]) -> list[str] | None:
    """Values from outside that ``node`` brings in; None if it cannot be taken. ``seeds``: what the match hands over in its own order."""
    if not is_pointwise(view, node, seeds):
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


def cone(view: RegionView, last: Node, *, limit: int, fits: Callable[[str], bool]) -> Growth | None:
    """The largest expression that ends in ``last``: pointwise nodes before it whose results nothing else reads.

    Unlike ``grow`` it takes in nodes that read one value several times and meet again, and comparisons. Its inputs are called in0, in1, ...
    in the order of the nodes, at most ``limit`` of them, all of which ``fits`` accepts. None where it is ``last`` alone.
    """
    if not _in_grammar(view, last) or view.graph.spec(last.outputs[0]).dtype not in KERNEL_TYPES:
        return None
    wide = _cone_of(view, last, 2 * limit)  # halfway there may be more inputs than at the end, where branches meet again
    if len(wide) < 2:
        return None
    return _grown(view, last, wide, limit, fits) or _grown(view, last, _cone_of(view, last, limit), limit, fits)


def _grown(view: RegionView, last: Node, taken: set[str], limit: int, fits: Callable[[str], bool]) -> Growth | None:
    nodes = [node for node in view.graph.nodes if node.name in taken]
    external = _external(view, taken)
    read = all(view.graph.spec(value).dtype in KERNEL_TYPES and fits(value) for value in external)
    if len(nodes) < 2 or len(external) > limit or not read:
        return None
    names = tuple(node.name for node in nodes)
    if not has_one_rounding(view, names, last.outputs[0]) or not view.deps.is_convex(view.deps.mask(names)):
        return None
    builder = _Builder(view, {value: f"in{i}" for i, value in enumerate(external)})
    for node in nodes:
        builder.alias(node.inputs[0], node.outputs[0]) if view.is_free(node) else builder.add(node)
    return Growth(nodes=names, output=last.outputs[0], expression=builder.expression(), external=external)


def _cone_of(view: RegionView, last: Node, limit: int) -> set[str]:
    """Names of the nodes of ``cone``, taken one by one from the end, with at most ``limit`` inputs at any time."""
    taken = {last.name}
    for node in reversed(view.graph.nodes):
        if len(taken) >= MOST_CONE_NODES:
            break
        if node.name in taken or len(node.outputs) != 1 or not view.only_used_by(node.outputs[0], taken):
            continue
        if not has_one_rounding(view, (node.name,), last.outputs[0]):
            continue  # what it rounds is read as it is stored
        if _in_grammar(view, node) or _is_reshaped(view, node, last):
            taken.add(node.name)
            if len(_external(view, taken)) > limit:
                taken.remove(node.name)
    return taken


def _is_reshaped(view: RegionView, node: Node, last: Node) -> bool:
    """Whether a node only gives a value as large as the result another shape."""
    return view.is_free(node) and view.graph.spec(node.outputs[0]).numel == view.graph.spec(last.outputs[0]).numel


def _external(view: RegionView, taken: set[str]) -> tuple[str, ...]:
    nodes = [node for node in view.graph.nodes if node.name in taken]
    made = {out for node in nodes for out in node.outputs}
    return tuple(dict.fromkeys(value for node in nodes for value in node.inputs if value not in made))
