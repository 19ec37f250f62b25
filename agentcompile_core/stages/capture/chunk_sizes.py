"""Graphs of prompt chunks between two sizes, from the graphs of these: they say the same of other numbers of tokens."""

from collections.abc import Callable

from attrs import define, evolve, field

from ...ir.graph import Graph
from .between import Line, between
from .reached import Call


def chunk_name(tokens: int) -> str:
    """What the graph of a chunk of so many tokens is called."""
    return f"prefill_{tokens}"


@define
class ChunkSizes:
    """``export``: the imported graph of a chunk of so many tokens, by torch.export; ``calls``: what such a chunk calls.

    decisions/0027 says why a derived graph is the one that would have been exported.
    """

    export: Callable[[int], Graph]
    calls: Callable[[int], tuple[Call, ...]]
    _exported: dict[int, Graph] = field(factory=dict)
    _called: dict[int, tuple[Call, ...]] = field(factory=dict)

    def exported(self, tokens: int) -> Graph:
        """The graph of a chunk of ``tokens``, traced."""
        if tokens not in self._exported:
            self._exported[tokens] = self.export(tokens)
        return self._exported[tokens]

    def derived(self, tokens: int, low: int, high: int) -> Graph:
        """The graph of a chunk of ``tokens``, from those of ``low`` and ``high`` tokens, or traced where they do not give it."""
        if not low < tokens < high:
            return self.exported(tokens)
        first, last, line = self.exported(low), self.exported(high), Line(low=low, high=high, wanted=tokens)
        try:
            graph = between(evolve(first, name=""), evolve(last, name=""), line)
            expected = between(self._calls(low), self._calls(high), line)
            alike = repr(self._calls(tokens)) == repr(expected)
        except Exception:  # the model itself was run; a size that is not understood is traced, which says what is wrong with it
            alike = False
        if not alike or graph.tokens != tokens:
            return self.exported(tokens)
        return evolve(graph, name=chunk_name(tokens)).verify()

    def _calls(self, tokens: int) -> tuple[Call, ...]:
        if tokens not in self._called:
            self._called[tokens] = self.calls(tokens)
        return self._called[tokens]

