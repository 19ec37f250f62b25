"""Whether anything is written in place between two nodes of a graph: then what the first one reads may be another by then."""

from collections.abc import Mapping
from itertools import accumulate
from types import MappingProxyType

from ..ir.graph import Graph
from .operator_names import ATTENTION
from .per_graph import once_per_graph


def written_between(graph: Graph, first: str, second: str, *, by_attention: bool = True) -> bool:
    """Whether the node called ``first``, or one behind it and before ``second``, writes in place.

    ``by_attention``: attention, which writes caches, counts.
    """
    at, writers, others = _order(graph)
    before = writers if by_attention else others
    return before[at[second]] > before[at[first]]


@once_per_graph
def _order(graph: Graph) -> tuple[Mapping[str, int], tuple[int, ...], tuple[int, ...]]:
    """The place of each node by its name, and how many nodes before each place write in place: of all, and of those but attention."""
    writing = [bool(node.mutates) for node in graph.nodes]
    others = [writes and node.op != ATTENTION for writes, node in zip(writing, graph.nodes, strict=True)]
    at = MappingProxyType({node.name: place for place, node in enumerate(graph.nodes)})
    return at, tuple(accumulate(writing, initial=0)), tuple(accumulate(others, initial=0))
