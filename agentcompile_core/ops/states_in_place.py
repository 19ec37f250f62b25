"""Operators with a state that write the next one over the last one, where a graph only copies it there."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ..ir.graph import Graph, Node, Ref, ValueKind
from .aliasing import is_alias, memory_roots
from .bodies import Bodies
from .operator_names import CONVOLUTION, COPY, RECURRENCE
from .write_order import written_between

if TYPE_CHECKING:
    from torch import Tensor

ADVANCING = (RECURRENCE, CONVOLUTION)  # their first operand is a state, their last result the one behind it


def with_states_in_place(
    graph: Graph, nodes: Sequence[Node], outputs: Collection[str], bodies: Bodies, wanted: "Mapping[str, Tensor]",
    operator_of: Callable[[str], Callable[..., Any]],
) -> tuple[list[Node], dict[str, Callable[..., Any]], frozenset[str]]:
    """``nodes`` without copies of such states, callables by name of those that took them in, and results that lie where ``wanted`` says.

    Before: ``y, last = recurrence(state, ...)``; ``copy_(state, last)``. After: ``y = recurrence(state, ...)``, which writes the state.
    Nobody else reads the state, the one behind it or the copy, and nothing is written meanwhile. Either state may be seen as another shape.
    """
    advancing = {node.outputs[-1]: node for node in nodes if node.op in ADVANCING and len(node.outputs) == 2}
    found: dict[str, Callable[..., Any]] = {}
    merged: dict[str, Node] = {}
    gone: set[str] = set()
    written: set[str] = set()
    for node in nodes:
        if node.op != COPY or len(node.inputs) != 2:
            continue
        last, views = _seen_through(graph, node.inputs[1])
        first = advancing.get(last)
        body = bodies(first.op, COPY) if first is not None else None
        if first is None or body is None or not _only_copied(graph, first, node, views, outputs):
            continue
        made = first.outputs[0]
        alone, into = bodies(first.op), wanted.get(made)
        found[first.name] = _advanced(body, alone, operator_of(first.op), into)
        merged[first.name] = evolve(first, outputs=(made,), mutates=node.mutates)
        written |= {made} if into is not None else set()
        gone |= {node.name, *(view.name for view in views)}
    return [merged.get(node.name, node) for node in nodes if node.name not in gone], found, frozenset(written)


def copied_over(graph: Graph) -> dict[str, int]:
    """How many nodes copy something over each state: a state of fixed size, which a step leaves to the next one."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.mutates if node.op == COPY else ():
            if graph.kind_of(name) is ValueKind.STATE:
                found[name] = found.get(name, 0) + 1
    return found


def _seen_through(graph: Graph, value: str) -> tuple[str, list[Node]]:
    """The value that ``value`` is a view of, of all its elements in their order, and the views."""
    views: list[Node] = []
    while (node := graph.producer.get(value)) is not None and is_alias(graph, node):
        views.append(node)
        value = node.inputs[0]
    return value, views


def _only_copied(graph: Graph, first: Node, copy: Node, views: Sequence[Node], outputs: Collection[str]) -> bool:
    """Whether nobody can tell that ``first`` writes its state itself; ``views``: those of its last result that are copied."""
    state, last = copy.args[0], first.outputs[-1]
    if not isinstance(state, Ref) or not isinstance(first.args[0], Ref) or copy.mutates != (state.value,):
        return False
    given, before = _seen_through(graph, first.args[0].value)
    if given != state.value or graph.kind_of(given) is not ValueKind.STATE:
        return False
    seen = {last, *(name for view in (*views, *before) for name in view.outputs)}
    among = {first.name, copy.name, *(view.name for view in (*views, *before))}
    if {*seen, *copy.outputs} & {*outputs, *graph.outputs} or any(graph.users.get(name) for name in copy.outputs):
        return False
    roots = memory_roots(graph)
    memory = {roots[name] for name in (*seen, given)}
    shown = {name for name, root in roots.items() if root in memory}  # other parts of the same memory among them
    readers = {user.name for name in shown for user in graph.users.get(name, ())}
    return readers <= among and not written_between(graph, first.name, copy.name)


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
