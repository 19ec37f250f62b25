"""Inputs of softmax and reductions under which a sum kept in half precision shows; what ``sums`` says of them holds here.

``swamped``: the weights of a softmax, and the terms of a reduction, are large ones among small ones that lie just below half a
step of theirs in 16 bits. Of reductions in bf16 the large ones lie beyond fp16's range. ``swamped_half``: the same for a softmax in
bf16 whose sum is kept in fp16, with steps of fp16. ``swamped_mean``: elements of a variance some steps beside a mean that lies
between two numbers. ``off_step``: the sum of a softmax or a mean is such that a rounding of it shows most. ``rows_apart``: every second
row of scores lies far above the others, so that no row can do with the maximum of its neighbour.
"""

import math

import torch
from torch import Tensor

from agentcompile_core.plugin_api import Case, DType, InputFamily, Match, Operand

from .solving import Solution, solved
from .sums import FEW, FP16_HALF_STEP, NARROW, SHARES, SWAMPED, SWAMPED_MEAN, VECTOR, seeded

SWAMPED_HALF, OFF_STEP, ROWS_APART = "swamped_half", "off_step", "rows_apart"
APART = 1024.0  # exponentials of such a distance are zero, also where scores are scaled by the root of a head's width
STORED = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}
LEVELS = 1024  # different numbers of each size: fewer would be rounded to one side in long sums of float32 as well
ALIKE = 0.12  # and large ones, whose halves of a step are those of a power of two
LEAST = 0.56  # of small terms, in half steps of a large one
LARGE_WEIGHT = 0.5  # of a softmax, whose largest weight is 1: so the large ones as well lie above a power of two
UNLIKE = 0.5  # how much small terms differ, so that float32 does not round all of them to one side
SPREAD = 2.0  # scores of ``off_step`` lie so far below the largest
BEGINNING = 4096  # elements of a row that hold its large ones, so that lanes go on with small ones; a sixteenth where that is more
ABOVE = 1.01  # results just above a power of two, where the store's own rounding leaves least of the budget
STEPS = (1, 1, 1, 0)  # of 16 bits, from which the elements of ``swamped_mean`` are drawn: most are rounded to one side
SPREADS = ("var", "std")
ROUNDED_AGAIN = ("mean",)  # what is stored is neither the sum itself nor a root, which halves its error
ADDED = ("sum", "mean", "l1", "l2", *SPREADS)  # the operators that add up
BEYOND_FP16 = 2.0**17
MOST_TERMS = 1 << 16  # of a reduction's row; what lies behind is zero, since processors add some rows one by one
DRAWN_FACTORS = (InputFamily.NORMAL, InputFamily.NORMAL_SMALL, InputFamily.SPIKY)  # the others keep their zeros, ends and ties
MOST_LARGE = 256  # in a row: with more, long sums in float32 that are added one by one lose of the small terms as well


def families(match: Match) -> tuple[str, ...]:
    """Those of a softmax or a reduction: by the type of its result, and by what it adds up."""
    out, op = match.operand("out"), match.text("op", "")
    apart = () if op or _scores(match) is None or match.integer("outer") * match.integer("inner", 1) < 2 else (ROWS_APART,)
    if out is None or out.spec.dtype not in NARROW or (op and op not in ADDED):
        return apart
    if op:
        return (SWAMPED, *([SWAMPED_MEAN] if op in SPREADS else [OFF_STEP] if op in ROUNDED_AGAIN else []))
    return (SWAMPED, SWAMPED_HALF, OFF_STEP, *apart) if out.spec.dtype is DType.BF16 else (SWAMPED, OFF_STEP, *apart)


def _scores(match: Match) -> str | None:
    """The operand that holds a number of its own for every score of a softmax."""
    count = math.prod(_shape(match))
    wanted = (o.name for o in match.operands if o.name.startswith("in") and o.spec.dtype.is_float and o.spec.numel == count)
    return next(wanted, None)


def _apart(match: Match, operand: Operand, case: Case, device: str) -> Tensor | None:
    if operand.name != _scores(match):
        return None
    outer, columns, inner = _shape(match)
    row = torch.arange(outer * inner, device=device).reshape(outer, 1, inner)
    drawn = torch.randn((outer, columns, inner), generator=seeded(case, 7, device), device=device)
    return (drawn + APART * (row % 2)).reshape(operand.spec.shape)


def of_rows(match: Match, operand: Operand, case: Case, device: str) -> Tensor | None:
    """An operand of either kind in these families; None: as the core draws it."""
    if case.family == ROWS_APART:
        return _apart(match, operand, case, device)
    make = _terms if match.text("op", "") else _weights
    found, index = make(match, case, device)
    if found is None:
        return None
    if operand.name == found.name:
        return torch.tensor(found.elements, device=device)[index].reshape(operand.spec.shape)
    constant = dict(found.constants).get(operand.name)
    return None if constant is None else torch.full(operand.spec.shape, constant, device=device)


