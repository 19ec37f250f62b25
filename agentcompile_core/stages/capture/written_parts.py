"""Writes to a part of a tensor become a new tensor of its parts, which rules can read: streams of which all but one are added to."""

from attrs import evolve, frozen

from ...ir.graph import Argument, Graph, Node, Ref, TensorSpec, Value, ValueKind, map_refs
from ...ops.aliasing import memory_roots
from ...ops.operator_names import COPY
from ...ops.region_view import is_contiguous
from ...ops.schema import argument as argument_of
from .functional import pure_twin
from .laid_out import made_by
from .rewrite import beside, rebuild


@frozen
class _Part:
    """Elements ``first`` to ``end`` of ``whole`` along ``axis``."""

    whole: str
    axis: int
    first: int
    end: int


def join_written(graph: Graph) -> Graph:
    """``graph`` in which what is written to a slice of a tensor is a part of a new tensor, where nobody else sees that memory.

    Before: ``a = slice(x, 0, 1); b = add_(a, y); copy_(slice(x, 0, 1), b)``, as ``x[1:] += y`` is traced, and x is read later.
    After: ``b = add(a, y); z = cat([slice(x, 0, 0, 1), b])``, and z is read.
    """
    if not any(node.mutates for node in graph.nodes):
        return graph
    return _Joining(graph).run()


