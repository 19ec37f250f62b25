"""Error rules of attention: ``agentcompile::attention`` appends K and V, then attends causally; torch's own attends under any mask.

To first order, a score s_j that is off by d_j moves the output by ``sum p_j d_j (v_j - out)``. What is independent from
position to position adds up like a root of squares; what q brings along is common to all positions, so it is propagated
through the exact slope ``scale sum p_j k_j (v_j - out)``. Neither grows with the number of positions, so that a position
left out shows.
"""

import torch
from attrs import frozen
from torch import Tensor

from ...ir.graph import DType
from .bounded import F32_MAX, TAIL, TINY, U32, UNIT_ROUNDOFF, Bounded, sum_size, worst_among

ACCUMULATED = 0.61  # as SPREAD, of values weighted by a softmax
WEIGHTS = 0.6  # the same of the sum of the weights, which several lanes share
# What sums of a few large terms err more: they may come first, and every later step rounds a sum that is large already. Sums of 12
# terms alike or more have none of it, sums of 3 or fewer all. Torch's own scores came to 1.6 of the bound without it.
OF_FEW, MOST_OF_FEW = 2.5, 12.0
EARLY = 2.25  # what sums of few terms err more than those of many, whose partial sums grow evenly
ALIKE = 1.0  # what sums of terms that are all alike err more: they are all rounded to the same side while the sum stays in one binade
# A sum of one accumulator over the positions in their order errs like a walk of roundings, each uniform over a step of the partial sum that
# it makes: the root of a third of a roundoff of the power of two below. Weights are scaled by the largest score so far, so that a power
# of two may lie anywhere below: on average it is 0.74 of a partial sum. This is 4.7 standard deviations, as of a linear layer's single row.
WALKED = 2.0
PLACES = 32  # at which partial sums are looked at; between them they move by less than they are large


def _times(a: Tensor, b: Tensor) -> Tensor:
    """``a`` [KV, G, T, X] times ``b`` [KV, 1, X, Y]: one product per KV head, where broadcasting would copy ``b`` for each query head."""
    heads, group, count, inner = a.shape
    return torch.bmm(a.reshape(heads, group * count, inner), b[:, 0]).view(heads, group, count, b.shape[-1])


def append(cache: Bounded, rows: Bounded, position: int) -> Bounded:
    """``cache`` [1, S, KV, D] with ``rows`` [1, KV, T, D] from ``position`` on; rows beyond S are dropped."""
    kept = min(rows.value.shape[2], cache.value.shape[1] - position)
    value, error = cache.value.clone(), cache.error.clone()
    if kept > 0:
        value[:, position : position + kept] = rows.value[:, :, :kept].transpose(1, 2)
        error[:, position : position + kept] = rows.error[:, :, :kept].transpose(1, 2)
    return Bounded(value, error)


@frozen(kw_only=True)
class Attending:
    """What an attention call says beside its tensors. ``window`` counts the query itself, 0: none; ``softcap`` 0: none; ``slopes``
    one number per query head, which times the distance is subtracted from a score, empty: none; ``chunk``: a query sees the
    positions of its own chunk of so many alone, 0: no chunks.

    Flash kernels may round the probabilities to the element type before they multiply V, hence ``dtype``; ``depth`` is that
    of the error budget.
    """

    position: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    slopes: tuple[float, ...] = ()
    chunk: int = 0
    dtype: DType
    depth: int


@frozen(kw_only=True, eq=False)
class _Heads:
    """One KV head's operands by its query heads: q [KV, G, T, D]; k and v [KV, 1, L, D]; the softmax p and scores s [KV, G, T, L].

    ``v_size``, ``v_square`` and ``k_size``: of every element, made once. ``slope``: of the soft cap. ``sunk``: the share of the
    softmax that a sink takes.
    """

    q: Bounded
    k: Bounded
    v: Bounded
    v_size: Tensor
    v_square: Tensor
    k_size: Tensor
    p: Tensor
    s: Tensor
    slope: Tensor
    sunk: Tensor
    out: Tensor
    how: Attending


