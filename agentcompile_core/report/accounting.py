"""Who does how much of a decode step: bytes that must move, by origin, and the nodes that stay on the framework."""

from typing import Any

from ..ir.graph import Graph, GraphSet
from ..ops.aliasing import is_alias
from ..ops.traffic import unread_bytes, weight_bytes
from ..runtime.program import Program


def accounting(program: Program) -> dict[str, Any]:
    """Bytes by origin, calls by origin, and the framework's operators by name; views are addresses and count as nothing."""
    graph = program.graph
    nbytes: dict[str, int] = {}
    calls: dict[str, int] = {}
    rest: dict[str, int] = {}
    for segment in program.segments:
        origin = segment.origin.value
        if segment.match is not None:
            nbytes[origin] = nbytes.get(origin, 0) + segment.match.bytes_moved
            calls[origin] = calls.get(origin, 0) + 1
            continue
        for name in segment.nodes:
            node = graph.node_by_name[name]
            if is_alias(graph, node):
                continue
            rest[node.op] = rest.get(node.op, 0) + 1
            calls[origin] = calls.get(origin, 0) + 1
            nbytes[origin] = nbytes.get(origin, 0) + _node_bytes(graph, name)
    total = sum(nbytes.values()) or 1
    return {"bytes": nbytes, "share": {k: v / total for k, v in nbytes.items()}, "calls": calls, "framework_operators": rest}


def _node_bytes(graph: Graph, name: str) -> int:
    node = graph.node_by_name[name]
    specs = [graph.spec(v) for v in (*node.inputs, *node.outputs)]
    if node.kind == "embedding":  # reads as many rows as it returns, not the table
        return 2 * sum(graph.spec(v).nbytes for v in node.outputs)
    return sum(s.nbytes for s in specs) - unread_bytes(node, graph)


def step_bytes(graphs: GraphSet, positions: int) -> int:
    """Bytes that one decode step must move with ``positions`` positions of KV: every linear weight once, of experts those that one token
    chooses, and K and V."""
    graph = next(g for g in graphs.graphs if g.name == "decode")
    total = weight_bytes(graph)[1]
    if graphs.kv is not None:
        total += graphs.kv.nbytes // graphs.kv.capacity * positions
    total += 2 * sum(value.spec.nbytes for value in graph.kept)  # read and written
    return total
