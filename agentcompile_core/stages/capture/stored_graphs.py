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
        """All graphs, in their order, not verified.

        Raises:
            UsageError: those that are there say nothing of a size ``between``.
        """
        if not self.between:
            return self.graphs
        chunks = {graph.name: graph for graph in self.graphs.of_kind(GraphKind.PREFILL)}
        sizes = sorted({graph.tokens for graph in chunks.values()})
        ends = [chunks.get(chunk_name(size)) for size in (*sizes[:1], *sizes[-1:])]
        first, last = ends if len(ends) == 2 else (None, None)
        ordered = (*sizes[:1], *self.between, *sizes[-1:])
        fit = all(one < other for one, other in pairwise(ordered)) and set(sizes).isdisjoint(self.between)
        if not fit or self.graphs.whole_chunks or first is None or last is None or (first.tokens, last.tokens) != (sizes[0], sizes[-1]):
            raise UsageError(f"chunks of {', '.join(map(str, self.between))} tokens are to follow from those of {sizes}")
        if not set(self.between) <= set(self.graphs.workload.prefill_chunks):
            raise UsageError(f"chunks of {', '.join(map(str, self.between))} tokens are not all what was asked for")
        try:
            made = [derived(first, last, size) for size in self.between]
        except Unlike as exc:
            raise UsageError(f"what is to follow from other chunks does not ({exc})") from exc
        return evolve(self.graphs, graphs=_in_order((*self.graphs.graphs, *made, *map(fresh_variant, made))))


def stored(graphs: GraphSet) -> StoredGraphs:
    """What is stored of ``graphs``; all of them where they would not come back as they are."""
    between = followers(graphs)
    names = {name for size in between for name in (chunk_name(size), f"{chunk_name(size)}_fresh")}
    less = StoredGraphs(graphs=evolve(graphs, graphs=tuple(graph for graph in graphs.graphs if graph.name not in names)), between=between)
    try:
        return less if less.whole() == graphs else StoredGraphs(graphs=graphs)
    except UsageError:
        return StoredGraphs(graphs=graphs)


def _in_order(graphs: tuple[Graph, ...]) -> tuple[Graph, ...]:
    """Chunks by size behind all that is none, the one from position 0 on behind the other of its size."""
    chunks = [graph for graph in graphs if graph.kind is GraphKind.PREFILL]
    return (*(graph for graph in graphs if graph.kind is not GraphKind.PREFILL), *sorted(chunks, key=lambda g: (g.tokens, len(g.name))))