def attention(q: Bounded, keys: Bounded, values: Bounded, sinks: Bounded | None, how: Attending) -> Bounded:
    """``q`` [1, H, T, D] over the appended caches [1, S, KV, D]; the result is [1, T, H, D].

    A row with a score of plus infinity, or with none above minus infinity, has no softmax: the formula says NaN, and torch's
    fused attention says 0, or NaN, by element type. An infinite V gives infinity, or NaN where its weight is rounded to zero
    or kept in two parts. Sums beyond float32 give either. Nothing is demanded of these. A score that is NaN makes its row NaN.
    """
    _, heads, count, dim = q.value.shape
    kv_heads = keys.value.shape[2]
    live = min(how.position + count, keys.value.shape[1])
    seen = _mask(live, count, how, q.value.device)
    k, v = (_attended(x, live, seen.any(0)) for x in (keys, values))
    grouped = (kv_heads, heads // kv_heads, count, dim)
    rows = Bounded(q.value.reshape(grouped), q.error.reshape(grouped))
    found = _attended_by(rows, k, v, seen, _bias(how, grouped, live, q.value.device), sinks, how)
    shape = (1, heads, count, v.value.shape[-1])
    return Bounded(found.value.reshape(shape).transpose(1, 2), found.error.reshape(shape).transpose(1, 2))


def masked_attention(q: Bounded, k: Bounded, v: Bounded, mask: Tensor | None, causal: bool, how: Attending) -> Bounded:
    """``q`` [B, H, T, D] over k and v [B, KV, S, ..] under a mask that repeats to [B, H, T, S]: bool, what is seen, or what is added.

    Nothing is demanded of a row that sees nothing, nor of one beside a score or a V that it does not see and that is not finite:
    torch adds minus infinity to the one and multiplies the other by zero, or leaves them out.
    """
    batch, heads, count, dim = q.value.shape
    kv_heads, length, wide = k.value.shape[1], k.value.shape[2], v.value.shape[3]
    grouped = (batch * kv_heads, heads // kv_heads, count, length)
    seen = torch.ones(count, length, dtype=torch.bool, device=q.value.device)
    seen = (seen.tril() if causal else seen).expand(batch, heads, count, length)
    added = torch.zeros((), dtype=torch.float64, device=seen.device)
    if mask is not None and mask.dtype is torch.bool:
        seen = seen & mask
    elif mask is not None:
        added = mask.double().expand(batch, heads, count, length).reshape(grouped)
        seen = seen & (mask != float("-inf"))
    rows, keys, values = (Bounded(x.value.reshape(shape), x.error.reshape(shape)) for x, shape in (
        (q, (*grouped[:3], dim)), (k, (grouped[0], 1, length, dim)), (v, (grouped[0], 1, length, wide))))
    seen = seen.reshape(grouped)
    kept = Bounded(values.value.nan_to_num(posinf=0.0, neginf=0.0), values.error)
    found = _attended_by(rows, keys, kept, seen, added, None, how)
    value = torch.where(_times(seen.double(), values.value.isnan().double()) > 0, float("nan"), found.value)
    scores = _times(rows.value, keys.value.transpose(-1, -2))
    beside = _times((~seen).double(), (~values.value.isfinite()).double()) + _times(seen.double(), values.value.isinf().double())
    unknown = ((beside > 0) | (~seen & ~scores.isfinite()).any(-1, keepdim=True)) & ~value.isnan()
    shape = (batch, heads, count, wide)
    return Bounded(torch.where(unknown, 0.0, value).reshape(shape), torch.where(unknown, torch.inf, found.error).reshape(shape))


def _attended_by(rows: Bounded, k: Bounded, v: Bounded, seen: Tensor, bias: Tensor, sinks: Bounded | None, how: Attending) -> Bounded:
    """[KV, G, T, D] of rows [KV, G, T, D] over k and v [KV, 1, L, D], where ``seen`` [.., T, L], with ``bias`` added to the scores."""
    scores = _times(rows.value, k.value.transpose(-1, -2)) * how.scale
    slope = torch.ones((), dtype=torch.float64, device=scores.device)
    if how.softcap:
        capped = torch.tanh(scores / how.softcap)
        scores, slope = capped * how.softcap, 1.0 - capped**2
    scores = scores + bias
    scores = scores.masked_fill(~seen, float("-inf"))
    p, sunk = _probabilities(scores, sinks, k.value.shape[0])
    out = _times(p, v.value)
    k_size, v_size, v_square = k.value.abs(), v.value.abs(), v.value.square()
    found = _Heads(q=rows, k=k, v=v, k_size=k_size, v_size=v_size, v_square=v_square, p=p, s=scores, slope=slope, sunk=sunk,
                   out=out, how=how)
    highest = scores.amax(-1, keepdim=True)  # NaN where one is
    largest = _times(rows.value.abs(), k_size.transpose(-1, -2)).masked_fill(~seen, 0.0).amax(-1, keepdim=True)
    undefined = highest.isinf() | out.isinf() | (largest >= F32_MAX) | (_times(p, v_size) >= F32_MAX)
    many = worst_among(out.numel() // out.shape[-1])  # rows: elements of one share the errors of its scores
    return Bounded(torch.where(undefined, 0.0, out), torch.where(undefined, torch.inf, many * _output_error(found, seen)))


def _bias(how: Attending, grouped: tuple[int, int, int, int], live: int, device: torch.device) -> Tensor:
    """What the slopes add to the scores [KV, G, T, L]."""
    if not how.slopes:
        return torch.zeros((), dtype=torch.float64, device=device)
    kv_heads, group, count, _ = grouped
    rows = torch.arange(count, device=device)[:, None] + how.position
    slopes = torch.tensor(how.slopes, dtype=torch.float64, device=device).reshape(kv_heads, group, 1, 1)
    return slopes * (torch.arange(live, device=device)[None, :] - rows)


def _mask(live: int, count: int, how: Attending, device: torch.device) -> Tensor:
    columns = torch.arange(live, device=device)[None, :]
    rows = torch.arange(count, device=device)[:, None] + how.position
    mask = columns <= rows
    if how.window > 0:
        mask &= columns > rows - how.window
    return mask & (columns // how.chunk == rows // how.chunk) if how.chunk > 0 else mask


def _attended(cache: Bounded, live: int, seen: Tensor) -> Bounded:
    """[KV, 1, live, D] of a cache [1, S, KV, D]; zero at positions that no row attends to, which may hold anything."""
    value, error = (t[0, :live].masked_fill(~seen[:, None, None], 0.0) for t in (cache.value, cache.error))
    return Bounded(value.transpose(0, 1).contiguous().unsqueeze(1), error.transpose(0, 1).contiguous().unsqueeze(1))


def _probabilities(scores: Tensor, sinks: Bounded | None, kv_heads: int) -> tuple[Tensor, Tensor]:
    if sinks is None:
        return scores.softmax(-1), torch.zeros((), dtype=torch.float64, device=scores.device)
    group, count = scores.shape[1:3]
    column = sinks.value.reshape(kv_heads, group, 1, 1).expand(kv_heads, group, count, 1)
    both = torch.cat((scores, column), -1).softmax(-1)
    return both[..., :-1], both[..., -1:]


def _spread(weights: Tensor, at: _Heads, power: int = 1) -> Tensor:
    """``sum w_j |v_j - out|^power`` for weights that are not negative, power 1 (an upper bound, by Cauchy and Schwarz) or 2."""
    total = weights.sum(-1, keepdim=True)
    square = _times(weights, at.v_square) - 2.0 * at.out * _times(weights, at.v.value) + at.out**2 * total
    square = square.clamp_min(0.0) + 2.0**-48 * at.out**2 * total
    return square if power == 2 else (total * square).sqrt()


def _output_error(at: _Heads, seen: Tensor) -> Tensor:
    p, how = at.p, at.how
    alone, shared = _score_errors(at)
    alone, shared = (torch.where(seen, x, 0.0) for x in (alone, shared))
    # Beyond the first order: what the exponential of the whole error adds.
    whole = (alone + shared).clamp_max(50.0)
    brought = torch.minimum(_through_query(at), _spread(p * shared, at))
    error = (_spread((p * alone) ** 2, at, power=2) + brought.square()).sqrt()
    error = error + _spread((p * (whole.expm1() - whole)) ** 2, at, power=2).sqrt()
    scores = error / ((p * (-whole).exp()).sum(-1, keepdim=True) + at.sunk)
    rows, width = at.out.numel() // at.out.shape[-1], at.out.shape[-1]
    root = min(how.depth, p.shape[-1]) ** 0.5
    weights = (WEIGHTS * root + 2.0) * U32 * at.out.abs()  # their sum, and the sink
    squares = _times(p.square(), at.v_square)
    alike = at.out.square() / (seen.sum(-1, keepdim=True) * squares)  # 1 where all terms are one
    alike = alike.nan_to_num(nan=0.0, posinf=0.0).clamp_max(1.0)
    absolute = _times(p, at.v_size)
    early = torch.maximum(ALIKE * alike, EARLY * _of_few(squares, absolute))  # why partial sums are large from early on
    among = worst_among(rows * width) / worst_among(rows)  # each element has a sum of its own
    wandering = ACCUMULATED * (1.0 + early) * root * sum_size(at.out, absolute, squares)
    added = among * U32 * torch.maximum(wandering, WALKED * _walked(at, seen))
    part = UNIT_ROUNDOFF[how.dtype] * p + TINY[how.dtype]
    parts = torch.minimum(TAIL * _times(part.square(), at.v_square).sqrt(), _times(part, at.v_size))
    # Scores, weights, sums and what is rounded between them err on their own: together like the root of their squares.
    error = (scores.square() + weights.square() + added.square() + parts.square()).sqrt()
    if bool(at.v.error.any()):
        error = error + torch.minimum(TAIL * _times(p.square(), at.v.error.square()).sqrt(), _times(p, at.v.error))
    return error


def _walked(at: _Heads, seen: Tensor) -> Tensor:
    """The root of the sum of the squares of the partial sums of the weighted V, [KV, G, T, Dv], from whichever end they are larger.

    What ``sum_size`` says of terms in no order that the data knows holds for most of them. Some go far from where they end, and stay
    there: every addition on the way rounds a sum that is larger than that. Hidden positions add nothing, and round nothing.
    """
    length = at.p.shape[-1]
    step = max(1, length // PLACES)
    made, first, last = torch.zeros_like(at.out), torch.zeros_like(at.out), torch.zeros_like(at.out)
    for begin in range(0, length, step):
        here = slice(begin, begin + step)
        count = seen[..., here].sum(-1, keepdim=True)
        last += count * (at.out - made).square()
        made = made + _times(at.p[..., here], at.v.value[:, :, here])
        first += count * made.square()
    return torch.maximum(first, last).sqrt()


def _of_few(squares: Tensor, absolute: Tensor) -> Tensor:
    """How far a sum is one of few large terms: 0 for MOST_OF_FEW alike or more, 1 for a quarter of that; ``absolute``: of magnitudes."""
    alike = absolute.square() / squares  # terms that would have the same two sums
    return ((MOST_OF_FEW / alike - 1.0) / 3.0).nan_to_num(nan=0.0, posinf=0.0).clamp(0.0, 1.0)


def _score_errors(at: _Heads) -> tuple[Tensor, Tensor]:
    """Of every score: what is independent of the other positions, and what q brings along.

    Independent are the dot product, K, the exponential; and rescaling, which is common to the positions of one part only.
    """
    how, dim = at.how, at.q.value.shape[-1]
    q, k = at.q.value, at.k.value.transpose(-1, -2)
    k_size, k_square = at.k_size.transpose(-1, -2), at.k.value.square().transpose(-1, -2)
    squares = _times(q.square(), k_square)
    absolute = _times(q.abs(), k_size)
    size = sum_size(_times(q, k), absolute, squares)
    added = 0.4 * dim**0.5 * (1.0 + OF_FEW * _of_few(squares, absolute))
    alone = at.slope * (added + 1.2) * U32 * size * abs(how.scale)
    scores = at.s.nan_to_num(neginf=0.0).abs().clamp_max(F32_MAX)
    below = (at.s.amax(-1, keepdim=True) - at.s).nan_to_num(nan=0.0, posinf=0.0)
    alone = alone + (4.0 + scores + below + (8.0 * how.softcap if how.softcap else 0.0)) * U32
    if how.slopes:  # a slope in units of log2, and its product with the distance
        alone = alone + 2.0 * U32 * _bias(how, (*at.s.shape[:3], dim), at.s.shape[-1], at.s.device).abs()
    shared = torch.zeros_like(alone)
    steep = at.slope * abs(how.scale)
    if bool(at.q.error.any()):
        shared = steep * torch.minimum(TAIL * _times(at.q.error.square(), k_square).sqrt(), _times(at.q.error, k_size))
    if bool(at.k.error.any()):
        error = at.k.error.transpose(-1, -2)
        alone = alone + steep * torch.minimum(TAIL * _times(q.square(), error.square()).sqrt(), _times(q.abs(), error))
    return alone, shared


def _through_query(at: _Heads) -> Tensor:
    """What the error of q does to the output, to first order: a row of q at a time, for its slope is [D, Dv]."""
    if not bool(at.q.error.any()):
        return torch.zeros_like(at.out)
    weights = at.p * at.slope * at.how.scale
    rows = []
    for t in range(at.q.value.shape[2]):
        weighted = weights[:, :, t, :, None] * at.k.value  # [KV, G, L, D]
        moved = torch.stack([torch.bmm(one.transpose(-1, -2), at.v.value[:, 0]) for one in weighted.unbind(1)], 1)
        slope = moved - weighted.sum(-2)[..., None] * at.out[:, :, t, None, :]
        error = at.q.error[:, :, t, None, :]
        rows.append(torch.minimum(TAIL * (error**2 @ slope**2).sqrt(), error @ slope.abs()))
    return torch.cat(rows, 2)
