"""Of a decode step's graph the graph of several rows: one token each of as many sequences, with weights read once for all of them.

A node that computes each token by itself is one node for all rows, with the rows along one axis. Every other node is copied, once
per row, with the shapes that it has (attention, which has a cache per row). So nothing is assumed of a model: what no rule of
``row_axes`` knows costs speed, and computes what it computed.
"""

from collections.abc import Collection
from math import prod

from attrs import define, evolve, field, frozen

from ..ir.graph import OFFSET, Argument, DType, Graph, Node, Ref, TensorSpec, Value, ValueKind, map_refs
from .operator_names import ADVANCE, ADVANCE_ROWS, ARGMAX, ATTENTION
from .row_axes import Rows, Together, together
from .schema import argument, canonical, shared_arguments

IDS, POSITION, HISTORY, LIVE, OFFSETS = "rows.ids", "rows.position", "rows.history", "rows.live", "rows.offset"
_VIEWS = ("aten.view.default", "aten._unsafe_view.default")
_OF_SESSION = {"session.ids": (IDS, 1), "session.position": (POSITION, 0), OFFSET: (OFFSETS, 0)}


class NoRows(Exception):
    """Why there is no such graph, in one clause."""


def cache_of(row: int, source: str) -> str:
    """The source of one row's K or V: of ``kv.key.0``."""
    return f"row{row}.{source}"


@frozen(kw_only=True)
class RowsGraph:
    """``graph`` returns logits [1, B, V] and tokens [B]. ``names[row]``: what a node or value that is copied is called for a row."""

    graph: Graph
    names: tuple[dict[str, str], ...]


def rows_graph(graph: Graph, rows: int, apart: Collection[str] = ()) -> RowsGraph:
    """The graph of ``rows`` tokens, each of its own sequence, from the decode step of one. Nodes ``apart`` are copied in any case.

    Its states: ``rows.ids`` [1, B], ``rows.position`` [B], ``rows.history`` [B, capacity + 1], ``rows.live`` [B], all i64: a row
    moves on by ``live``, 1 or 0; ``rows.offset`` [B] where the step has one; and the caches, by ``cache_of``.

    Raises:
        NoRows: the step keeps states of fixed size, writes in place what is no cache, or returns something else.
    """
    if graph.kept:
        raise NoRows("it keeps states of fixed size")
    return _Maker(graph, rows, frozenset(apart)).made()


