"""Error rules of what sums: linear maps, norms, softmax, argmax.

Roundings of different elements are independent, so a sum of n of them grows like the root of the sum of their squares
(times 2, far beyond any tail that occurs: a bound is 2.7 standard deviations), never more than the plain sum of their
bounds. The accumulator's own error is ``0.9 sqrt(d) u32 S`` with d the length and S what partial sums may grow to: |A||B|, or
where that is less |ref| + 2 sqrt(sum (a b)^2), since inputs are drawn without an order (Higham and Mary; Ipsen and Zhou). Sums of a
single row in float32 have a rule of their own (``walks``).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...ir.graph import DType
from .bounded import (
    BESIDE,
    SPREAD,
    STORED,
    TAIL,
    TINY,
    U32,
    UNIT_ROUNDOFF,
    Bounded,
    dominance,
    in_blocks,
    overflowing,
    representable,
    sum_size,
    times,
    worst_among,
)
from .pointwise import FLUSHED, unary
from .walks import added_alone

BLOCK_ELEMENTS, CACHED_ELEMENTS = 1 << 25, 1 << 18  # float64 weights at a time: 256 MiB; 2 MiB on the host, whose caches hold them
EXACT_SUM = 2.0**24  # integers up to here are exact in float32
REPEATED = 16.0  # roundoffs of a sum: smaller terms that are alike are all rounded alike
# Nobody adds more exponentials one by one than so many roots of a row's length; nor more than ALONE, but for a share of longer rows.
LONGEST, ALONE, SHARE = 32.0, 1024.0, 1 / 8
ROOT = 3.0  # roundoffs of the root of a norm and of the product with it: the device's rsqrtf errs by up to four, rarely by three
EARLY = 0.75  # what partial sums that are large from the start err more than those that grow evenly


def linear(x: Bounded, weight: Tensor, bias: Bounded | None, depth: int, element: torch.dtype | None) -> Bounded:
    """``x`` [.., k] times ``weight`` [n, k] transposed, plus ``bias`` [n]; in blocks of rows, so that any n fits.

    ``element``: the type of the layer; what half precision stores is rounded by far more than any walk of float32.
    """
    n, k = weight.shape
    rows = x.value.reshape(-1, k)
    errors = x.error.reshape(-1, k)
    noisy = not x.is_exact
    integers = not noisy and bool((rows == rows.round()).all())
    alone = rows.shape[0] == 1
    walked = alone and element not in (torch.float16, torch.bfloat16)
    single = not noisy and int((rows != 0).sum(-1).max()) <= 1
    values, bounds = [], []
    block = max(1, (CACHED_ELEMENTS if weight.device.type == "cpu" else BLOCK_ELEMENTS) // k)
    for start in range(0, n, block):
        w = weight[start : start + block].double()
        value = rows @ w.T
        size = rows.abs() @ w.abs().T
        squares = (rows**2) @ (w**2).T
        if walked:
            error = added_alone(w, rows[0], depth, value, squares, n)
        else:
            error = _accumulated(depth, value, size, squares, 0 if alone else rows.shape[0] * n)
        error = overflowing(error, size)
        if single or (integers and bool((w == w.round()).all())):
            error = torch.where((size < EXACT_SUM) & representable(value, DType.F32), 0.0, error)
        if noisy:
            among = worst_among(rows.shape[0] * n)  # each result adds up the same errors by other weights: the worst of many is farther off
            error = torch.hypot(error, torch.minimum(among * TAIL * ((errors**2) @ (w**2).T).sqrt(), errors @ w.abs().T))
        values.append(value)
        bounds.append(error)
    shape = (*x.value.shape[:-1], n)
    result = Bounded(torch.cat(values, -1).reshape(shape), torch.cat(bounds, -1).reshape(shape))
    if bias is None:
        return result
    total = result.value + bias.value
    error = result.error + bias.error
    free = (error == 0) & representable(total, DType.F32)
    return Bounded(total, torch.where(free, 0.0, error + 2.0 * U32 * total.abs()))


def _accumulated(depth: int, total: Tensor, absolute: Tensor, squares: Tensor, count: int) -> Tensor:
    """What accumulators err that add ``depth`` products one by one for each of ``count`` results; 0: of a single row, which lanes share.

    Beside one product that is nearly all of a sum, partial sums are large from there on: the root of squares is then all of the size,
    and processors that add in other orders have come to 2.2 of the plain bound.
    """
    size = sum_size(total, absolute, squares)
    error = SPREAD * depth**0.5 * U32 * size
    return worst_among(count) * error * (1.0 + BESIDE * dominance(squares, size)) if count else error


def matmul(a: Bounded, b: Bounded, depth: int, product: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Bounded:
    """``a`` [.., m, k] times ``b`` [.., k, n], or any other sums of ``depth`` products of two, as ``product`` makes them."""
    x, y = a.value.double(), b.value.double()
    value, size = product(x, y), product(x.abs(), y.abs())
    error = overflowing(_accumulated(depth, value, size, product(x**2, y**2), value.numel()), size)
    for e, other, left in ((a.error, y, True), (b.error, x, False)):
        if bool(e.any()):
            spread = product(e**2, other**2) if left else product(other**2, e**2)
            plain = product(e, other.abs()) if left else product(other.abs(), e)
            error = error + torch.minimum(TAIL * spread.sqrt(), plain)
    return Bounded(value, error)


def rms_norm(x: Bounded, weight: Bounded | None, eps: float, one_plus: bool, inner: DType | None, depth: int) -> Bounded:
    """RMS norm over the last axis; the normalized row is rounded to ``inner`` before the weight (None: it is not)."""
    power = x.value.pow(2).mean(-1, keepdim=True) + eps
    scale = power.rsqrt()
    count = x.value.shape[-1]
    normal = x.value * scale
    shared = TAIL * times(x.value, x.error).pow(2).sum(-1, keepdim=True).sqrt() / (count * power)
    error = times(scale, x.error) + normal.abs() * (shared + (0.25 * in_blocks(depth) ** 0.5 + ROOT) * U32)
    if inner is not None:
        error = error + STORED * UNIT_ROUNDOFF[inner] * normal.abs() + TINY[inner]
    return _scaled(normal, overflowing(error, power * count), weight, one_plus)


def _scaled(normal: Tensor, error: Tensor, weight: Bounded | None, one_plus: bool = False) -> Bounded:
    if weight is None:
        return Bounded(normal, error)
    factor = weight.value + 1.0 if one_plus else weight.value
    value = normal * factor
    return Bounded(value, times(factor.abs(), error) + times(normal.abs(), weight.error))


def layer_norm(x: Bounded, weight: Bounded | None, bias: Bounded | None, eps: float, depth: int) -> Bounded:
    """Layer norm over the last axis, in float32, rounded once."""
    mean = x.value.mean(-1, keepdim=True)
    centred = x.value - mean
    variance = centred.pow(2).mean(-1, keepdim=True) + eps
    scale = variance.rsqrt()
    normal = centred * scale
    count = x.value.shape[-1]
    size = sum_size(mean * count, x.value.abs().sum(-1, keepdim=True), x.value.pow(2).sum(-1, keepdim=True)) / count
    mean_error = TAIL * x.error.pow(2).sum(-1, keepdim=True).sqrt() / count + (in_blocks(depth) ** 0.5 + 2.0) * U32 * size
    centred_error = x.error + mean_error + U32 * centred.abs()
    # An error of the mean is common to all: it adds its square to the variance. The rest is independent.
    shared = TAIL * (centred * (x.error + U32 * centred.abs())).pow(2).sum(-1, keepdim=True).sqrt() / (count * variance)
    shared = shared + mean_error.pow(2) / variance
    error = times(scale, centred_error) + normal.abs() * (shared + (0.25 * in_blocks(depth) ** 0.5 + ROOT) * U32)
    result = _scaled(normal, overflowing(error, variance * count), weight)
    if bias is None:
        return result
    total = result.value + bias.value
    return Bounded(total, result.error + bias.error + 2.0 * U32 * (result.value.abs() + total.abs()))


def softmax(x: Bounded, dim: int, depth: int, dtype: DType = DType.F32) -> Bounded:
    """Softmax: p_j errs by p_j times (its score's error + the mean error of the scores + the sum's); far below the maximum the
    difference itself is rounded, and what leaves float32 flushes to zero. Nothing is known of a row with a score of which nothing is."""
    value, _, noise, shared = scores(x, dim)
    reach = noise + shared
    grow = torch.where(reach.isfinite(), reach.clamp_max(50.0).expm1(), torch.inf)
    return Bounded(value, value * (grow + total(value, dim, depth)) + FLUSHED)


def log_softmax(x: Bounded, dim: int, depth: int, dtype: DType = DType.F32) -> Bounded:
    """Log-softmax: the error of the score, their mean error, the sum's, and the roundings of two differences and of the logarithm.

    On processors torch rounds the difference, the sum and its logarithm to ``dtype`` on the way.
    """
    probability, below, noise, shared = scores(x, dim)
    value = x.value.log_softmax(dim)
    logarithm = (value + below).abs().nan_to_num(posinf=0.0)
    inner = STORED * UNIT_ROUNDOFF[dtype] if dtype in (DType.F16, DType.BF16) else 2.0 * U32
    roundings = inner * (1.0 + below + logarithm) + 2.0 * U32 * value.abs().nan_to_num(posinf=0.0)
    error = noise + shared + 0.5 * shared**2 + total(probability, dim, depth) + roundings
    return Bounded(value, overflowing(torch.where(value.isfinite(), error, 0.0), below))


def scores(x: Bounded, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The softmax of ``x``, how far each score is below the maximum, its error, and the mean error. A mask's -inf stays what it is."""
    value = x.value.softmax(dim)
    below = (x.value.amax(dim, keepdim=True) - x.value).nan_to_num(nan=0.0, posinf=0.0)
    noise = torch.where(x.value.isfinite(), x.error.nan_to_num(posinf=torch.inf) + below * U32, 0.0)
    return value, below, noise, (value.nan_to_num() * noise).sum(dim, keepdim=True)


