"""The part of a trial's graph that a case fills: caches as long as the case reads and writes them.

A reference of the whole capacity is mostly of positions that nobody touches. What lies behind the live part must keep its very bits
(``Bounded.rest``), and so must what lies in front of the positions that are written (``Bounded.before``): kept as references they would be
gigabytes, and every candidate would make them again.
"""

from collections.abc import Mapping
from math import prod

from attrs import evolve, frozen
from torch import Tensor

from ..ir.graph import Graph
from ..ir.region import Match, Operand, Role
from ..ir.verdict import Case
from ..ops.operator_names import ATTENTION
from ..ops.reference import Bounded
from ..ops.reference.comparison import same
from ..plugin.match_kind import MatchKind

UNTOUCHED = 8  # positions in front of and behind those that are written, which the reference covers too


@frozen(kw_only=True)
class LivePart:
    """``graph`` with shorter caches; ``lengths``: by the value of each, how many of its positions are left, along axis ``axes``. The first
    position that is written is ``position``."""

    graph: Graph
    lengths: Mapping[str, int]
    axes: Mapping[str, int]
    position: int

    def narrowed(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values of the graph, from those of the whole one."""
        return {name: t.narrow(self.axes[name], 0, self.lengths[name]) if name in self.lengths else t for name, t in values.items()}

    def has(self, name: str, bound: Bounded) -> bool:
        """Whether a reference is of the live part of a cache, in its shape; a kind's own may have another."""
        return tuple(bound.value.shape) == self.graph.spec(name).shape

    def compact(self, expected: Mapping[str, Bounded], values: Mapping[str, Tensor]) -> dict[str, Bounded]:
        """The reference of the live part without the positions of caches that it says are as in ``values``, which nobody need keep."""
        return {name: self._written(name, bound, values[name]) if name in self.lengths else bound for name, bound in expected.items()}

    def _written(self, name: str, bound: Bounded, tensor: Tensor) -> Bounded:
        axis, start = self.axes[name], min(self.position - UNTOUCHED, self.lengths[name])
        if start <= 0 or not self.has(name, bound):
            return bound
        kept = same(tensor.narrow(axis, 0, start).to(bound.value.dtype), bound.value.narrow(axis, 0, start))
        if not bool(kept.all()) or bool(bound.error.narrow(axis, 0, start).any()):
            return bound
        value, error = (t.narrow(axis, start, self.lengths[name] - start).clone() for t in (bound.value, bound.error))
        return evolve(bound, value=value, error=error)

    def completed(self, expected: Mapping[str, Bounded], values: Mapping[str, Tensor]) -> dict[str, Bounded]:
        """The reference of the whole graph, from that of the live part, compact or not, and the values of the whole one."""
        return {name: self._completed(name, bound, values[name]) if name in self.lengths else bound for name, bound in expected.items()}

    def _completed(self, name: str, bound: Bounded, tensor: Tensor) -> Bounded:
        axis, length = self.axes[name], self.lengths[name]
        if bound.value.numel() == tensor.numel() or bound.value.dim() != tensor.dim():  # a kind's own reference is of all of it
            return bound
        start = length - bound.value.shape[axis]
        before = tensor.narrow(axis, 0, start) if start else None
        return evolve(bound, before=before, rest=tensor.narrow(axis, length, tensor.shape[axis] - length))


def live_part(match: Match, graph: Graph, kind: MatchKind, case: Case) -> LivePart | None:
    """The live part of ``graph`` under ``case``; None where a cache is read by anything but attention."""
    axes, lengths = {}, {}
    rows = max((graph.spec(node.inputs[0]).shape[2] for node in graph.nodes if node.op == ATTENTION), default=0)
    for operand in match.operands:
        said = kind.operand(operand.name)
        axis = said.filled_along if said is not None and operand.role is Role.STATE else None
        if axis is None:
            continue
        length = min(case.position + rows + UNTOUCHED, operand.spec.shape[axis])
        if not rows or not _can_be_cut(graph, operand, axis):
            return None
        axes[operand.values[0]], lengths[operand.values[0]] = axis, length
    if not lengths:
        return None
    values = tuple(evolve(v, spec=evolve(v.spec, shape=_cut(v.spec.shape, axes[v.name], lengths[v.name]))) if v.name in lengths else v
                   for v in graph.values)
    return LivePart(graph=evolve(graph, values=values), lengths=lengths, axes=axes, position=case.position)


def _can_be_cut(graph: Graph, operand: Operand, axis: int) -> bool:
    """Whether the first positions are the first bytes, and only attention knows the cache."""
    name = operand.values[0]
    using = (node for node in graph.nodes if name in (*node.inputs, *node.mutates))
    spec = graph.spec(name)
    plain = len(operand.values) == 1 and not spec.strides and spec.shape == operand.spec.shape and prod(spec.shape[:axis]) == 1
    return plain and name not in graph.producer and all(node.op == ATTENTION for node in using)


def _cut(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    return (*shape[:axis], length, *shape[axis + 1 :])