class _Joining:
    """One walk over a graph: names of later versions instead of those that were written."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.roots = memory_roots(graph)
        self.groups: dict[str, list[str]] = {}
        for name, root in self.roots.items():
            self.groups.setdefault(root, []).append(name)
        self.made = {out: place for place, node in enumerate(graph.nodes) for out in node.outputs}
        self.read = {name: place for place, node in enumerate(graph.nodes) for name in (*node.inputs, *node.mutates)}
        self.read |= dict.fromkeys(graph.outputs, len(graph.nodes))
        self.now: dict[str, str] = {}  # of a name, the value that holds what it shows by now
        self.last: dict[str, tuple[_Part, str]] = {}  # of a root, what was written to it last, and the result of that
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.specs: dict[str, TensorSpec] = {}  # of results that lie otherwise now

    def run(self) -> Graph:
        """The graph without the writes that could be taken out."""
        for place, node in enumerate(self.graph.nodes):
            part = self._part(node)
            if part is None or not self._joined(place, node, part):
                self.nodes.append(self._renamed(node))
        if not self.now:
            return self.graph
        outputs = tuple(self.now.get(name, name) for name in self.graph.outputs)
        values = [evolve(value, spec=self.specs.get(value.name, value.spec)) for value in self.graph.values]
        return rebuild(evolve(self.graph, values=(*values, *self.values), outputs=outputs), self.nodes)

    def _renamed(self, node: Node) -> Node:
        return evolve(node, args=tuple(map_refs(one, self.now) for one in node.args),
                      kwargs=tuple((key, map_refs(one, self.now)) for key, one in node.kwargs),
                      mutates=tuple(self.now.get(name, name) for name in node.mutates))

    def _part(self, node: Node) -> _Part | None:
        """What a node writes, and nothing else, where that is a slice in a contiguous tensor of the graph's own."""
        if len(node.mutates) != 1 or len(node.outputs) != 1 or not node.args or node.args[0] != Ref(node.mutates[0]):
            return None
        cut = self.graph.producer.get(node.mutates[0])
        if cut is None or cut.op != "aten.slice.Tensor" or argument_of(cut, "step") != 1 or not isinstance(cut.args[0], Ref):
            return None
        whole = cut.args[0].value
        spec, bounds = self.graph.spec(whole), (argument_of(cut, "start"), argument_of(cut, "end"))
        axis = argument_of(cut, "dim")
        own = all(self.graph.kind_of(name) is ValueKind.INTERMEDIATE for name in self.groups[self.roots[whole]])
        if not own or not is_contiguous(spec) or not isinstance(axis, int) or whole in self.graph.inputs:
            return None
        extent = spec.shape[axis]
        first, end = (default if given is None else given for given, default in zip(bounds, (0, extent), strict=True))
        if not isinstance(first, int) or not isinstance(end, int):
            return None
        first, end = (min(max(at + extent if at < 0 else at, 0), extent) for at in (first, end))
        return _Part(whole, axis % len(spec.shape), first, end) if first < end else None

    def _joined(self, place: int, node: Node, part: _Part) -> bool:
        """Whether the write of ``node`` was taken out: nothing made before it but the whole and what it writes shows it later."""
        root, target = self.roots[part.whole], node.mutates[0]
        again = self.last.get(root)
        if again is not None and again[0] == part and node.op == COPY and node.args[1] == Ref(again[1]):
            self.now[node.outputs[0]] = self.now.get(again[1], again[1])  # what was written there is written there once more
            return True
        shown = [name for name in self.groups[root]
                 if self.made.get(name, -1) < place < self.read.get(name, -1) and name not in (part.whole, target)]
        if shown or self._shows_later_writes(place, node, root, part):
            return False
        found = pure_twin(self.graph, node)
        if found is None or (found[1] != self.graph.spec(node.outputs[0]) and not self._is_only_joined(node, part)):
            return False
        self.specs[node.outputs[0]] = found[1]
        self.nodes.append(self._renamed(found[0]))
        self._rejoin(node, part)
        self.last[root] = (part, node.outputs[0])
        return True

    def _is_only_joined(self, node: Node, part: _Part) -> bool:
        """Whether nothing reads the result of a write, or what it wrote to, but to write it there once more: it may lie in any way."""
        later = [user for name in (node.mutates[0], node.outputs[0]) for user in self.graph.users.get(name, ()) if user is not node]
        names = {node.mutates[0], *node.outputs, *(name for user in later for name in user.outputs)}
        again = (user.op == COPY and user.args[1] == Ref(node.outputs[0]) and self._part(user) == part for user in later)
        unread = not any(self.graph.users.get(name) for user in later for name in user.outputs)
        return all(again) and unread and names.isdisjoint(self.graph.outputs)

    def _shows_later_writes(self, place: int, node: Node, root: str, part: _Part) -> bool:
        """Whether the result of a write, its target or a view of either is read behind another write than that of the result itself."""
        ours, written = {node.mutates[0], *node.outputs}, False
        for later in self.graph.nodes[place + 1:]:
            again = later.op == COPY and later.args[1] == Ref(node.outputs[0]) and self._part(later) == part
            written |= not again and any(self.roots[name] == root for name in later.mutates)
            if written and not ours.isdisjoint((*later.inputs, *later.mutates)):
                return True
            if not ours.isdisjoint(later.inputs):
                ours.update(name for name in later.outputs if self.roots[name] == root)
        return written and not ours.isdisjoint(self.graph.outputs)

    def _rejoin(self, node: Node, part: _Part) -> None:
        spec, whole = self.graph.spec(part.whole), self.now.get(part.whole, part.whole)
        pieces: list[Argument] = []
        ranges = (("before", 0, part.first), ("", part.first, part.end), ("behind", part.end, spec.shape[part.axis]))
        for which, first, end in ranges:
            if not which:
                pieces.append(Ref(node.outputs[0]))
            elif first < end:
                name = f"{node.name}.{which}"
                piece = beside(node, name, "aten.slice.Tensor", "view", (Ref(whole), part.axis, first, end))
                made = made_by(piece, {whole: spec})
                assert made is not None, "a part of a tensor is a tensor"
                self.nodes.append(piece)
                self.values.append(Value(name=name, spec=made[0]))
                pieces.append(Ref(name))
        name = f"{node.name}.joined"
        self.nodes.append(beside(node, name, "aten.cat.default", "cat", (tuple(pieces), part.axis)))
        self.values.append(Value(name=name, spec=spec))
        self.now[part.whole] = name
        self.now[node.mutates[0]] = node.outputs[0]