def total(probability: Tensor, dim: int, depth: int) -> Tensor:
    """The relative error of a row's sum of exponentials, of the exponential and of the division.

    Partial sums that begin with the largest term are as large as the whole from then on, and beside a term that is nearly all of
    it, terms of a few roundoffs that are alike are rounded the same way again and again.
    """
    p = probability.nan_to_num()
    largest = p.amax(dim, keepdim=True)
    repeated = torch.where(p < REPEATED * U32, p.clamp_max(U32), 0.0).sum(dim, keepdim=True) * largest
    chain = min(float(depth), LONGEST * depth**0.5, max(ALONE, SHARE * depth))
    return (SPREAD * chain**0.5 * (1.0 + EARLY * largest) + 5.0) * U32 + repeated


def argmax(x: Bounded) -> Bounded:
    """First index of the maximum over all elements, as int64 [1]; ``choices`` marks every index that the errors allow."""
    flat, error = x.value.reshape(-1), x.error.reshape(-1)
    error = torch.where(flat.isfinite(), error.nan_to_num(nan=torch.inf), 0.0)
    index = flat.argmax().reshape(1)
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    if bool(flat.isnan().any()) or not bool(error.any()):
        chosen[index] = True
    else:
        chosen = flat + error >= (flat - error).max()
    return Bounded(index, torch.zeros(1, dtype=torch.float64, device=flat.device), chosen)


