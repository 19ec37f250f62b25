"""Graphs of prompt chunks between two sizes, from the graphs of these: they say the same of other numbers of tokens."""

from collections.abc import Callable, Mapping, Sequence

from attrs import define, evolve, field

from ...ir.graph import Graph, GraphKind, GraphSet
from ...ops.operator_names import ATTENTION
from ...ops.schema import with_argument
from .between import Line, Unlike, between
from .reached import Call


def chunk_name(tokens: int) -> str:
    """What the graph of a chunk of so many tokens is called."""
    return f"prefill_{tokens}"


def fresh_variant(graph: Graph) -> Graph:
    """The same chunk under the promise that it starts at position 0: attention looks at the new K and V only."""
    nodes = tuple(with_argument(node, "fresh", True) if node.op == ATTENTION else node for node in graph.nodes)
    return evolve(graph, name=f"{graph.name}_fresh", nodes=nodes)


def followers(graphs: GraphSet) -> tuple[int, ...]:
    """The sizes of prompt chunks whose graphs are, to the last number, what lies between those of the smallest and the largest size."""
    chunks = {graph.name: graph for graph in graphs.of_kind(GraphKind.PREFILL)}
    sizes = sorted({graph.tokens for graph in chunks.values()})
    first, last = (chunks.get(chunk_name(size)) for size in (sizes[0], sizes[-1])) if sizes else (None, None)
    if first is None or last is None or graphs.whole_chunks:  # whole chunks are as long as their size
        return ()
    return tuple(size for size in sizes[1:-1] if _follows(chunks, first, last, size))


def telling(graphs: GraphSet, between: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The sizes of prompt chunks, in order, that say something of their own. ``between``: what ``followers`` says, where that is known.

    The largest is among them. A smaller one in its place would do less, but not say the same: what is wrong with a window, say, may be so
    from some number of tokens on.
    """
    told = followers(graphs) if between is None else between
    return tuple(size for size in sorted({graph.tokens for graph in graphs.of_kind(GraphKind.PREFILL)}) if size not in told)


def _follows(chunks: Mapping[str, Graph], first: Graph, last: Graph, tokens: int) -> bool:
    try:
        made = derived(first, last, tokens)
    except Unlike:
        return False
    fresh = fresh_variant(made)
    return all(chunks.get(graph.name) == graph for graph in (made, fresh))


def derived(first: Graph, last: Graph, tokens: int) -> Graph:
    """The graph of a chunk of ``tokens`` between those of a smaller and a larger one. Raises Unlike: there is none."""
    line = Line(low=first.tokens, high=last.tokens, wanted=tokens)
    return evolve(between(evolve(first, name=""), evolve(last, name=""), line), name=chunk_name(tokens))


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

    def derived(self, tokens: int, low: int, highs: Sequence[int]) -> Graph:
        """The graph of a chunk of ``tokens``, from those of ``low`` and one of ``highs`` tokens, or traced where none of them gives it.

        The largest of ``highs`` is tried first; a line may end below it, as that of a model does which pads chunks up to a size.
        """
        for high in sorted((size for size in highs if low < tokens < size), reverse=True):
            graph = self._on_line(tokens, low, high)
            if graph is not None:
                return graph.verify()
        return self.exported(tokens)

    def _on_line(self, tokens: int, low: int, high: int) -> Graph | None:
        first, last, line = self.exported(low), self.exported(high), Line(low=low, high=high, wanted=tokens)
        try:
            graph = derived(first, last, tokens)
            expected = between(self._calls(low), self._calls(high), line)
            alike = repr(self._calls(tokens)) == repr(expected)
        except Exception:  # the model itself was run; a size that is not understood is traced, which says what is wrong with it
            return None
        return graph if alike and graph.tokens == tokens else None

    def _calls(self, tokens: int) -> tuple[Call, ...]:
        if tokens not in self._called:
            self._called[tokens] = self.calls(tokens)
        return self._called[tokens]

