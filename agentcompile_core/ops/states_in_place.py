"""Operators with a state that write the next one over the last one, where a graph only copies it there."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ..ir.graph import Graph, Node, Ref
from .bodies import Bodies, written_between
from .names import CONVOLUTION, RECURRENCE

if TYPE_CHECKING:
    from torch import Tensor

COPY = "aten.copy_.default"
ADVANCING = (RECURRENCE, CONVOLUTION)  # their first operand is a state, their last result the one behind it


def with_states_in_place(
    graph: Graph, nodes: Sequence[Node], outputs: Collection[str], bodies: Bodies, wanted: "Mapping[str, Tensor]",
    operator_of: Callable[[str], Callable[..., Any]],
) -> tuple[list[Node], dict[str, Callable[..., Any]], frozenset[str]]:
    """``nodes`` without copies of such states, callables by name of those that took them in, and results that lie where ``wanted`` says.

    Before: ``y, last = recurrence(state, ...)``; ``copy_(state, last)``. After: ``y = recurrence(state, ...)``, which writes the state.
    Nobody else reads the state, the one behind it or the copy, and nothing is written meanwhile.
    """
    advancing = {node.outputs[-1]: node for node in nodes if node.op in ADVANCING and len(node.outputs) > 1}
    found: dict[str, Callable[..., Any]] = {}
    merged: dict[str, Node] = {}
    gone: set[str] = set()
    written: set[str] = set()
    for node in nodes:
        first = advancing.get(node.inputs[1]) if node.op == COPY and len(node.inputs) == 2 else None
        body = bodies(first.op, COPY) if first is not None else None
        if first is None or body is None or not _only_copied(graph, first, node, outputs):
            continue
        made = first.outputs[:-1]
        alone, into = bodies(first.op), wanted.get(made[0])
        found[first.name] = _advanced(body, alone, operator_of(first.op), into)
        merged[first.name] = evolve(first, outputs=made, mutates=node.mutates)
        written |= {made[0]} if into is not None else set()
        gone.add(node.name)
    return [merged.get(node.name, node) for node in nodes if node.name not in gone], found, frozenset(written)


def _only_copied(graph: Graph, first: Node, copy: Node, outputs: Collection[str]) -> bool:
    """Whether nobody can tell that ``first`` writes its state itself."""
    state, last = copy.args[0], first.outputs[-1]
    if not isinstance(state, Ref) or first.args[:1] != (state,) or len(first.outputs) != 2 or copy.mutates != (state.value,):
        return False
    if {last, *copy.outputs} & {*outputs, *graph.outputs} or any(graph.users.get(name) for name in copy.outputs):
        return False
    readers = {user.name for user in graph.users.get(state.value, ())}, {user.name for user in graph.users.get(last, ())}
    return readers == ({first.name, copy.name}, {copy.name}) and not written_between(graph, first, copy)


def _advanced(body: Callable[..., Any], alone: "Callable[..., Any] | None", operator: Callable[..., Any],
              into: "Tensor | None") -> Callable[..., Any]:
    def run(state: Any, *args: Any, **kwargs: Any) -> Any:
        found = body(state, *args, **kwargs, into=into)
        if found is None:
            both = alone(state, *args, **kwargs) if alone is not None else None
            found, last = operator(state, *args, **kwargs) if both is None else both
            state.copy_(last)
        return found if into is None or found is into else into.copy_(found.view(into.shape))

    return run
