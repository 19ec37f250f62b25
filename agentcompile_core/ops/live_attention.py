"""Attention of a prompt chunk over the rows that are cached, whose number the host knows.

``agentcompile::attention`` on an accelerator attends over the whole capacity under a mask, since a captured graph has fixed shapes.
Where the host knows the chunk's first position, K and V are cut to what is there, and cost grows with the prompt alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from attrs import evolve
from torch import Tensor

from .operators import AttentionCall, capped, grouped_sdpa

# ``part(q, k, v, causal=..., scale=...)``: rows [1, H, T, D] over k and v [1, KV, L, ..], and the logarithm of the sum of their
# exponentials, fp32 of T * H elements; causal: of T rows over as many keys. None: not served.
Part = Callable[..., "tuple[Tensor, Tensor] | None"]

# ``over_all(q, k, v, out, scale=...)``: writes all of it at once to ``out`` [1, H, T, Dv], over k and v [1, KV, L, ..] of which the last T
# rows are the chunk's own, or says False; with ``window``, ``softcap``, ``sinks`` and ``slopes`` where the call has one of them.
OverAll = Callable[..., bool]

# ``merged(parts, out)``: writes what ``merge`` writes, or says False.
Merged = Callable[["list[tuple[Tensor, Tensor]]", Tensor], bool]

# ``around()``: a block in which SDPA may be called with another number of keys each time (``Backend.any_length``).
Around = Callable[[], "AbstractContextManager[None]"]

SCORES = 1 << 23  # elements of scores at a time where they lie in memory: 32 MiB in fp32
PLAIN_SCORES = 1 << 25  # and where SDPA keeps them to itself: fewer, larger calls
ALIGNED = 8  # channels of which heads are multiples that SDPA's own kernels take
LARGE = 1024  # rows of a chunk from which on its history is cut into few lengths: libraries prepare themselves for each one


def append_rows(call: AttentionCall) -> None:
    """Write the K and V of the chunk into the caches, as the operator does, where all rows fit."""
    count = call.k.shape[2]
    for cache, rows in ((call.k_cache, call.k), (call.v_cache, call.v)):
        if call.fresh:
            cache[:, :count].copy_(rows.transpose(1, 2))
        else:
            cache.index_copy_(1, call.position + torch.arange(count, device=cache.device), rows.transpose(1, 2))


def attend(call: AttentionCall, start: int, out: Tensor | None = None, part: Part | None = None, merged: Merged | None = None,
           over_all: OverAll | None = None, around: Around = nullcontext) -> Tensor:
    """What the operator returns, [1, T, H, Dv]: row t of ``call.q`` attends to the cached rows 0 .. start + t.

    It is written to ``out`` where that is given. The chunk's own K and V are cached already. ``call.position`` is not read:
    ``start`` is the position of the first row of ``call.q``, on the host. What neither ``part`` nor ``over_all`` serves goes by blocks of
    rows, each with a number of keys of its own, in ``around()``.

    Raises:
        ValueError: the chunk ends behind the cache.
    """
    live, capacity = start + call.q.shape[2], call.k_cache.shape[1]
    if start < 0 or live > capacity:
        raise ValueError(f"a chunk of rows {start} to {live - 1} attends over a cache of {capacity}")
    if 0 < call.chunk < live:
        written = _empty(call) if out is None else out
        return _by_chunks(call, start, written, lambda one, at, to: attend(one, at, to, part, merged, over_all, around))
    plain = (call.window <= 0 or call.window >= live) and _is_plain(call)
    if over_all is not None:
        written = _empty(call) if out is None else out
        window = call.window if 0 < call.window < live else 0
        more = {} if plain else {"window": window, "softcap": call.softcap, "sinks": call.sinks, "slopes": call.slopes}
        first = max(0, start - window + 1) if window else 0  # what no row sees may hold anything
        if over_all(call.q, *_cached(call, first, live), written.transpose(1, 2), scale=call.scale, **more):
            return written
        out = out if plain else written
    parts = _parts(call, start, part) if plain and part is not None else None
    if parts is not None and out is None and len(parts) == 1:
        return parts[0][0].transpose(1, 2).contiguous()
    if out is None:
        out = _empty(call)
    if parts is not None:
        if len(parts) == 1 or merged is None or not merged(parts, out.transpose(1, 2)):
            merge(parts, out.transpose(1, 2))
    else:
        with around():
            _by_blocks(call, start, out)
    return out


def _by_chunks(call: AttentionCall, start: int, out: Tensor, attended: Callable[[AttentionCall, int, Tensor], Tensor]) -> Tensor:
    """The rows of each chunk of positions over that chunk of the cache alone, where they are causal and no more."""
    first, end = start, start + call.q.shape[2]
    while first < end:
        begin = first - first % call.chunk
        last = min(begin + call.chunk, end)
        rows = slice(first - start, last - start)
        one = evolve(call, q=call.q[:, :, rows], k_cache=call.k_cache[:, begin:], v_cache=call.v_cache[:, begin:], chunk=0)
        attended(one, first - begin, out[:, rows])
        first = last
    return out


def _empty(call: AttentionCall) -> Tensor:
    return call.q.new_empty(1, call.q.shape[2], call.q.shape[1], call.v_cache.shape[3])


def _is_plain(call: AttentionCall) -> bool:
    return call.softcap == 0.0 and call.sinks is None and call.slopes is None


def _parts(call: AttentionCall, start: int, part: Part) -> "list[tuple[Tensor, Tensor]] | None":
    """The chunk over itself, causal, and over its history, without a mask; one row over both at once. None where ``part`` does not serve
    one of them."""
    count = call.q.shape[2]
    ranges = ((start, start + count), *_history(start, count)) if count > 1 else ((0, start + 1),)
    found = []
    for first, last in ranges:
        one = part(call.q, *_cached(call, first, last), causal=first == start, scale=call.scale)
        if one is None:
            return None
        found.append(one)
    return found


def _history(start: int, count: int) -> Iterator[tuple[int, int]]:
    """Ranges that cover 0 .. start: one, or for large chunks behind whole ones as many of them as a power of two, largest first."""
    if count < LARGE or start % count:
        if start:
            yield 0, start
        return
    first = 0
    while left := (start - first) // count:
        length = count << (left.bit_length() - 1)
        yield first, first + length
        first += length


def merge(parts: "list[tuple[Tensor, Tensor]]", out: Tensor) -> None:
    """Write attention over several ranges of keys, each [1, H, T, D] with its logsumexp, as attention over all of them to ``out``.

    Weights and sums are fp32, rounded once at the end.
    """
    if len(parts) == 1:
        out.copy_(parts[0][0])
        return
    weights = torch.stack([lse.reshape(out.shape[:3]) for _, lse in parts]).softmax(0).unsqueeze(-1)
    total = parts[0][0] * weights[0]
    for (rows, _), weight in zip(parts[1:-1], weights[1:-1], strict=True):
        total.addcmul_(rows, weight)
    torch.addcmul(total, parts[-1][0], weights[-1], out=out)


def _cached(call: AttentionCall, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Cached K and V [1, KV, last - first, ..] of some positions."""
    return call.k_cache[:, first:last].transpose(1, 2), call.v_cache[:, first:last].transpose(1, 2)


