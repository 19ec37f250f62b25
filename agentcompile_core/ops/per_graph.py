"""What is computed of a graph once, however often it is asked for: the chain makes some two hundred programs of one graph."""

import weakref
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from ..ir.graph import Graph

T = TypeVar("T")


def once_per_graph(compute: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """``compute``, whose result is kept for as long as the graph lives, and shared: it must not be mutable, nor refer to the graph.

    Graphs are told apart by identity; to compare two of them takes longer than much of what is computed of them.
    """
    kept: dict[int, tuple[weakref.ref[Graph], T]] = {}

    @wraps(compute)
    def once(graph: Graph) -> T:
        key = id(graph)
        found = kept.get(key)
        if found is not None and found[0]() is graph:
            return found[1]

        def forget(gone: weakref.ref[Graph]) -> None:
            if key in kept and kept[key][0] is gone:  # another graph may lie there since
                del kept[key]

        result = compute(graph)
        kept[key] = weakref.ref(graph, forget), result
        return result

    return once