def rope(x: Bounded, cos: Bounded, sin: Bounded, dtype: DType, interleaved: bool = False) -> Bounded:
    """Rotation of the first R channels of ``x`` [1, H, T, D]; cos, sin [1, T, R]; both products round to ``dtype``."""
    width = cos.value.shape[-1]
    c, s = (Bounded(t.value.unsqueeze(1), t.error.unsqueeze(1)) for t in (cos, sin))
    turned, turned_error = x.value[..., :width], x.error[..., :width]
    other = partners(width, interleaved, x.value.device)
    sign = torch.where(other > torch.arange(width, device=other.device), -1.0, 1.0)
    swapped, swapped_error = turned[..., other] * sign, turned_error[..., other]
    first, second = turned * c.value, swapped * s.value
    error = times(c.value.abs(), turned_error) + times(s.value.abs(), swapped_error)
    error = error + times(turned.abs(), c.error) + times(swapped.abs(), s.error)
    error = error + STORED * UNIT_ROUNDOFF[dtype] * (first.abs() + second.abs()) + 2.0 * TINY[dtype]
    zero = (turned == 0) & (swapped == 0) & (turned_error == 0) & (swapped_error == 0)
    error = torch.where(zero, 0.0, error)
    value = first + second
    return Bounded(torch.cat((value, x.value[..., width:]), -1), torch.cat((error, x.error[..., width:]), -1))


def partners(width: int, interleaved: bool, device: torch.device) -> Tensor:
    """The channel that each of ``width`` channels is rotated with; the first of a pair subtracts its partner."""
    channel = torch.arange(width, device=device)
    return channel ^ 1 if interleaved else (channel + width // 2) % width


def rotary_table(positions: Tensor, inv_freq: Bounded, scaling: float, interleaved: bool = False) -> tuple[Bounded, Bounded]:
    """cos and sin [1, T, 2 * half]; the angle is a float32 product, which errs by u32 of itself."""
    angles = positions.double()[:, :, None] * inv_freq.value[None, None, :]
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    angle = Bounded(angles, STORED * U32 * angles.abs())
    tables = []
    for name in ("cos", "sin"):
        table = unary(name, angle)
        # Not the fast variants: a few units of the result's scale, whatever the angle.
        slope = (angles.sin() if name == "cos" else angles.cos()).abs()
        error = slope * angle.error + 0.5 * angle.error**2 + 4.0 * U32
        tables.append(Bounded(table.value * scaling, error * abs(scaling)))
    return tables[0], tables[1]
