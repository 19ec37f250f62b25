"""The reduction depth of a source, as the core computes it: what a plugin declares may only tighten its own budget."""

from ...ir.candidate import StepSource
from ...ir.graph import Graph
from ..work import reductions_of

UNEVEN = 4  # a thread may have this many times the share that an even split gives it


def reduction_depth(graph: Graph, source: StepSource) -> int:
    """The longest chain of roundings that an accumulator of ``source`` can honestly need on ``graph``.

    Each reduction's length over the threads that can share one of its results (those of a block at most, and no more than
    there are for each result), times 4 for uneven shares, plus log2 of all threads for what combines them. 0, the full
    length, where there are no launches to count threads of. A depth that the source declares counts where it is less.
    """
    if not source.launches:
        return 0
    blocks = max(launch.grid[0] * launch.grid[1] * launch.grid[2] for launch in source.launches)
    threads = max(launch.block[0] * launch.block[1] * launch.block[2] for launch in source.launches)
    chains = (_depth(length, many, blocks, threads) for node in graph.nodes for length, many in reductions_of(node, graph))
    computed = max(chains, default=1)
    return min(computed, source.reduction_depth) if source.reduction_depth > 0 else computed


def _depth(length: int, many: int, blocks: int, threads: int) -> int:
    sharing = max(1, min(threads, blocks * threads // max(1, many)))
    return min(length, UNEVEN * -(-length // sharing) + (blocks * threads).bit_length())
