"""Bytes that the nodes of a graph move."""

from ..ir.graph import Graph, Node, ValueKind

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


def weight_bytes(graph: Graph) -> tuple[int, int]:
    """Bytes of the weights of a graph, and of those that one run of it reads: of experts the chosen ones.

    Of tables that are only looked up (embeddings) one row counts in either; tied weights count once, where they are multiplied.
    """
    looked_up = {name for n in graph.nodes if n.kind == "embedding" for name in n.inputs}
    every = read = 0
    for value in graph.values:
        if value.kind is not ValueKind.WEIGHT:
            continue
        users = graph.users.get(value.name, ())
        multiplied = any(n.kind != "embedding" for n in users)
        nbytes = value.spec.nbytes if multiplied or value.name not in looked_up else value.spec.nbytes // max(1, value.spec.shape[0])
        every += nbytes
        read += nbytes - min((_unchosen(n, graph, value.name) for n in users), default=0)
    return every, read


def _unchosen(node: Node, graph: Graph, value: str) -> int:
    """Bytes of ``value`` that a node leaves alone, since they belong to experts that were not chosen."""
    chosen_from = node.kind == EXPERTS and value in (node.inputs[1], *node.inputs[3:])
    return unchosen_bytes(node, graph, value) if chosen_from else 0
