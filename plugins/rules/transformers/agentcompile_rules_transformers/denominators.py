"""Inputs of attention under which a single rounding shows: of the sum of a softmax, and of the squares of a normed head.

``off_step``: the weights of all positions add up to a number that lies as far as can be from those of 16 bits, and every row of V
is the same, so that the result is that row, whatever the weights err, unless they are divided by another sum than theirs.
``normed``: the new position weighs as much as all others together, V is 1 there and -1 elsewhere, nothing is rotated, and q and k
are one row whose squares are such terms as in ``swamped``: what its norm errs moves all elements of q and k alike, and the result
by more than their own roundings may.
"""

import math

import torch
from attrs import frozen
from torch import Tensor

from agentcompile_core.plugin_api import Case, Match, Operand

from .sums import HIGH, LARGE, SMALL, VECTOR, before_cap, first_attended, half_step, score_below_cap, seeded

OFF_STEP, NORMED = "off_step", "normed"
BESIDE = 0.9  # of half a step, by which a sum lies above a power of two
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
        return row(match, case, device).expand(operand.spec.numel // seen.numel(), -1).reshape(operand.spec.shape)
    if operand.name == "k":
        return torch.zeros(operand.spec.shape, device=device)
    return _keys(match, operand, case, seen, device) if operand.name == "k_cache" else None


def row(match: Match, case: Case, device: str) -> Tensor:
    """The query [D] of all heads; in ``normed`` the key as well: of its squares the first of each vector in its first half are large."""
    dim = match.integer("head_dim")
    signs = torch.where(torch.rand(dim, generator=seeded(case, 7, device), device=device) < 0.5, -1.0, 1.0)
    if case.family == OFF_STEP:
        return signs
    place = torch.arange(dim, device=device)
    squares = torch.where((place % VECTOR == 0) & (place < dim / 2), LARGE, SMALL * half_step(match.need("q")))
    return squares.sqrt() * signs


def _values(match: Match, operand: Operand, case: Case, device: str) -> Tensor:
    if case.family == NORMED:
        return torch.full(operand.spec.shape, 1.0 if operand.name == "v" else -1.0, device=device)
    kv_heads, dim = match.integer("kv_heads"), match.integer("head_dim")
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
