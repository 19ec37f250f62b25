"""Of a prompt chunk only one row is read behind the last call that needs all of them: what computes every row by itself there has one."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product

from attrs import define, evolve, field, frozen

from ...ir.graph import Graph, Node, Ref, TensorSpec, Value, ValueKind, map_refs
from ...ops.aliasing import memory_roots
from ...ops.row_axes import Rows, Together, together
from ...ops.schema import argument
from .importer import spec_of
from .kinds import kind_of
from .laid_out import without_memory
from .one_row_rules import RULES
from .performed import called
from .rewrite import beside, eliminate_dead_code, rebuild

_SELECT, _RESHAPE = "aten.index_select.default", "aten.reshape.default"
MOST_OPERANDS = 4  # that may have rows; a call of more keeps them


@frozen(kw_only=True)
class _Picked:
    """The node that takes one row of ``source``, along ``axis``, at ``index`` i64 [1]."""

    node: Node
    source: str
    axis: int
    index: str


@frozen(kw_only=True)
class _Narrowed:
    """A node of one row, and the axis along which each operand that has rows has them."""

    node: Node
    axes: Mapping[str, int]


def keep_row_read(graph: Graph) -> Graph:
    """A chunk of a prompt goes on with the row whose scores are asked for where nothing else is read any more.

    Before: ``index(norm(x + linear(y, w)), [None, row])`` of T rows x and y, which others read.
    After: ``norm(index_select(x, 1, row) + linear(index_select(y, 1, row), w))``.
    Products of one row may add in another order than those of many.
    """
    picked = next(filter(None, (_picked(graph, node) for node in reversed(graph.nodes))), None)
    if picked is None or graph.tokens == 1:
        return graph
    narrowed = _narrowed(graph, picked)
    idle = all(one.node.kind == "view" for one in narrowed.values())
    if idle or _is_written(graph, narrowed):
        return graph
    return _Maker(graph, picked, narrowed).made()


def _picked(graph: Graph, node: Node) -> _Picked | None:
    """What ``node`` takes, if that is one row of the chunk's."""
    if node.op == _SELECT:
        source, index, axis = argument(node, "self"), argument(node, "index"), argument(node, "dim")
    elif node.op == "aten.index.Tensor" and isinstance(node.args[1], tuple):
        places = [place for place, one in enumerate(node.args[1]) if one is not None]
        source, axis = node.args[0], places[0] if len(places) == 1 else None
        index = node.args[1][places[0]] if places else None
    else:
        return None
    if not isinstance(source, Ref) or not isinstance(index, Ref) or not isinstance(axis, int):
        return None
    if node.op != _SELECT and not _is_last_of(graph, index.value):
        return None  # what is below 0 counts from the end there, and is refused by an index_select
    shape, at = graph.spec(source.value).shape, graph.spec(index.value)
    if at.shape != (1,) or at.dtype.value != "int64" or not shape or shape[axis % len(shape)] != graph.tokens:
        return None
    return _Picked(node=node, source=source.value, axis=axis % len(shape), index=index.value)


def _is_last_of(graph: Graph, index: str) -> bool:
    """Whether a number is one less than how many tokens a chunk is told that it has, which is never 0."""
    maker = graph.producer.get(index)
    if maker is None or maker.op != "aten.sub.Tensor" or maker.kwargs or len(maker.args) != 2 or maker.args[1] != 1:
        return False
    length = maker.args[0]
    return isinstance(length, Ref) and graph.kind_of(length.value) is ValueKind.INPUT


def _narrowed(graph: Graph, picked: _Picked) -> dict[str, _Narrowed]:
    """By name the nodes of whose results nothing but one row is read, and that compute it of one row of their operands."""
    found: dict[str, _Narrowed] = {}
    read: dict[str, set[int]] = defaultdict(set, {picked.source: {picked.axis}})  # along which axes one row of a value is wanted
    whole = set(graph.outputs)  # values of which more is read
    maker, known = graph.producer.get(picked.index), True  # which row it is, once its number has been made
    for node in reversed(graph.nodes):
        known &= node is not maker
        if node is picked.node:
            continue
        one = None if not known or node.mutates or whole.intersection(node.outputs) else _of_one_row(graph, node, read)
        if one is None:
            whole.update(node.inputs)
            continue
        found[node.name] = one
        whole.update(name for name in node.inputs if name not in one.axes)
        for name, axis in one.axes.items():
            read[name].add(axis)
    return found


def _of_one_row(graph: Graph, node: Node, read: Mapping[str, set[int]]) -> _Narrowed | None:
    """``node`` for the row that is wanted of its results; None: nothing says that a row of each operand is enough."""
    wanted = [read.get(name, set()) for name in node.outputs]
    axes = set().union(*wanted)
    if len(axes) != 1 or any(len(one) > 1 for one in wanted):
        return None
    rows = Rows(now=graph.tokens, wanted=1, in_groups=True)
    for operands in _along(graph, node, rows):
        made: Together | None = together(graph, node, operands, rows, RULES)
        if made is not None and set(made.axes) == axes:
            return _Narrowed(node=made.node, axes=operands)
    return None


