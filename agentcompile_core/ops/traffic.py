"""Bytes that the nodes of a graph move."""

from ..ir.graph import Graph, Node

LOOKUPS = ("embedding", "index", "index_select", "gather")


def bytes_of(node: Node, graph: Graph) -> int:
    """Bytes of everything a node reads and writes; of a table that it looks rows up in, the rows it returns."""
    read = node.inputs[1:] + node.outputs if node.kind in LOOKUPS else node.inputs
    return sum(graph.spec(name).nbytes for name in (*read, *node.outputs))
