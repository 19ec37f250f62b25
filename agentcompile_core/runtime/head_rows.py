"""Rows of one call of attention of a prompt chunk: what norms and turns them and writes them into the caches."""

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from ..ir.graph import Node, Ref
from ..ops.heads import Way
from ..ops.schema import named
from ..plugin.running import Heads

if TYPE_CHECKING:
    import torch

    from ..ops.interpreter import Prepared
    from ..ops.operators import AttentionCall
    from ..plugin.interfaces import Backend

    Tensors = MutableMapping[str, "torch.Tensor"]

NORM_DEFAULTS, TURN_DEFAULTS = {"weight": None, "one_plus": False, "once": False}, {"interleaved": False}
NORM_ORDER, TURN_ORDER = ("weight", "eps", "one_plus", "once"), ("cos", "sin", "interleaved")


class HeadRows:
    """Either the backend places queries, keys and values in one go, or the framework makes them, as ``before`` says.

    Args:
        ways: of ``q``, ``k`` and ``v``.
        environment: tensors of the program by value name.
        before: the nodes on the ways.
    """

    def __init__(self, ways: Mapping[str, Way], environment: "Tensors", before: "Prepared", library: "Backend | None") -> None:
        self._ways, self._environment, self._before, self._library = ways, environment, before, library

    def make(self) -> None:
        """Put the operands of the call into the environment."""
        self._environment.update(self._before.run(self._environment))

    def empty_queries(self) -> "torch.Tensor":
        """[1, H, T, D], by token in memory, as libraries write; nothing is in it."""
        rows = self._rows(self._ways["q"])
        _, heads, count, dim = rows.shape
        return rows.new_empty(1, count, heads, dim).transpose(1, 2)

    def placed(self, call: "AttentionCall", queries: "torch.Tensor") -> bool:
        """Whether the backend wrote ``queries`` and the rows of the caches."""
        if self._library is None:
            return False
        at = None if call.fresh else call.position
        places = {"q": (queries, None), "k": (call.k_cache.transpose(1, 2), at), "v": (call.v_cache.transpose(1, 2), at)}
        return self._library.place([self._heads(self._ways[name], *places[name]) for name in places])

    def _heads(self, way: Way, out: "torch.Tensor", at: "torch.Tensor | None") -> Heads:
        return Heads(rows=self._rows(way), out=out, at=at, norm=self._behind(way.norm, NORM_ORDER, NORM_DEFAULTS),
                     turn=self._behind(way.rope, TURN_ORDER, TURN_DEFAULTS), wide=way.wide)

    def _rows(self, way: Way) -> "torch.Tensor":
        rows = self._environment[way.source]
        return rows.transpose(1, 2) if way.swapped else rows

    def _behind(self, node: Node | None, order: tuple[str, ...], defaults: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a node behind its first one, in ``order``."""
        if node is None:
            return ()
        given = {**defaults, **named(node.op, node.args, dict(node.kwargs))}
        return tuple(self._environment[a.value] if isinstance(a, Ref) else a for a in (given[name] for name in order))
