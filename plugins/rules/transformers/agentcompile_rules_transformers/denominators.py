"""Inputs of attention under which a single rounding shows: of the sum of a softmax, and of the squares of a normed head.

``off_step``: the weights of all positions add up to a number that lies as far as can be from those of 16 bits, and every row of V
is the same, so that the result is that row, whatever the weights err, unless they are divided by another sum than theirs.
``normed``: the new position weighs as much as all others together, V is 1 there and -1 elsewhere, nothing is rotated, and the
elements of q and k are one number, whose squares are rounded to one side again and again where they are added in 16 bits. What a
norm errs moves all elements of q and k alike, and so the result by more than their own roundings may.
"""

import math
from functools import cache

import torch
from attrs import frozen
from torch import Tensor

from agentcompile_core.plugin_api import Case, DType, Match, Operand

from .sums import HIGH, before_cap, first_attended, half_step, score_below_cap, seeded

OFF_STEP, NORMED = "off_step", "normed"
BESIDE = 0.9  # of half a step, by which a sum lies above a power of two
LANES_TERMS = (8, 16, 32)  # elements of a head that a lane may hold
LOWEST, HIGHEST = 1.15, 1.4  # of V: there a result that errs so much is the next number, and that beyond the budget


@frozen(kw_only=True)
class Shares:
    """Scores of the cached positions that are attended to: ``heavy`` of them ``high``, one ``between``, the others ``low``."""

    heavy: int
    high: float
    between: float
    low: float


def shares(match: Match, case: Case) -> Shares | None:
    """Those whose weights, relative to the highest, add up to a power of two and most of half a step; None: there are too few."""
    high = score_below_cap(match)
    low = -high if match.number("softcap", 0.0) else -HIGH
    cached, least, new = case.position - first_attended(match, case), math.exp(low - high), math.exp(-high)
    for power in range(int(math.log2(max(1, cached))), 0, -1):
        total = 2.0**power * (1.0 + BESIDE * half_step(match.need("v"))) - new - (cached - 1) * least
        heavy = int(total / (1.0 - least))
        if 0 < heavy < cached:
            between = max(total - heavy * (1.0 - least), least)
            return Shares(heavy=heavy, high=high, between=high + math.log(between), low=low)
    return None


def of_single_roundings(match: Match, operand: Operand, case: Case, seen: Tensor, device: str) -> Tensor | None:
    """An operand in these families; ``seen`` [D]: ``row`` as the kernel sees it as a query. None: as the core draws it."""
    if operand.name in ("q_norm", "k_norm"):
        neutral = 1.0 if match.text("norm", "none") == "rms_one_plus" else 0.0
        return torch.full(operand.spec.shape, 1.0 - neutral, device=device)
    if operand.name in ("v", "v_cache"):
        return _values(match, operand, case, device)
    if operand.name == "q" or (operand.name == "k" and case.family == NORMED):
        return _heads(match, operand, case, device).reshape(operand.spec.shape)
    if operand.name == "k":
        return torch.zeros(operand.spec.shape, device=device)
    return _keys(match, operand, case, seen, device) if operand.name == "k_cache" else None


def row(match: Match, case: Case, device: str) -> Tensor:
    """The query [D] of all heads, of either sign; ``normed`` multiplies it, which a norm does not see."""
    drawn = torch.rand(match.integer("head_dim"), generator=seeded(case, 7, device), device=device)
    return torch.where(drawn < 0.5, -1.0, 1.0)


def _heads(match: Match, operand: Operand, case: Case, device: str) -> Tensor:
    """``row`` for every head of q or k [heads, D]; in ``normed`` heads of long and of short sums by turns."""
    count = operand.spec.numel // match.integer("head_dim")
    terms = ((LANES_TERMS,) if match.integer("kv_heads") == 1 else (LANES_TERMS[1:], LANES_TERMS[:1]))
    numbers = [one_sided(operand.spec.dtype is DType.BF16, some) if case.family == NORMED else 1.0 for some in terms]
    of_head = torch.arange(count, device=device) * match.integer("kv_heads") // count % len(numbers)
    return torch.tensor(numbers, device=device)[of_head][:, None] * row(match, case, device)


@cache
def one_sided(bf16: bool, terms: tuple[int, ...]) -> float:
    """The number of 16 bits, from 1 to 2, whose square errs most when as many as ``terms`` says are added up in such a type."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    numbers = torch.arange(1.0, 2.0, torch.finfo(dtype).eps)
    total, least = torch.zeros_like(numbers), torch.full_like(numbers, torch.inf)
    for count in range(1, max(terms) + 1):
        total = (total + numbers.square()).to(dtype).float()
        if count in terms:
            least = torch.minimum(least, (total / (count * numbers.square()) - 1.0).abs())
    return float(numbers[least.argmax()])


def _values(match: Match, operand: Operand, case: Case, device: str) -> Tensor:
    if case.family == NORMED:
        return torch.full(operand.spec.shape, 1.0 if operand.name == "v" else -1.0, device=device)
    kv_heads, dim = match.integer("kv_heads"), match.integer("value_dim", 0) or match.integer("head_dim")
    drawn = torch.rand(kv_heads, dim, generator=seeded(case, 8, device), device=device)  # equal in v and its cache
    made = LOWEST + (HIGHEST - LOWEST) * drawn
    return made.expand(operand.spec.numel // made.numel(), -1, -1).reshape(operand.spec.shape)


def _keys(match: Match, operand: Operand, case: Case, seen: Tensor, device: str) -> Tensor | None:
    rows, first = operand.spec.shape[-3], first_attended(match, case)
    scores = torch.zeros(rows, device=device)
    if case.family == NORMED:
        own = float(seen.square().sum()) * match.number("scale")
        cap = match.number("softcap", 0.0)
        own = cap * math.tanh(own / cap) if cap else own
        scores += own - math.log(max(1, case.position - first))
    elif (found := shares(match, case)) is not None:
        order = torch.randperm(max(1, case.position - first), generator=seeded(case, 9, device), device=device)
        kinds = torch.full(order.shape, found.low, device=device)
        kinds[order[: found.heavy]] = found.high
        kinds[order[found.heavy : found.heavy + 1]] = found.between
        scores[first : first + len(kinds)] = kinds
    keys = before_cap(match, scores)[:, None] * seen / (match.number("scale") * seen.square().sum().clamp_min(1e-6))
    return keys[:, None].expand(rows, operand.spec.shape[-2], -1).reshape(operand.spec.shape)
