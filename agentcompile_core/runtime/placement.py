"""Where values lie: blocks of one arena, placed first-fit over their lifetimes."""

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from ..ops.aliasing import ALIGNMENT_BYTES


@frozen(kw_only=True)
class Block:
    """One allocation: values side by side, alive from segment ``first`` to segment ``last`` inclusive."""

    values: tuple[tuple[str, int], ...]  # value and its offset in the block, bytes
    nbytes: int
    first: int
    last: int


def place(blocks: Iterable[Block]) -> tuple[dict[str, int], int]:
    """First-fit placement of blocks in one arena; blocks alive together never overlap.

    Returns the byte offset of each value, and the arena's size in bytes. Larger blocks are placed first.
    """
    placed: list[tuple[int, int, Block]] = []  # start, end, block
    offsets: dict[str, int] = {}
    size = 0
    for block in sorted(blocks, key=lambda b: (-b.nbytes, b.first, b.values)):
        busy = sorted((s, e) for s, e, other in placed if not (other.last < block.first or block.last < other.first))
        start = 0
        for low, high in busy:
            if start + block.nbytes <= low:
                break
            start = max(start, high)
        end = start + -(-block.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        placed.append((start, end, block))
        size = max(size, end)
        for value, offset in block.values:
            offsets[value] = start + offset
    return offsets, size


def side_by_side(names: Sequence[str], nbytes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Offsets of values that lie directly behind each other, in bytes."""
    offset, found = 0, []
    for name in names:
        found.append((name, offset))
        offset += nbytes[name]
    return tuple(found)
