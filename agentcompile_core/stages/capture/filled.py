"""Tensors that are filled part by part, as rules and checks can read them: new ones become concatenations, states are written once."""

from attrs import evolve

from ...ir.graph import STATE_PREFIX, Graph, Node, Ref, Value, ValueKind
from ...ops.operator_names import COPY
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical
from .rewrite import View, beside, eliminate_dead_code, rebuild

_EMPTY = ("aten.new_empty.default", "aten.empty.memory_format", "aten.empty_like.default")


def join_parts(graph: Graph) -> Graph:
    """``graph`` without tensors whose last axis is filled in parts.

    Before: ``x = new_empty(y, shape); copy_(slice(x, -1, 0, 8), a); copy_(slice(x, -1, 8, 24), b)``, read afterwards only.
    After: ``x = cat([a, b], -1)``.
    """
    view = View(graph)
    dropped: set[str] = set()
    joined: dict[str, Node] = {}
    for node in graph.nodes:
        copies = _copies(view, node) if node.op in _EMPTY else []
        if not copies:
            continue
        dropped |= {node.name, *(write.name for write, _ in copies), *(part.name for _, part in copies)}
        last = max((write for write, _ in copies), key=lambda write: _place(graph, write))
        parts = tuple(write.args[1] for write, _ in copies)
        joined[last.name] = canonical(evolve(node, name=f"{node.name}.joined", op="aten.cat.default", kind="cat",
                                             args=(parts, -1), kwargs=()))
    nodes = [joined.get(node.name, node) for node in graph.nodes if node.name not in dropped or node.name in joined]
    return rebuild(graph, nodes) if joined else graph


def _copies(view: View, empty: Node) -> list[tuple[Node, Node]]:
    """The writes into the parts of ``empty`` and these parts, in order along the last axis; none where they are not all there is."""
    graph, name = view.graph, empty.outputs[0]
    found: list[tuple[int, int, Node, Node]] = []
    readers: list[Node] = []
    for user in graph.users.get(name, ()):
        cut = view.slice_of(Ref(user.outputs[0])) if user.op == "aten.slice.Tensor" else None
        write = _only_write(graph, user) if cut is not None else None
        if cut is None or write is None:
            readers.append(user)
        else:
            found.append((cut[1], cut[2], write, user))
    found.sort(key=lambda part: part[0])
    spec, ends = graph.spec(name), [0, *(end for _, end, _, _ in found)]
    tiled = bool(found) and [first for first, _, _, _ in found] == ends[:-1] and ends[-1] == spec.shape[-1]
    if not tiled or spec.strides or name in graph.outputs:
        return []
    places = [_place(graph, write) for _, _, write, _ in found]
    between = graph.nodes[min(places) : max(places)]
    undisturbed = all(not node.mutates or _place(graph, node) in places for node in between)
    later = all(_place(graph, reader) > max(places) for reader in readers)
    return [(write, part) for _, _, write, part in found] if undisturbed and later else []


def write_once(graph: Graph) -> Graph:
    """``graph`` in which a state that is written part by part is written as a whole (Zamba's heads, one after the other).

    Before: ``a = select(s, 1, 0); copy_(a, x); b = select(s, 1, 1); copy_(b, y)``, each part read before its own write only.
    After: ``copy_(s, stack([x, y], 1))`` in the place of the last one.
    """
    for value in graph.values:
        if value.kind is ValueKind.STATE and value.source.startswith(STATE_PREFIX) and (writes := _part_writes(graph, value)):
            graph = _written_once(graph, value, writes)
    return graph


def _part_writes(graph: Graph, state: Value) -> list[Node]:
    """The writes to the parts of ``state`` along one axis, in their order; none where something else is done with it, or they are one."""
    parts = graph.users.get(state.name, ())
    found: dict[int, Node] = {}
    axes: set[int] = set()
    for part in parts:
        axis, index = (argument_of(part, name) if part.op == "aten.select.int" else None for name in ("dim", "index"))
        if not isinstance(axis, int) or not isinstance(index, int):
            return []
        users = graph.users.get(part.outputs[0], ())
        write = users[-1] if users else part
        into, given = graph.spec(part.outputs[0]), graph.spec(write.inputs[-1])
        same = (into.shape, into.dtype) == (given.shape, given.dtype)
        whole = same and write.op == COPY and isinstance(write.args[1], Ref)
        alone = sum(part.outputs[0] in user.mutates for user in users) == 1 and not any(out in graph.users for out in write.outputs)
        rank = len(state.spec.shape)
        if not whole or not alone or index % state.spec.shape[axis] in found:
            return []
        axes.add(axis % rank)
        found[index % state.spec.shape[axis]] = write
    tiled = len(axes) == 1 and sorted(found) == list(range(state.spec.shape[next(iter(axes))]))
    return [found[index] for index in sorted(found)] if tiled and len(found) > 1 else []


def _written_once(graph: Graph, state: Value, writes: list[Node]) -> Graph:
    last = max(writes, key=lambda write: _place(graph, write))
    axis = argument_of(graph.producer[writes[0].inputs[0]], "dim")
    stack = f"{last.name}.stacked"
    joined = beside(last, stack, "aten.stack.default", "cat", (tuple(write.args[1] for write in writes), axis))
    write = evolve(last, args=(Ref(state.name), Ref(stack), *last.args[2:]), mutates=(state.name,))
    dropped = {one.name for one in writes}
    nodes = [made for node in graph.nodes for made in ((joined, write) if node is last else () if node.name in dropped else (node,))]
    shape = state.spec
    values = tuple(evolve(value, spec=shape) if value.name in last.outputs else value for value in graph.values)
    return eliminate_dead_code(rebuild(evolve(graph, values=(*values, Value(name=stack, spec=shape))), nodes))


def _only_write(graph: Graph, part: Node) -> Node | None:
    """The ``copy_`` of as many elements of the same type that is all that uses ``part``."""
    users = graph.users.get(part.outputs[0], ())
    if len(users) != 1 or users[0].op != COPY or part.outputs[0] in graph.outputs:
        return None
    write, source = users[0], users[0].args[1]
    if write.args[0] != Ref(part.outputs[0]) or not isinstance(source, Ref) or any(out in graph.users for out in write.outputs):
        return None
    into, given = graph.spec(part.outputs[0]), graph.spec(source.value)
    return write if (into.shape, into.dtype) == (given.shape, given.dtype) and argument_of(write, "non_blocking") is False else None


def _place(graph: Graph, node: Node) -> int:
    return graph.nodes.index(node)
