"""Captured graphs as the store holds them: without those of chunk sizes that follow from the others, which are derived as they are read."""

from itertools import pairwise

from attrs import evolve, frozen

from ...errors import UsageError
from ...ir.graph import Graph, GraphKind, GraphSet
from .between import Unlike
from .chunk_sizes import chunk_name, derived, followers, fresh_variant


@frozen(kw_only=True)
class StoredGraphs:
    """``graphs`` without those of chunks of ``between`` tokens, each of which is derived as in decisions/0027."""

    graphs: GraphSet
    between: tuple[int, ...] = ()

    def whole(self) -> GraphSet:
        """All graphs, in their order.

        Raises:
            UsageError: those that are there say nothing of a size ``between``.
        """
        if not self.between:
            return self.graphs
        chunks = {graph.name: graph for graph in self.graphs.of_kind(GraphKind.PREFILL)}
        sizes = sorted({graph.tokens for graph in chunks.values()})
        ordered = (*sizes[:1], *self.between, *sizes[-1:])
        if len(sizes) < 2 or any(one >= other for one, other in pairwise(ordered)) or not set(sizes).isdisjoint(self.between):
            raise UsageError(f"chunks of {', '.join(map(str, self.between))} tokens are to follow from those of {sizes}")
        made: list[Graph] = []
        try:
            for size in self.between:
                graph = derived(chunks[chunk_name(sizes[0])], chunks[chunk_name(sizes[-1])], size).verify()
                made += graph, fresh_variant(graph)
        except (Unlike, KeyError) as exc:
            raise UsageError(f"no chunk of {size} tokens follows from those that are stored ({exc})") from exc
        return evolve(self.graphs, graphs=_in_order((*self.graphs.graphs, *made)))


def stored(graphs: GraphSet) -> StoredGraphs:
    """What is stored of ``graphs``; all of them where they would not come back in their order."""
    between, ordered = followers(graphs), _in_order(graphs.graphs) == graphs.graphs
    if not between or not ordered:
        return StoredGraphs(graphs=graphs)
    rest = tuple(graph for graph in graphs.graphs if graph.kind is not GraphKind.PREFILL or graph.tokens not in between)
    return StoredGraphs(graphs=evolve(graphs, graphs=rest), between=between)


def _in_order(graphs: tuple[Graph, ...]) -> tuple[Graph, ...]:
    """Chunks by size behind all that is none, the one from position 0 on behind the other of its size."""
    chunks = [graph for graph in graphs if graph.kind is GraphKind.PREFILL]
    return (*(graph for graph in graphs if graph.kind is not GraphKind.PREFILL), *sorted(chunks, key=lambda g: (g.tokens, len(g.name))))
