"""The tools of Graph -> Graph passes: look through an argument, replace a group of nodes, drop what nothing uses."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from attrs import evolve

from ...ir.graph import Argument, Graph, Node, Ref, map_refs
from ...ops.aliasing import memory_roots
from ...ops.operator_names import SPLITS
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical


class View:
    """Read access to a graph for pattern matching; every question answers None instead of raising."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def node(self, argument: Argument, op: str | None = None) -> Node | None:
        """The node that makes the value ``argument`` refers to, if it has one result and, where given, is an ``op``."""
        if not isinstance(argument, Ref):
            return None
        found = self.graph.producer.get(argument.value)
        if found is None or len(found.outputs) != 1 or (op is not None and found.op != op):
            return None
        return found

    def dim(self, node: Node) -> int:
        """The axis that ``dim`` of ``node`` names, counted from the front of its first operand."""
        rank = len(self.shape(node.args[0]))
        axis = argument_of(node, "dim")
        return axis % rank if isinstance(axis, int) and rank else -1

    def joined(self, node: Node | None) -> tuple[Argument, Argument] | None:
        """The two values that ``node`` concatenates along their last axis."""
        if node is None or node.op != "aten.cat.default" or not isinstance(node.args[0], tuple) or len(node.args[0]) != 2:
            return None
        rank = len(self.graph.spec(node.outputs[0]).shape)
        axis = argument_of(node, "dim")
        if not isinstance(axis, int) or axis % rank != rank - 1:
            return None
        return node.args[0][0], node.args[0][1]

    def stacked(self, node: Node | None) -> tuple[Argument, Argument] | None:
        """The two values whose elements ``node`` (a flatten or reshape of a stack along a new last axis) puts behind each other."""
        inner = self.node(node.args[0], "aten.stack.default") if node is not None and node.kind in ("view", "copy") and node.args else None
        if inner is None or node is None or not isinstance(inner.args[0], tuple) or len(inner.args[0]) != 2:
            return None
        first, rank = inner.args[0][0], len(self.graph.spec(inner.outputs[0]).shape)
        axis, shape = argument_of(inner, "dim"), self.shape(first)
        whole = self.graph.spec(node.outputs[0]).shape == (*shape[:-1], 2 * shape[-1])
        return (first, inner.args[0][1]) if isinstance(axis, int) and axis % rank == rank - 1 and whole else None

    def every_second(self, argument: Argument) -> tuple[Argument, int] | None:
        """(source, 0 or 1) where ``argument`` is every second element of the last axis of ``source``, from there on."""
        node = self.node(argument, "aten.slice.Tensor")
        if node is None or argument_of(node, "step") != 2 or self.dim(node) != len(self.shape(node.args[0])) - 1:
            return None
        first, end = argument_of(node, "start") or 0, argument_of(node, "end")
        width = self.shape(node.args[0])[-1]
        whole = end is None or (isinstance(end, int) and end >= width)
        return (node.args[0], first) if isinstance(first, int) and first in (0, 1) and whole else None

    def shape(self, argument: Argument) -> tuple[int, ...]:
        """Shape of the value ``argument`` refers to."""
        return self.graph.spec(argument.value).shape if isinstance(argument, Ref) else ()

    def dtype(self, argument: Argument) -> str:
        """Element type of the value ``argument`` refers to."""
        return self.graph.spec(argument.value).dtype.value if isinstance(argument, Ref) else ""

    def through_cast(self, argument: Argument) -> tuple[Argument, Node | None]:
        """``argument`` seen through one ``to`` or ``_to_copy``, and that node."""
        node = self.node(argument)
        return (node.args[0], node) if node is not None and node.kind == "cast" else (argument, None)

    def slice_of(self, argument: Argument) -> tuple[Argument, int, int] | None:
        """(source, first, end) where ``argument`` is a slice of the last axis of ``source``."""
        if not isinstance(argument, Ref):
            return None
        node = self.graph.producer.get(argument.value)
        if node is None or not isinstance(node.args[0], Ref):
            return None
        shape = self.shape(node.args[0])
        if node.op == "aten.slice.Tensor" and self.dim(node) == len(shape) - 1 and argument_of(node, "step") == 1:
            first, end = argument_of(node, "start"), argument_of(node, "end")
            first, end = 0 if first is None else first, shape[-1] if end is None else end
            if not isinstance(first, int) or not isinstance(end, int):
                return None
            return node.args[0], first % shape[-1] if first < 0 else first, min(end, shape[-1]) if end >= 0 else end + shape[-1]
        if node.op in SPLITS and self.dim(node) == len(shape) - 1:
            return self._part_of(node, argument.value)
        return None

    def _part_of(self, node: Node, name: str) -> tuple[Argument, int, int]:
        """The range of the last axis that one result of a split or chunk covers."""
        first = 0
        for out in node.outputs:
            width = self.graph.spec(out).shape[-1]
            if out == name:
                break
            first += width
        return node.args[0], first, first + width

    def private(self, interior: Sequence[Node], last: Node) -> bool:
        """Whether nothing but ``interior`` and ``last`` reads what ``interior`` makes, and all of them may run where ``last`` stands."""
        if self.crosses_a_write(interior, last):
            return False
        allowed = {*(node.name for node in interior), last.name}
        for node in interior:
            for out in node.outputs:
                if out in self.graph.outputs or any(user.name not in allowed for user in self.graph.users.get(out, ())):
                    return False
        return True

    def crosses_a_write(self, nodes: Sequence[Node], last: Node) -> bool:
        """Whether memory that one of ``nodes`` reads or makes is written in place between the first of them and ``last``."""
        if not self._writes or not nodes:
            return False
        first, end = min(self.places[node.name] for node in nodes), self.places[last.name]
        ours = {node.name for node in (*nodes, last)}
        written = {root for name, (place, roots) in self._writes.items() if first < place < end and name not in ours for root in roots}
        roots = memory_roots(self.graph) if written else {}
        return bool(written) and any(roots[name] in written for node in nodes for name in (*node.inputs, *node.outputs))

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each node stands, by name."""
        return {node.name: place for place, node in enumerate(self.graph.nodes)}

    @cached_property
    def _writes(self) -> dict[str, tuple[int, set[str]]]:
        """Where nodes that write in place stand, and what they write, by name."""
        writers = [node for node in self.graph.nodes if node.mutates]
        roots = memory_roots(self.graph) if writers else {}
        return {node.name: (self.places[node.name], {roots[name] for name in node.mutates}) for node in writers}


def rebuild(graph: Graph, nodes: Iterable[Node], renamed: Mapping[str, str] | None = None) -> Graph:
    """``graph`` with these nodes instead of its own, value names replaced, and unused values gone."""
    renamed = renamed or {}
    if renamed:
        nodes = [_renamed(node, renamed) for node in nodes]
    nodes = tuple(nodes)
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    used = {*outputs, *graph.inputs}
    for node in nodes:
        used.update(node.inputs, node.outputs, node.mutates)
    return evolve(graph, nodes=nodes, outputs=outputs, values=tuple(v for v in graph.values if v.name in used))


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    if not any(name in names for name in (*node.inputs, *node.mutates)):
        return node
    return evolve(
        node, args=tuple(map_refs(a, names) for a in node.args),
        kwargs=tuple((key, map_refs(a, names)) for key, a in node.kwargs),
        mutates=tuple(names.get(name, name) for name in node.mutates),
    )


def lasting(graph: Graph, copies: Mapping[str, str]) -> dict[str, str]:
    """Those of ``copies`` (of each, what it is made of) that go on to equal that: nothing reads the memory of either behind a write to it.

    A state that a step writes counts as much as anything else: what was copied of it is what it held before.
    """
    shared = {**memory_roots(graph)}

    def root_of(name: str) -> str:
        while shared[name] != name:
            name = shared[name]
        return name

    for copy, source in copies.items():  # where one of them is written, all would be
        shared[root_of(copy)] = root_of(source)
    written: set[str] = set()
    changed: set[str] = set()
    for node in graph.nodes:
        changed |= {root_of(name) for name in node.inputs} & written
        written |= {root_of(name) for name in node.mutates}
        changed |= {root_of(name) for name in node.inputs if name not in node.mutates} & written  # it may read what it has just written
    changed |= {root_of(name) for name in graph.outputs} & written
    return {copy: source for copy, source in copies.items() if root_of(copy) not in changed}


def resolve_chain(renamed: dict[str, str]) -> dict[str, str]:
    """Follow renamings of renamed names, so that one replacement is enough."""
    def last(name: str) -> str:
        while name in renamed:
            name = renamed[name]
        return name

    return {name: last(name) for name in renamed}


def fuse(graph: Graph, found: Mapping[str, Node]) -> Graph:
    """Replace each node named in ``found`` by the node given, then drop what nothing reads any more."""
    return eliminate_dead_code(rebuild(graph, [found.get(node.name, node) for node in graph.nodes]))


def eliminate_dead_code(graph: Graph) -> Graph:
    """Drop nodes whose results nothing reads and that write nothing.

    Before: ``u = unsqueeze(cos, 1)`` read by nobody. After: gone.
    """
    live = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.mutates or any(out in live for out in node.outputs):
            live.update(node.inputs)
            kept.append(node)
    return rebuild(graph, reversed(kept))


def call(anchor: Node, kind: str, args: tuple[Argument, ...], suffix: object) -> Node:
    """A call of ``agentcompile.<kind>`` that takes the place and the result name of ``anchor``."""
    return canonical(Node(
        name=f"{kind}.{suffix}", op=f"agentcompile.{kind}.default", kind=kind, args=args, outputs=anchor.outputs,
        module=anchor.module, layer=anchor.layer,
    ))


def beside(anchor: Node, name: str, op: str, kind: str, args: tuple[Argument, ...], outputs: tuple[str, ...] = ()) -> Node:
    """A node of the layer of ``anchor``, whose result (none given) is called as it is."""
    return canonical(Node(name=name, op=op, kind=kind, args=args, outputs=outputs or (name,), module=anchor.module, layer=anchor.layer))


def both_orders(node: Node, op: str) -> tuple[tuple[Argument, Argument], ...]:
    """The two operands of a call of ``op`` that has no other arguments, in either order."""
    if node.op != op or len(node.args) != 2 or node.kwargs:
        return ()
    return (node.args[0], node.args[1]), (node.args[1], node.args[0])
