"""K and V that a model computes from what it caches: what it computes may be cached instead, where every position is on its own.

Some models cache a compressed form and expand it when they attend (multi-head latent attention), or repeat and pair heads there.
While such a model is traced, what its cache hands out is marked. Behind the trace the way from the marks to the K and V of each
attention must treat all positions alike and none together; then these K and V are what is appended, and the marks are dropped.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...errors import UsageError
from ...ir.graph import Graph, Node, Ref, ValueKind
from ...ops.dtypes import torch_dtype
from ...ops.interpreter import compile_nodes
from ...ops.operator_names import ATTENTION, CACHED
from ...ops.schema import argument as argument_of
from .attention import Unsupported
from .rewrite import eliminate_dead_code, rebuild, resolve_chain

REASON = "its attention reads other K and V than it caches"
_SEED, _CLOSE = 11, 1e-4


def cache_what_is_read(graph: Graph) -> Graph:
    """``graph`` without marks, whose attention appends the K and V that it reads.

    Raises:
        Unsupported: what was cached is used otherwise, or positions are mixed or told apart on the way.
    """
    marks = {node.outputs[0]: node for node in graph.nodes if node.op == CACHED}
    _check_uses(graph, marks)
    if graph.tokens > 1:
        tried: dict[Any, bool] = {}
        for node in graph.nodes:
            if node.op == ATTENTION and not all(_by_rows(graph, argument_of(node, name), marks, tried) for name in ("k", "v")):
                raise Unsupported(REASON)
    renamed = {name: node.args[0].value for name, node in marks.items() if isinstance(node.args[0], Ref)}
    kept = [node for node in graph.nodes if node.op != CACHED]
    return eliminate_dead_code(rebuild(graph, kept, resolve_chain(renamed)))


def _check_uses(graph: Graph, marks: Iterable[str]) -> None:
    """What is made of cached K and V reaches attention as K and V, and nothing else."""
    reached = set(marks)
    for node in graph.nodes:
        read = reached.intersection(node.inputs)
        if not read:
            continue
        if node.op == ATTENTION:
            heads = {argument.value for name in ("k", "v") if isinstance(argument := argument_of(node, name), Ref)}
            if read - heads or argument_of(node, "q") in [Ref(name) for name in read]:
                raise Unsupported(REASON)
        elif node.mutates or reached.intersection(graph.outputs):
            raise Unsupported(REASON)
        else:
            reached.update(node.outputs)
    if reached.intersection(graph.outputs):
        raise Unsupported(REASON)


def _by_rows(graph: Graph, operand: Any, marks: dict[str, Node], tried: dict[Any, bool]) -> bool:
    """Whether each row of ``operand`` [1, KV, T, D] is the same function of the same row of what is marked, and of nothing else."""
    if not isinstance(operand, Ref):
        return False
    nodes, leaves = _between(graph, operand.value, marks)
    if any(graph.kind_of(leaf) not in (ValueKind.WEIGHT, ValueKind.CONSTANT) for leaf in leaves - marks.keys()):
        return False
    form = tuple((node.op, str(node.kwargs), *(graph.spec(name).shape for name in (*node.inputs, *node.outputs))) for node in nodes)
    key = (form, tuple(sorted(str(graph.spec(leaf)) for leaf in leaves)))
    if key not in tried:
        tried[key] = _tried(graph, operand.value, nodes, leaves, leaves & marks.keys())
    return tried[key]


def _between(graph: Graph, name: str, marks: dict[str, Node]) -> tuple[list[Node], set[str]]:
    """The nodes that make ``name`` of marked values, in order, and what they read from outside."""
    nodes: set[str] = set()
    leaves: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        node = graph.producer.get(one)
        if node is None or one in marks:
            leaves.add(one)
        elif node.name not in nodes:
            nodes.add(node.name)
            waiting += node.inputs
    return [node for node in graph.nodes if node.name in nodes], leaves


def _tried(graph: Graph, name: str, nodes: list[Node], leaves: set[str], marked: set[str]) -> bool:
    """On random numbers: a row that is changed changes itself alone, and rows in another order give the same rows in that order."""
    generator = torch.Generator().manual_seed(_SEED)

    def drawn(leaf: str) -> Tensor | None:
        spec = graph.spec(leaf)
        return torch.randn(spec.shape, generator=generator) if torch_dtype(spec.dtype).is_floating_point else None

    env = {leaf: made for leaf in sorted(leaves) if (made := drawn(leaf)) is not None}
    count, at = graph.tokens, graph.tokens // 2
    if not marked or len(env) != len(leaves) or graph.spec(name).shape[2] != count:
        return False
    order = torch.randperm(count, generator=generator)
    changed = {leaf: value.index_fill(2, torch.tensor([at]), 0.5) if leaf in marked else value for leaf, value in env.items()}
    turned = {leaf: value[:, :, order] if leaf in marked else value for leaf, value in env.items()}
    try:
        run = compile_nodes(graph, nodes, device="cpu", outputs=[name], dtype_override=torch.float32).run
        plain, other, ordered = (run(given)[name] for given in (env, changed, turned))
    except (UsageError, RuntimeError):
        return False
    rest = [row for row in range(count) if row != at]
    bound = _CLOSE * plain.abs().max()
    alone = bool(((plain - other)[:, :, rest].abs() <= bound).all()) and bool(((plain - other)[:, :, at].abs() > bound).any())
    return alone and bool(((plain[:, :, order] - ordered).abs() <= bound).all())
