"""The oracle: a graph in float64 with, for every element, the largest error that a correct kernel may have.

Budget of one element of a dot product: ``1.1 u_out |ref| + tiny + 0.9 sqrt(d) u_acc S``, d the length of the sum (no order
is worse than one by one, so nothing that a plugin declares matters) and S the size of partial sums (``bounded.sum_size``);
where a linear layer has a single row, what its partial sums round in the orders of kernels and framework (``walks``).
A graph composes it node by node: what a node's operands may be off by is propagated, and every value that the framework
stores adds the rounding of its element type. A kernel that keeps an intermediate in float32 errs less; the framework itself
always passes (tested; ``scripts/budget_table.py`` measures by how much).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import AgentCompileError
from ...ir.graph import Graph, Node
from ..dtypes import torch_dtype
from .bounded import Bounded, exact, rounded
from .calls import resolved
from .comparison import Comparison, compare
from .rules import MOVES, apply

__all__ = ["Bounded", "Comparison", "compare", "exact", "oracle", "torch_dtype"]


def oracle(graph: Graph, values: Mapping[str, Tensor], depth: int = 0) -> dict[str, Bounded]:
    """Run ``graph`` in float64 on the device of ``values``, with error budgets.

    Args:
        graph: nodes that have rules (``rules``); its inputs, weights, constants and states must be in ``values``.
        values: tensors by value name in their own dtypes, or the same numbers in float64; they are not changed.
        depth: charge no more than this for a reduction; 0, which judges every candidate, its full length.

    Returns:
        Every output of the graph, and every state in its final condition, by value name.

    Raises:
        AgentCompileError: an operator has no rule, or a value is missing.
    """
    missing = [v.name for v in graph.values if v.name not in values and v.name not in graph.producer]
    if missing:
        raise AgentCompileError(f"the reference of graph {graph.name} needs values for {', '.join(missing)}")
    env = {name: exact(tensor, torch_dtype(graph.spec(name).dtype)) for name, tensor in values.items()}
    with torch.no_grad():
        for node in graph.nodes:
            _run(graph, node, env, depth)
    touched = {name for node in graph.nodes for name in node.mutates}
    return {name: env[name] for name in dict.fromkeys((*graph.outputs, *sorted(touched)))}


def _run(graph: Graph, node: Node, env: dict[str, Bounded], depth: int) -> None:
    results = apply(resolved(graph, node, depth, env, as_stored=node.op in MOVES))
    for name, result in zip(node.outputs, results, strict=True):
        spec = graph.spec(name)
        done = rounded(result.value, result.error, spec.dtype)
        if tuple(done.value.shape) != spec.shape:
            raise AgentCompileError(f"the reference of {node.op} made {tuple(done.value.shape)} for {name}, which is {spec.shape}")
        env[name] = Bounded(done.value, done.error, result.choices)