def factors(match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
    """Factors of a product that stays in range, around 1 of either sign; None: as the core draws them."""
    if match.text("op", "") != "prod" or operand.name != "in0" or case.family not in DRAWN_FACTORS:
        return None
    drawn = torch.randn(operand.spec.shape, generator=generator, device=device)
    return drawn.sign() * (drawn.abs() * match.integer("columns") ** -0.5).exp()


def _half_step(match: Match) -> float:
    return 2.0**-8 if match.need("out").spec.dtype is DType.BF16 else FP16_HALF_STEP


def _shape(match: Match) -> tuple[int, int, int]:
    return match.integer("outer"), match.integer("columns"), match.integer("inner", 1)


def _sizes(match: Match, case: Case, share: float, device: str) -> Tensor:
    """For every element [outer, columns, inner] the number of its level: below LEVELS those of small terms, then those of large ones.

    Of rows in one piece every second has large ones where lanes begin that load vectors, and only there; elsewhere they stand
    anywhere. One element of each row is the last level.
    """
    generator, shape = seeded(case, 6, device), _shape(match)
    large = torch.rand(shape, generator=generator, device=device) < min(share, MOST_LARGE / shape[1])
    if shape[2] == 1:
        large[::2] = _heads(shape[1], device)[None, :, None]
    levels = torch.randint(0, LEVELS, shape, generator=generator, device=device) + LEVELS * large
    levels[:, VECTOR * (case.seed % -(-shape[1] // VECTOR))] = 2 * LEVELS
    return levels


def _heads(columns: int, device: str) -> Tensor:
    """The first elements of the first vectors of a row; as many as make the large weights of a softmax just more than a power of two."""
    most = min(MOST_LARGE, -(-min(columns, max(BEGINNING, columns // 16)) // VECTOR))
    power = 2.0 ** math.floor(math.log2(most * LARGE_WEIGHT * (1.0 + ALIKE / 2.0) + 1.0))
    kept = max(1, round((power / ABOVE - 1.0) / (LARGE_WEIGHT * (1.0 + ALIKE / 2.0))))
    place = torch.arange(columns, device=device)
    return (place % VECTOR == 0) & (place < kept * VECTOR)


def _unlike(size: float, differ: float) -> list[float]:
    return [size * (1.0 + differ * i / (LEVELS - 1)) for i in range(LEVELS)]


# ---- softmax

def _weights(match: Match, case: Case, device: str) -> tuple[Solution | None, Tensor]:
    if case.family == OFF_STEP:
        return _off_step(match, case, device)
    small = LEAST * (FP16_HALF_STEP if case.family == SWAMPED_HALF else _half_step(match))
    weights = [LARGE_WEIGHT * term for term in (*_unlike(small, UNLIKE), *_unlike(1.0, ALIKE))]
    share = FEW if case.family == SWAMPED_HALF else SHARES[1]
    return solved(match, (*map(math.log, weights), 0.0)), _sizes(match, case, share, device)


# ---- reductions

def _terms(match: Match, case: Case, device: str) -> tuple[Solution | None, Tensor]:
    if case.family == OFF_STEP:
        return _off_step(match, case, device)
    op, half_step = match.text("op"), _half_step(match)
    if case.family == SWAMPED_MEAN:
        steps = tuple(1.0 + 2.0 * half_step * i for i in STEPS)
        return solved(match, steps), torch.randint(0, len(STEPS), _shape(match), generator=seeded(case, 6, device), device=device)
    large = BEYOND_FP16 if half_step > FP16_HALF_STEP else 1.0
    terms = [large * term for term in (*_unlike(LEAST * half_step, UNLIKE), *_unlike(1.0, ALIKE), 1.0)]
    if op in ("l2", *SPREADS):
        terms = [math.sqrt(term) if half_step <= FP16_HALF_STEP else math.sqrt(term / BEYOND_FP16) * BEYOND_FP16 for term in terms]
    index, place = _sizes(match, case, SHARES[1], device), torch.arange(match.integer("columns"), device=device)[None, :, None]
    terms, index = [*terms, 0.0], torch.where(place < MOST_TERMS, index, len(terms))
    if op in SPREADS:  # of either sign by turns, so that the mean is next to nothing
        large = index >= LEVELS
        turned = torch.where(large, large.cumsum(1), place) % 2 == 1
        return solved(match, (*terms, *(-term for term in terms))), torch.where(turned, index + len(terms), index)
    return solved(match, tuple(terms)), index


# ---- single roundings

def _off_step(match: Match, case: Case, device: str) -> tuple[Solution | None, Tensor]:
    """As many elements of each row are the largest, from its beginning on, as make a rounding of its sum show most; half at most."""
    op, dtype = match.text("op", ""), STORED[match.need("out").spec.dtype]
    scale = 1.0 if op else SPREAD
    found = solved(match, tuple(scale * (-i if not op else 1.0 + i) / LEVELS for i in range(LEVELS)))
    last = LEVELS - 1 if op else 0  # the level of the largest
    drawn = torch.randint(0, LEVELS, _shape(match), generator=seeded(case, 6, device), device=device)
    if found is None:
        return None, drawn
    results = found.results(match, STORED.get(match.need(found.name).spec.dtype, torch.float32)).to(device)
    worth = results if op else (results - results[0]).exp()
    weights = worth[drawn]
    totals = weights.sum(1, keepdim=True) + (worth[last] - weights).cumsum(1)  # [:, i]: with elements 0 .. i the largest
    totals = totals[:, : -(-totals.shape[1] // 2)]  # the other half stays unlike
    first = _shown(match, totals, totals.to(dtype).double(), dtype).argmax(1, keepdim=True)
    columns = torch.arange(drawn.shape[1], device=device)[None, :, None]
    return found, torch.where(columns <= first, last, drawn)


def _shown(match: Match, totals: Tensor, rounded: Tensor, dtype: torch.dtype) -> Tensor:
    """How much farther off the result is where the total is rounded to ``dtype``, the result's type; 0 where that is infinite."""
    if not match.text("op", ""):
        return ((rounded - totals).abs() / totals).nan_to_num(posinf=0.0)
    right, wrong = totals / match.integer("columns"), rounded / match.integer("columns")
    off, stored = ((result.to(dtype).double() - right).abs() / right for result in (wrong, right))
    return (off - stored).nan_to_num(nan=0.0, posinf=0.0)
