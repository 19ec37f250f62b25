"""Operators that advance a state of fixed size: where it is copied over the one before, which a step then writes in place."""

from attrs import frozen

from agentcompile_core.plugin_api import Node, RegionView, ValueKind, is_contiguous, memory_roots, operator_names, ref

from .parts import offset_of


@frozen(kw_only=True)
class StateWrite:
    """A state that a node reads first and that its last result is copied over: the state, and all nodes but that one."""

    state: str
    nodes: tuple[str, ...]


def state_write(view: RegionView, node: Node) -> StateWrite | None:
    """The state that ``node`` advances, if nobody reads the state behind it but one that copies all of it over the first, in its order.

    Not the question of ``ops/states_in_place.py``, which keeps the node in its place: a kernel is handed the state itself and reads it
    early, so views may turn it on both ways, and nothing else in the graph may write it.
    """
    given, last = ref(node.args[0]), node.outputs[-1]
    if given is None or view.leaves(last):
        return None
    before: list[str] = []
    state = given
    while (maker := view.producer(state)) is not None:
        if maker.kind != "view" or offset_of(view, maker, state) != 0 or not view.only_used_by(state, {node.name, *before}):
            return None
        before.append(maker.name)
        state = maker.inputs[0]
    behind: list[str] = []
    while True:
        users = view.users(last)
        if len(users) != 1 or view.leaves(last):
            return None
        if users[0].op == operator_names.COPY:
            break
        if users[0].kind != "view" or offset_of(view, users[0], users[0].outputs[0]) != 0:
            return None
        behind.append(users[0].name)
        last = users[0].outputs[0]
    copy, spec = users[0], view.graph.spec(state)
    if view.graph.kind_of(state) is not ValueKind.STATE or copy.mutates != (state,) or ref(copy.args[1]) != last:
        return None
    if not _is_alone(view, {node.name, *before, *behind, copy.name}, (state, node.outputs[-1]), copy):
        return None
    alike = view.graph.spec(last).shape == spec.shape and is_contiguous(view.graph.spec(last)) and is_contiguous(spec)
    if not alike or view.graph.spec(last).dtype is not spec.dtype or any(view.users(out) or view.leaves(out) for out in copy.outputs):
        return None
    return StateWrite(state=state, nodes=(*before, *behind, copy.name))


def _is_alone(view: RegionView, nodes: set[str], states: tuple[str, str], copy: Node) -> bool:
    """Whether nothing but ``nodes`` reads the memory of ``states``, and nothing but ``copy`` writes it."""
    roots = memory_roots(view.graph)
    memory = {roots[name] for name in states}
    shown = {name for name, root in roots.items() if root in memory} - set(copy.outputs)
    readers = {user.name for name in shown for user in view.users(name)}
    writers = {one.name for one in view.graph.nodes if any(roots[name] in memory for name in one.mutates)}
    return readers <= nodes and writers == {copy.name} and not any(view.leaves(name) for name in shown - {states[0]})
