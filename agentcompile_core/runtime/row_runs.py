"""Steps of one kernel for several rows that do not depend on each other: found, so that they may be one launch."""

from collections.abc import Mapping, Sequence

from ..ir.region import Access
from .program import Segment

Span = tuple[int, int]  # from one address to another


def runs_beside(segments: Sequence[Segment], addresses: Sequence[Mapping[str, int]]) -> int:
    """How many of the first ``segments``, which launch one source, may run in any order, by where their operands lie.

    ``addresses``: of the operands of each, by name. Workspaces are not looked at: each run needs its own.
    """
    count = 1
    touched = [_touched(*pair) for pair in zip(segments, addresses, strict=True)]
    while count < len(segments) and not any(_meet(one, touched[count]) for one in touched[:count]):
        count += 1
    return count


def alike(segments: Sequence[Segment], first: int) -> Sequence[Segment]:
    """The segment ``first`` and those right behind it that launch the same source."""
    end = first + 1
    while end < len(segments) and segments[end].source == segments[first].source:
        end += 1
    return segments[first:end]


def _touched(segment: Segment, addresses: Mapping[str, int]) -> tuple[list[Span], list[Span]]:
    """Where a step reads, and where it writes."""
    assert segment.match is not None
    spans = [(operand, (addresses[operand.name], addresses[operand.name] + operand.spec.nbytes)) for operand in segment.match.operands
             if operand.name in addresses]
    return [span for _, span in spans], [span for operand, span in spans if operand.access is not Access.READ]


def _meet(one: tuple[list[Span], list[Span]], other: tuple[list[Span], list[Span]]) -> bool:
    """Whether either writes what the other one touches."""
    return any(a < end and start < b for reads, writes in ((one[0], other[1]), (other[0], one[1]))
               for start, end in reads for a, b in writes)
