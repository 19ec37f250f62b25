"""Inputs of softmax and reductions under which a sum kept in half precision shows; what ``sums`` says of them holds here.

``swamped``: the weights of a softmax, and the terms of a reduction, are large ones among small ones that lie just below half a
step of theirs in 16 bits. Of reductions in bf16 they lie near the end of fp16's range. ``swamped_half``: the same for a softmax in
bf16 whose sum is kept in fp16, with steps of fp16. ``swamped_mean``: elements of a variance some steps beside a mean that lies
between two numbers. ``off_step``: the sum of a softmax is as far from a number of 16 bits as can be, so that rounding it shows.
"""

import math

import torch
from torch import Tensor

from agentcompile_core.plugin_api import Case, DType, Match, Operand

from .solving import Solution, solved
from .sums import LARGE, NARROW, SHARES, SMALL, SWAMPED, SWAMPED_MEAN, VECTOR, seeded

SWAMPED_HALF, OFF_STEP = "swamped_half", "off_step"
LEVELS = 64  # different numbers of each size
UNLIKE = 0.12  # how much terms of one size differ: results that were all rounded alike would show less
SPREAD = 2.0  # scores of ``off_step`` lie so far below the largest
FP16_HALF_STEP = 2.0**-11
FEW = 1 / 16  # share of large weights where each small one says little
BEGINNING = 4096  # elements of a row that any block takes in its first round; of long rows a sixteenth, so that lanes go on with small ones
ABOVE = 1.03  # results just above a power of two, where the store's own rounding leaves least of the budget
STEPS = 4  # of 16 bits, over which the elements of ``swamped_mean`` lie
SPREADS = ("var", "std")
ADDED = ("sum", "mean", "l1", "l2", *SPREADS)  # the operators that add up
NEAR_END = 2.0**15  # two of 1.15 times that leave fp16
MOST = 2.0**14  # of a sum that fp16 stores


def families(match: Match) -> tuple[str, ...]:
    """Those of a softmax or a reduction: by the type of its result, and by what it adds up."""
    out, op = match.operand("out"), match.text("op", "")
    if out is None or out.spec.dtype not in NARROW or (op and op not in ADDED):
        return ()
    if op:
        return (SWAMPED, SWAMPED_MEAN) if op in SPREADS else (SWAMPED,)
    return (SWAMPED, SWAMPED_HALF, OFF_STEP) if out.spec.dtype is DType.BF16 else (SWAMPED, OFF_STEP)


def of_rows(match: Match, operand: Operand, case: Case, device: str) -> Tensor | None:
    """An operand of either kind in these families; None: as the core draws it."""
    make = _terms if match.text("op", "") else _weights
    found, index = make(match, case, device)
    if found is None:
        return None
    if operand.name == found.name:
        return torch.tensor(found.elements, device=device)[index].reshape(operand.spec.shape)
    constant = dict(found.constants).get(operand.name)
    return None if constant is None else torch.full(operand.spec.shape, constant, device=device)


def _half_step(match: Match) -> float:
    return 2.0**-8 if match.need("out").spec.dtype is DType.BF16 else FP16_HALF_STEP


def _shape(match: Match) -> tuple[int, int, int]:
    return match.integer("outer"), match.integer("columns"), match.integer("inner", 1)


def _sizes(match: Match, case: Case, share: float, device: str) -> Tensor:
    """For every element [outer, columns, inner] the number of its level: below LEVELS those of small terms, then those of large ones.

    Every row has a large one. Of rows in one piece every second has them where lanes begin that load vectors, and only there;
    elsewhere they stand anywhere.
    """
    generator, shape = seeded(case, 6, device), _shape(match)
    large = torch.rand(shape, generator=generator, device=device) < share
    large[:, case.seed % shape[1]] = True
    if shape[2] == 1:
        large[::2] = _heads(shape[1], device)[None, :, None]
    return torch.randint(0, LEVELS, shape, generator=generator, device=device) + LEVELS * large


def _heads(columns: int, device: str) -> Tensor:
    """The first elements of the first vectors of a row, as many as make 1 over their number lie just above a power of two."""
    most = -(-min(columns, max(BEGINNING, columns // 16)) // VECTOR)
    kept = max(1, round(2.0 ** math.floor(math.log2(most * ABOVE)) / ABOVE))
    place = torch.arange(columns, device=device)
    return (place % VECTOR == 0) & (place < kept * VECTOR)


def _unlike(size: float) -> list[float]:
    return [size * (1.0 + UNLIKE * (i / (LEVELS - 1) - 0.5)) for i in range(LEVELS)]


# ---- softmax

def _weights(match: Match, case: Case, device: str) -> tuple[Solution | None, Tensor]:
    if case.family == OFF_STEP:
        return _off_step(match, case, device)
    small = SMALL * (FP16_HALF_STEP if case.family == SWAMPED_HALF else _half_step(match))
    scores = [math.log(weight) for size in (small, 1.0) for weight in _unlike(size)]
    share = FEW if case.family == SWAMPED_HALF else SHARES[1]
    return solved(match, tuple(score - max(scores) for score in scores)), _sizes(match, case, share, device)


def _off_step(match: Match, case: Case, device: str) -> tuple[Solution | None, Tensor]:
    """As many elements of each row are the largest, from its beginning on, as put its sum beside the numbers of 16 bits."""
    found = solved(match, tuple(-SPREAD * i / LEVELS for i in range(LEVELS)))
    drawn = torch.randint(1, LEVELS, _shape(match), generator=seeded(case, 6, device), device=device)
    if found is None:
        return None, drawn
    operand = match.need(found.name)
    results = found.results(match, torch.bfloat16 if operand.spec.dtype is DType.BF16 else torch.float16)
    worth = (results - results[0]).exp().to(device)
    weights = worth[drawn]
    totals = weights.sum(1, keepdim=True) + (1.0 - weights).cumsum(1)  # [:, i]: with elements 0 .. i the largest
    step = 2.0 * _half_step(match) * torch.exp2(totals.log2().floor())
    beside = ((totals / step).round() * step - totals).abs() / totals
    first = beside.argmax(1, keepdim=True)
    columns = torch.arange(drawn.shape[1], device=device)[None, :, None]
    return found, torch.where(columns <= first, 0, drawn)


# ---- reductions

def _terms(match: Match, case: Case, device: str) -> tuple[Solution | None, Tensor]:
    op, half_step = match.text("op"), _half_step(match)
    if case.family == SWAMPED_MEAN:
        steps = tuple(1.0 + 2.0 * half_step * i for i in range(STEPS))
        return solved(match, steps), torch.randint(0, STEPS, _shape(match), generator=seeded(case, 6, device), device=device)
    large = LARGE * (NEAR_END if half_step > FP16_HALF_STEP else min(1.0, MOST / (SHARES[1] * match.integer("columns"))))
    terms = [term for size in (SMALL * half_step * large, large) for term in _unlike(size)]
    if op in ("l2", *SPREADS):
        terms = [math.sqrt(term) if half_step <= FP16_HALF_STEP else math.sqrt(term / NEAR_END) * NEAR_END for term in terms]
    terms = [-term if op in SPREADS and i % 2 else term for i, term in enumerate(terms)]
    return solved(match, tuple(terms)), _sizes(match, case, SHARES[1], device)
