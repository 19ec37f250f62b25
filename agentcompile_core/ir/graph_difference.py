"""Where two sets of graphs are not the same: of one model, from two places."""

from collections.abc import Sequence

from . import serial
from .frequencies import unlike
from .graph import Graph, GraphSet


def unlike_graphs(found: GraphSet, wanted: GraphSet) -> str:
    """One clause on the first thing in which ``found`` is not ``wanted``; empty: what they compute, and how, is the same to the letter.

    What says nothing of that does not count: facts of the model, notes, and the reason why there are no graphs.
    """
    names = [[graph.name for graph in graphs.graphs] for graphs in (found, wanted)]
    if names[0] != names[1]:
        return f"it holds the graphs {', '.join(names[0]) or 'none'} instead of {', '.join(names[1]) or 'none'}"
    if why := unlike(found.frequencies, wanted.frequencies):  # alike but for the last bits of what devices compute
        return why
    for what in ("workload", "kv", "call", "whole_chunks"):
        if serial.dumps(getattr(found, what)) != serial.dumps(getattr(wanted, what)):
            return f"its {what.replace('_', ' ')} {'are others' if what.endswith('s') else 'is another one'}"
    return next(filter(None, map(_unlike, found.graphs, wanted.graphs)), "")


def _unlike(found: Graph, wanted: Graph) -> str:
    if serial.dumps(found) == serial.dumps(wanted):  # of the text, in which no number is unlike itself
        return ""
    for what, one, other in (("node", found.nodes, wanted.nodes), ("value", found.values, wanted.values)):
        place = _first(one, other)
        if place < max(len(one), len(other)):
            named = [items[place].name if place < len(items) else "nothing" for items in (one, other)]
            return (f"the {what} {named[0]} of its graph {found.name} is another one" if named[0] == named[1]
                    else f"its graph {found.name} has the {what} {named[0]} instead of {named[1]}")
    return f"its graph {found.name} is another one"


def _first(found: Sequence[object], wanted: Sequence[object]) -> int:
    """The first place at which they differ."""
    same = zip(found, wanted, strict=False)
    return next((i for i, (one, other) in enumerate(same) if serial.dumps(one) != serial.dumps(other)), min(len(found), len(wanted)))
