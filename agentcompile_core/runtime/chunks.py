"""Chunks of prompts: how one is cut, and the numbers by which a program knows its chunk."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from ..errors import UsageError
from ..ops.traffic import weight_bytes

if TYPE_CHECKING:
    import torch

    from ..ir.graph import GraphSet

APART = 32  # elements of 8 bytes, so that each input of a program begins at a multiple of 256 bytes

EACH = 384  # tokens: a chunk costs as much beside its rows, since it reads all weights, where each row is multiplied with all of them


def cost_of_each(graphs: "GraphSet") -> int:
    """What a chunk of a model costs beside its rows, in rows: more where a row is multiplied with few of the weights (experts)."""
    decode = next((graph for graph in graphs.graphs if graph.name == "decode"), None)
    every, read = (1, 1) if decode is None else weight_bytes(decode)
    return EACH * every // max(1, read)


@frozen(kw_only=True)
class Chunk:
    """One run of a prefill program: ``tokens`` rows of which ``length`` are prompt, from position ``start``."""

    tokens: int
    start: int
    length: int

    @property
    def fresh(self) -> bool:
        """Whether it is the first chunk of its prompt."""
        return self.start == 0


def _size(fits: Sequence[int], left: int, each: int) -> int:
    """Of the sizes that fit, smallest first, the next chunk's for ``left`` tokens: the one that holds them all, if that costs least."""
    holds = next((size for size in fits if size >= left), None)
    whole = [size for size in fits if size <= left]
    if holds is None or not whole:
        return fits[-1] if holds is None else holds
    return whole[-1] if _cost(whole, fits, left, each) < holds + each else holds


def _cost(whole: Sequence[int], fits: Sequence[int], left: int, each: int) -> int:
    """Of ``left`` tokens in as many of the largest ``whole`` chunk as there are, the rest in the next smaller ones or one that holds it.

    A chunk costs its rows and ``each``.
    """
    spent, best = 0, None
    for size in reversed(whole):
        count, left = divmod(left, size)
        spent += count * (size + each)
        holds = next(size for size in fits if size >= left) + each if left else 0
        best = spent + holds if best is None else min(best, spent + holds)
    assert best is not None
    return best


def plan_chunks(prompt: int, sizes: Sequence[int], capacity: int, *, padded: bool = True, again: bool = True,
                each: int = EACH) -> tuple[Chunk, ...]:
    """Cut a prompt of ``prompt`` tokens into prefill chunks, largest first; the last one is padded to a size that holds it.

    ``each``: what a chunk costs beside its rows, in rows.

    Padding writes KV beyond the prompt, where it is overwritten later, but never beyond ``capacity``: near the end a
    chunk starts earlier instead and computes a few positions again. Where that may not be, since positions change a state
    (``again``), and where no row may be padding (``padded``), what is left is chunks of one token: decode steps.

    Raises:
        UsageError: the prompt is longer than the cache.
    """
    if prompt > capacity:
        raise UsageError(f"a prompt of {prompt} tokens needs a cache of more than {capacity} positions; compile with a larger context")
    chunks, start = [], 0
    while start < prompt:
        left = prompt - start
        fits = [s for s in sorted(sizes) if start + s <= capacity and (padded or s <= left)]
        if not fits and padded and again:
            start = capacity - min(sizes)
            fits, left = [min(sizes)], prompt - start
        tokens = _size(fits, left, each) if fits else 1
        chunks.append(Chunk(tokens=tokens, start=start, length=min(left, tokens)))
        start += chunks[-1].length
    return tuple(chunks)


class ChunkInputs:
    """Prompt [1, T], start [1] and length [1] of the programs of one size, all i64, in one piece of memory: one copy sets them."""

    def __init__(self, tokens: int, device: str) -> None:
        import torch

        behind = _behind(tokens)
        self.flat = torch.zeros(behind + APART + 1, dtype=torch.int64, device=device)
        self.flat[-1] = 1  # a runtime may warm up before anything is read: the last of no tokens has no logits
        self._views = self.flat[:tokens].view(1, tokens), self.flat[behind : behind + 1], self.flat[behind + APART :]

    def named(self, names: Sequence[str]) -> "dict[str, torch.Tensor]":
        """The three by the names that a graph has for them, in its order."""
        return dict(zip(names, self._views, strict=True))


def _behind(tokens: int) -> int:
    """Where the numbers behind the ids lie."""
    return -(-tokens // APART) * APART


def rows_of(chunks: Sequence[Chunk], prompt: "torch.Tensor", device: str) -> "list[torch.Tensor]":
    """For each chunk what ``ChunkInputs.flat`` holds: its ids [1, n] of ``prompt``, zeros behind them, start and length.

    They are copied to ``device`` together: once per prompt.
    """
    import torch

    sizes = [_behind(chunk.tokens) + APART + 1 for chunk in chunks]
    rows = torch.zeros(sum(sizes), dtype=torch.int64)
    for chunk, row in zip(chunks, rows.split(sizes), strict=True):
        row[: chunk.length] = prompt[0, chunk.start : chunk.start + chunk.length]
        row[-1 - APART], row[-1] = chunk.start, chunk.length
    return list(rows.to(device).split(sizes))