def _along(graph: Graph, node: Node, rows: Rows) -> Iterator[dict[str, int]]:
    """All ways in which operands may have the rows of a chunk along one of their axes each; most of them first."""
    places = {name: [axis for axis, extent in enumerate(graph.spec(name).shape) if rows.lie_along(extent)] for name in node.inputs
              if graph.kind_of(name) not in (ValueKind.WEIGHT, ValueKind.STATE)}
    names = [name for name, axes in places.items() if axes]
    if len(names) > MOST_OPERANDS:
        return
    ways = [{name: axis for name, axis in zip(names, way, strict=True) if axis is not None}
            for way in product(*([*places[name], None] for name in names))]
    yield from sorted(filter(None, ways), key=len, reverse=True)


def _is_written(graph: Graph, narrowed: Mapping[str, _Narrowed]) -> bool:
    """Whether memory that these nodes read or make is written in place: then it matters when a row is taken."""
    roots = memory_roots(graph)
    written = {roots[name] for node in graph.nodes for name in node.mutates}
    return any(roots[name] in written for one in narrowed for name in (*graph.node_by_name[one].inputs, *graph.node_by_name[one].outputs))


@define
class _Maker:
    graph: Graph
    picked: _Picked
    narrowed: Mapping[str, _Narrowed]
    specs: dict[str, TensorSpec] = field(factory=dict)  # of values of one row
    between: dict[str, TensorSpec] = field(factory=dict)  # of values on the way to such a row
    rows: dict[tuple[str, int], str] = field(factory=dict)  # of each value, and axis, of which one row is taken: what that is called

    def made(self) -> Graph:
        graph, nodes = self.graph, list[Node]()
        for node in graph.nodes:
            one = self.narrowed.get(node.name)
            if one is None:
                nodes.append(node)
                continue
            names = {}
            for name, axis in one.axes.items():
                if name in self.specs:
                    continue  # it is one row already
                if (name, axis) not in self.rows:
                    nodes += self._taken(node, name, axis)
                names[name] = self.rows[name, axis]
            nodes.append(self._renamed(one.node, names))
            self._lay_out(nodes[-1])
        source, picked = self.picked.source, self.picked.node
        if self.specs.get(source) != graph.spec(picked.outputs[0]):
            return graph  # it lies otherwise than its readers were told
        nodes = [node for node in nodes if node.name != picked.name]
        values = [evolve(value, spec=self.specs[value.name]) if value.name in self.specs else value for value in graph.values]
        new = [Value(name=name, spec=self.specs[name]) for name in self.rows.values()]
        new += [Value(name=name, spec=spec) for name, spec in self.between.items()]
        found = rebuild(evolve(graph, values=(*values, *new)), nodes, {picked.outputs[0]: source})
        return eliminate_dead_code(found).verify()

    def _taken(self, reader: Node, name: str, axis: int) -> list[Node]:
        """What takes the row of ``name``: some places in a run where as many are one row."""
        row, spec = f"{name}.row{axis}", self.graph.spec(name)
        self.rows[name, axis] = row
        before, extent, behind = spec.shape[:axis], spec.shape[axis] // self.graph.tokens, spec.shape[axis + 1 :]
        self.specs[row] = TensorSpec(shape=(*before, extent, *behind), dtype=spec.dtype)
        index = Ref(self.picked.index)
        if extent == 1:
            return [beside(reader, row, _SELECT, "index_select", (Ref(name), axis, index))]
        apart, taken = f"{row}.apart", f"{row}.taken"
        self.between[apart] = evolve(spec, shape=(*before, self.graph.tokens, extent, *behind), strides=())
        self.between[taken] = evolve(spec, shape=(*before, 1, extent, *behind), strides=())
        return [beside(reader, apart, _RESHAPE, kind_of(_RESHAPE, spec), (Ref(name), self.between[apart].shape)),
                beside(reader, taken, _SELECT, "index_select", (Ref(apart), axis, index)),
                beside(reader, row, _RESHAPE, "view", (Ref(taken), self.specs[row].shape))]

    def _renamed(self, node: Node, names: Mapping[str, str]) -> Node:
        return evolve(node, args=tuple(map_refs(one, names) for one in node.args),
                      kwargs=tuple((key, map_refs(one, names)) for key, one in node.kwargs))

    def _lay_out(self, node: Node) -> None:
        """Note how the results of a node lie: asked of the operator itself, on tensors without memory."""
        made = called(node, {name: without_memory(self.specs.get(name) or self.graph.spec(name)) for name in node.inputs})
        self.specs.update(zip(node.outputs, map(spec_of, made), strict=True))
