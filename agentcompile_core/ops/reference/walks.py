"""The error rule of the sums of a single row: what the additions of an honest order round, by the partial sums that they make.

An addition rounds by at most half a step of its result, so that the error of a sum is a walk of as many such roundings, and normal with
a deviation that its partial sums give: the root of a third of the squares of their powers of two. How large partial sums become hangs
on the order. Terms in no order that the data knows about wander, and some walks come far: what covers all of them is several
times as wide as what framework and kernels err, who deal a row out to many accumulators. So the orders in which few accumulators
add a row are looked at one by one, and what covers the others has room for those of four accumulators and more.
"""

import torch
from torch import Tensor

from .bounded import U32, worst_among

POINTS = 64  # at which partial sums are looked at; between them they move by less than they are large
WALKED = 2.7  # roundoffs of a walk: 4.7 standard deviations of its roundings (each is uniform: the root of a third of a roundoff)
DEALT, DEALT_TOTAL = 0.85, 0.25  # as WALKED, of four accumulators or more in any order: of the root of the squares, and of the result
PIECES = (1, 2, 4)  # into which a row is cut; an accumulator adds each from its first term to its last
EXPONENT = 0x7FF0000000000000  # of a float64: what is left of it is the power of two below


def added_alone(weight: Tensor, row: Tensor, depth: int, total: Tensor, squares: Tensor, count: int) -> Tensor:
    """What accumulators err that add ``depth`` products of ``row`` [k] and each row of ``weight`` [n, k], float64: [1, n] like ``total``.

    ``total`` and ``squares`` are the sums of the products and of their squares. Kernels may add one by one from the first term to the
    last, deal terms out by turns to two accumulators, cut the row into halves or quarters, or use four and more accumulators in any order.
    """
    roundings = torch.maximum(DEALT * squares.sqrt() + DEALT_TOTAL * total.abs(), WALKED * _walked(weight, row).sqrt())
    return worst_among(count) * U32 * depth**0.5 * roundings.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _walked(weight: Tensor, row: Tensor) -> Tensor:
    """The mean square of the power of two below each partial sum, [n], in that order of few accumulators in which it is largest."""
    k = row.shape[0]
    step = max(1, k // POINTS)
    points = k // step
    second = torch.arange(k, device=row.device) % 2 == 1
    by_turns = torch.stack((row.masked_fill(second, 0.0), row.masked_fill(~second, 0.0)), -1)
    seen = points * step  # the few terms behind add less than a point more would
    terms = weight[:, :seen].unflatten(1, (points, step)).transpose(0, 1)
    shared = torch.bmm(terms, by_turns[:seen].unflatten(0, (points, step))).cumsum(0)
    largest = _steps(shared).mean(0).mean(-1)
    ends = shared[..., 0] + shared[..., 1]
    for pieces in PIECES:
        each = points // pieces
        if each:
            begun = torch.cat((torch.zeros_like(ends[:1]), ends[each - 1 : pieces * each - 1 : each]))
            parts = ends[: pieces * each].unflatten(0, (pieces, each)) - begun[:, None]
            largest = torch.maximum(largest, _steps(parts).flatten(0, 1).mean(0))
    return largest


def _steps(sums: Tensor) -> Tensor:
    """The square of the power of two below the magnitude of each, 0 for 0."""
    return (sums.view(torch.int64) & EXPONENT).view(torch.float64).square()