@define
class _Maker:
    graph: Graph
    rows: int
    apart: frozenset[str]
    nodes: list[Node] = field(factory=list)
    values: list[Value] = field(factory=list)
    shared: set[str] = field(factory=set)
    axes: dict[str, int] = field(factory=dict)  # of values whose rows lie along one axis, the axis
    copies: dict[str, tuple[str, ...]] = field(factory=dict)  # of values that there are once per row, their names
    scattered: set[str] = field(factory=set)  # of these the names whose elements may lie apart where those of a single row do not

    def made(self) -> RowsGraph:
        for value in self.graph.values:
            if value.kind is not ValueKind.INTERMEDIATE:
                self._give(value)
        self.values.append(Value(name=LIVE, spec=TensorSpec(shape=(self.rows,), dtype=DType.I64), kind=ValueKind.STATE, source=LIVE))
        for node in self.graph.nodes:
            self._add(node)
        if len(self.graph.outputs) != 2 or self.axes.get(self.graph.outputs[0]) != 1 or self.axes.get(self.graph.outputs[1]) != 0:
            raise NoRows("its logits and tokens are not one per row")
        graph = Graph(name=f"rows_{self.rows}", kind=self.graph.kind, tokens=self.rows, values=tuple(self.values), nodes=tuple(self.nodes),
                      inputs=(), outputs=self.graph.outputs)
        return RowsGraph(graph=graph.verify(), names=tuple(self._names(row) for row in range(self.rows)))

    def _names(self, row: int) -> dict[str, str]:
        return {name: copies[row] for name, copies in self.copies.items()}

    def _give(self, value: Value) -> None:
        if value.kind in (ValueKind.WEIGHT, ValueKind.CONSTANT):
            self.values.append(value)
            self.shared.add(value.name)
        elif value.source in _OF_SESSION:
            source, axis = _OF_SESSION[value.source]
            self._define(value.name, value.spec, axis, kind=ValueKind.STATE, source=source)
        elif value.source == "session.history":
            spec = evolve(value.spec, shape=(self.rows, *value.spec.shape))
            self.values.append(evolve(value, spec=spec, source=HISTORY))
        elif value.source.startswith("kv."):
            self.copies[value.name] = tuple(f"{value.name}.row{row}" for row in range(self.rows))
            self.values += [evolve(value, name=name, source=cache_of(row, value.source))
                            for row, name in enumerate(self.copies[value.name])]
        else:
            raise NoRows(f"it is given {value.source or value.name}")

    def _define(self, name: str, spec: TensorSpec, axis: int, kind: ValueKind = ValueKind.INTERMEDIATE, source: str = "") -> None:
        shape = (*spec.shape[:axis], self.rows, *spec.shape[axis + 1 :])
        self.values.append(Value(name=name, spec=TensorSpec(shape=shape, dtype=spec.dtype), kind=kind, source=source))
        self.axes[name] = axis

    def _add(self, node: Node) -> None:
        if node.op == ADVANCE:
            self._advance(node)
        elif any(name not in self.copies for name in node.mutates) or (node.mutates and node.op != ATTENTION):
            raise NoRows(f"it writes {node.mutates[0]} in place")
        elif node.op == ARGMAX:
            self._argmax(node)
        elif all(name in self.shared for name in node.inputs):
            self.nodes.append(node)
            self.values += [self.graph.by_name[name] for name in node.outputs]
            self.shared.update(node.outputs)
        elif not (node.name not in self.apart and not node.mutates and self._together(node)):
            self._copied(node)

    def _together(self, node: Node) -> bool:
        """Add the node for all rows at once; False where no rule says how."""
        wanted = {name: self._axis_of(name) for name in node.inputs if name not in self.shared}
        if any(axis is None for axis in wanted.values()):
            return False
        found: Together | None = together(self.graph, node, {name: axis for name, axis in wanted.items() if axis is not None},
                                           Rows(now=1, wanted=self.rows))
        if found is None:
            return False
        names = {name: self._joined(name) for name in wanted}
        self.nodes.append(canonical(evolve(found.node, args=_renamed(found.node.args, names),
                                           kwargs=tuple((key, map_refs(one, names)) for key, one in found.node.kwargs))))
        for name, axis in zip(node.outputs, found.axes, strict=True):
            self._define(name, self.graph.spec(name), axis)
        return True

    def _copied(self, node: Node) -> None:
        """Add the node once per row."""
        if any(name in self.graph.outputs for name in node.outputs):
            raise NoRows(f"{node.op} makes a result of it")
        each = {name: self._apart_of(name) for name in (*node.inputs, *node.mutates) if name not in self.shared}
        self.copies[node.name] = tuple(f"{node.name}.row{row}" for row in range(self.rows))
        for name in node.outputs:
            self.copies[name] = tuple(f"{name}.row{row}" for row in range(self.rows))
        for row in range(self.rows):
            names = {name: found[row] for name, found in each.items()}
            outputs = tuple(self.copies[name][row] for name in node.outputs)
            copied = evolve(node, name=self.copies[node.name][row], args=_renamed(node.args, names), outputs=outputs,
                            kwargs=tuple((key, map_refs(one, names)) for key, one in node.kwargs),
                            mutates=tuple(names[name] for name in node.mutates))
            self.nodes.append(self._readable(copied))
            self.values += [evolve(self.graph.by_name[name], name=made) for name, made in zip(node.outputs, outputs, strict=True)]

    def _readable(self, node: Node) -> Node:
        """A copied node as it must be where what it reads lies apart: no view then gives its elements another shape in place."""
        if not any(isinstance(one, Ref) and one.value in self.scattered for one in shared_arguments(node)):
            return node
        self.scattered.update(node.outputs)
        return canonical(evolve(node, op="aten.reshape.default")) if node.op in _VIEWS else node

    def _axis_of(self, name: str) -> int | None:
        """The axis along which the rows of a value lie, or may be joined: one of extent 1."""
        if name in self.axes:
            return self.axes[name]
        shape = self.graph.spec(name).shape
        return next((axis for axis in (1, 0, 2) if axis < len(shape) - (len(shape) > 1) and shape[axis] == 1), None)

    def _joined(self, name: str) -> str:
        if name not in self.axes:
            axis = self._axis_of(name)
            assert axis is not None
            self.nodes.append(canonical(Node(name=f"{name}.joined", op="aten.cat.default", kind="cat", outputs=(name,),
                                             args=(tuple(map(Ref, self.copies[name])), axis))))
            self._define(name, self.graph.spec(name), axis)
        return name

    def _apart_of(self, name: str) -> tuple[str, ...]:
        """Names of the rows of a value."""
        if name not in self.copies:
            self.copies[name] = tuple(f"{name}.row{row}" for row in range(self.rows))
            for row, made in enumerate(self.copies[name]):
                self.nodes.append(canonical(Node(name=f"{made}.taken", op="aten.slice.Tensor", kind="slice", outputs=(made,),
                                                 args=(Ref(name), self.axes[name], row, row + 1))))
                self.values.append(Value(name=made, spec=self.graph.spec(name)))
            if prod(self.graph.spec(name).shape[: self.axes[name]]) != 1:
                self.scattered.update(self.copies[name])
        return self.copies[name]

    def _argmax(self, node: Node) -> None:
        (logits,), (token,) = node.inputs, node.outputs
        spec = self.graph.spec(logits)
        if self._axis_of(logits) != 1 or len(spec.shape) != 3 or spec.shape[0] != 1:
            raise NoRows("its logits are not one row of a vocabulary")
        best, token_spec = f"{token}.best", self.graph.spec(token)
        self.nodes += [
            canonical(evolve(node, name=best, op="aten.argmax.default", args=(Ref(self._joined(logits)), -1), outputs=(best,))),
            canonical(evolve(node, op="aten.view.default", kind="view", args=(Ref(best), (self.rows,)))),
        ]
        self.values.append(Value(name=best, spec=TensorSpec(shape=(1, self.rows), dtype=token_spec.dtype)))
        self._define(token, token_spec, 0)

    def _advance(self, node: Node) -> None:
        given: list[Argument] = [argument(node, name) for name in ("token", "ids", "position", "history")]
        named = [one.value for one in given if isinstance(one, Ref)]
        sources = [self.graph.by_name[name].source for name in named[1:]]
        if sources != ["session.ids", "session.position", "session.history"]:
            raise NoRows("it counts tokens in a way of its own")
        self._joined(named[0])
        self.nodes.append(canonical(evolve(node, op=ADVANCE_ROWS, kind="advance_rows", args=(*given, Ref(LIVE)), kwargs=(),
                                           mutates=tuple(named[1:]))))


def _renamed(args: tuple[Argument, ...], names: dict[str, str]) -> tuple[Argument, ...]:
    return tuple(map_refs(one, names) for one in args)