def _by_blocks(call: AttentionCall, start: int, out: Tensor) -> None:
    """Under a mask, some rows at a time, each over the positions that one of them sees: whatever the operator's arguments say."""
    count = call.q.shape[2]
    step = _rows_at_a_time(call, start + count)
    for at in range(0, count, step):
        q = call.q[:, :, at : at + step]
        begin, end = start + at, start + at + q.shape[2]
        first = max(0, begin - call.window + 1) if call.window > 0 else 0
        keys, values = _cached(call, first, end)
        ahead = torch.arange(first, end, device=q.device)[None, :] - torch.arange(begin, end, device=q.device)[:, None]
        mask = ahead <= 0
        if call.window > 0:
            mask &= ahead > -call.window
        if _is_plain(call):
            found = grouped_sdpa(q, keys, values, mask, call.scale)
        else:
            found = capped(evolve(call, q=q), keys, values, mask, ahead)
        out[:, at : at + step].copy_(found.transpose(1, 2))


def _rows_at_a_time(call: AttentionCall, live: int) -> int:
    """So many that scores over ``live`` keys, or the mask of all rows that share K and V, are of bounded size."""
    heads, dim, kv_heads = call.q.shape[1], call.q.shape[3], call.k_cache.shape[2]
    keeps = _is_plain(call) and call.q.dtype is not torch.float64 and not dim % ALIGNED and not call.v_cache.shape[3] % ALIGNED
    scores = PLAIN_SCORES // max(heads, 4 * heads // kv_heads) if keeps else SCORES // heads
    return max(16, scores // live)
