"""Indices that a graph takes of numbers: which nodes decide, and the graph behind decisions that have been made already.

The best of numbers that err, or are equal, may be one or another, and what is computed behind it is another thing then. What two
computations make is comparable only under the same decisions.
"""

from collections.abc import Iterable

from attrs import evolve, frozen

from ..ir.graph import Argument, Graph, Node, Ref
from .operator_names import ARGMAX
from .schema import argument, canonical

TOPK = "aten.topk.default"
_PLACES = {ARGMAX: True, "aten.argmax.default": True, "aten.max.dim": True, "aten.argmin.default": False, "aten.min.dim": False}
_EXTREMES = {"aten.max.dim": "aten.amax.default", "aten.min.dim": "aten.amin.default"}


@frozen(kw_only=True)
class Decision:
    """A node that decides: ``index`` says where along ``dim`` of ``scores`` (None: in all of them) the best are, best first.

    ``largest``: whether those are the best. ``first``: of equals the first one is taken, else any.
    """

    node: Node
    scores: str
    index: str
    dim: int | None
    largest: bool
    first: bool


def decisions(nodes: Iterable[Node]) -> tuple[Decision, ...]:
    """The decisions that ``nodes`` make, in their order."""
    return tuple(found for node in nodes if (found := _decision(node)) is not None)


def _decision(node: Node) -> Decision | None:
    if node.op == TOPK:
        return Decision(node=node, scores=node.inputs[0], index=node.outputs[1], dim=_axis(argument(node, "dim")),
                        largest=bool(argument(node, "largest")), first=False)
    if node.op not in _PLACES:
        return None
    return Decision(node=node, scores=node.inputs[0], index=node.outputs[-1], largest=_PLACES[node.op], first=True,
                    dim=None if node.op == ARGMAX else _axis(argument(node, "dim")))


def _axis(given: Argument) -> int | None:
    return given if isinstance(given, int) else None


def behind(graph: Graph, made: Iterable[Decision]) -> Graph:
    """``graph`` with the indices of decisions given from outside: of their nodes is left what looks up the numbers that lie there."""
    left = {one.node.name: _looked_up(one) for one in made}
    nodes = (left.get(node.name, node) for node in graph.nodes)
    return evolve(graph, nodes=tuple(node for node in nodes if node is not None))


def _looked_up(made: Decision) -> Node | None:
    """The numbers that a decision gives beside the index; None where it gives none."""
    node, given = made.node, Ref(made.scores)
    if len(node.outputs) == 1:
        return None
    left = evolve(node, kwargs=(), outputs=node.outputs[:1])
    if node.op == TOPK:
        return canonical(evolve(left, op="aten.gather.default", args=(given, argument(node, "dim"), Ref(made.index))))
    # The same one, whichever of equals was taken.
    return canonical(evolve(left, op=_EXTREMES[node.op], args=(given, (argument(node, "dim"),), argument(node, "keepdim"))))
