"""Bytes that the nodes of a graph move."""

from ..ir.graph import Graph, Node

LOOKUPS = ("embedding", "index", "index_select", "gather")
EXPERTS = "expert_linear"


def bytes_of(node: Node, graph: Graph) -> int:
    """Bytes of everything a node reads and writes; of a table that it looks rows up in, the rows it returns; of experts, the chosen."""
    read = node.inputs[1:] + node.outputs if node.kind in LOOKUPS else node.inputs
    return sum(graph.spec(name).nbytes for name in (*read, *node.outputs)) - unread_bytes(node, graph)


def unread_bytes(node: Node, graph: Graph) -> int:
    """Bytes of the matrices and biases of experts that a node cannot have chosen, since it chooses fewer than there are."""
    return sum(unchosen_bytes(node, graph, name) for name in (node.inputs[1], *node.inputs[3:])) if node.kind == EXPERTS else 0


def unchosen_bytes(node: Node, graph: Graph, name: str) -> int:
    """The same of one of its operands [experts, ..]."""
    spec, chosen = graph.spec(name), graph.spec(node.inputs[2]).numel
    return spec.nbytes // spec.shape[0] * max(0, spec.shape[0] - chosen)
