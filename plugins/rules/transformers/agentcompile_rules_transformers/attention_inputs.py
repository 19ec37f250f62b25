"""Inputs of attention that show what those of single operands cannot, however many positions there are.

``every_position``: the query is zero, so all attended positions weigh the same, and every row of V is one element of 1. An
element of the result counts the few positions that carry it, so one of them missing changes it by a tenth, not by 1/8192.
``peaked``: the keys of a few positions point along a query head as the kernel sees it, after norm and rotation, so that the
softmax is shared by them alone.
``level``: all rows of V are nearly the same and no position stands out, so that errors of single weights average out, and one that
all weights of a head share stands out.
``apart``: the scores of some query heads lie further above those of others than the exponential reaches, so that a maximum taken
over heads leaves nothing of the lower ones.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from agentcompile_core.plugin_api import Case, Match, Operand

from .sums import first_attended

EVERY_POSITION, PEAKED, LEVEL, APART = "every_position", "peaked", "level", "apart"
FAMILIES = (EVERY_POSITION, PEAKED, LEVEL, APART)
MOST_PER_ELEMENT = 12  # positions that one element of the result counts
PEAKS = 8  # positions that share the softmax of a query head
ABOVE = 6.0  # by how much their scores lie above those of all others together
MEAN, DEVIATION = 1.03, 0.05  # of a level V: just above a power of two, where a rounding is largest beside the value
FLAT = 0.25  # size of the query that goes with it
FAR = 256.0  # size of the query heads that stand above
HUGE = 2048.0  # the weight that does it behind a norm, which makes all heads one size
Table = tuple[Tensor, Tensor]  # cos and sin


def telling(match: Match, operand: Operand, case: Case, table: Callable[[], Table | None], device: str) -> Tensor | None:
    """One operand in one of these families; None: as the core draws it. ``table`` makes cos and sin of the position, if any."""
    if case.family == EVERY_POSITION:
        return _counted(match, operand, case, device)
    if case.family == PEAKED:
        return _peaked(match, operand, case, table, device)
    return (_level if case.family == LEVEL else _apart)(match, operand, case, device)


def value_dim(match: Match) -> int:
    """The width of V, which may differ from that of K."""
    return match.integer("value_dim", 0) or match.integer("head_dim")


def _generator(case: Case, number: int, device: str) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(case.seed * 31 + number)
    return generator


def _counted(match: Match, operand: Operand, case: Case, device: str) -> Tensor | None:
    if operand.name == "q":
        return torch.zeros(operand.spec.shape, device=device)
    if operand.name not in ("v", "v_cache"):
        return None
    kv_heads, dim = match.integer("kv_heads"), value_dim(match)
    rows = operand.spec.numel // (kv_heads * dim)
    generator = _generator(case, rows, device)
    shares = -(-(case.position + 1) // (dim * MOST_PER_ELEMENT))  # KV heads that it takes to carry every position
    ones = torch.zeros(kv_heads, rows, dim, device=device)
    for head in range(kv_heads):
        slots = torch.randperm(rows, generator=generator, device=device) % dim
        carried = (torch.arange(rows, device=device) + head + case.seed) % shares == 0
        ones[head].scatter_(1, slots[:, None], carried.float()[:, None] if rows > 1 else torch.ones(1, 1, device=device))
    return ones.transpose(0, 1).reshape(operand.spec.shape)


def _peaked(match: Match, operand: Operand, case: Case, table: Callable[[], Table | None], device: str) -> Tensor | None:
    if operand.name in ("q_norm", "k_norm"):
        return torch.full(operand.spec.shape, 1.0 - _neutral(match), device=device)
    if operand.name == "q":
        return _query(match, case, device).reshape(operand.spec.shape)
    if operand.name != "k_cache":
        return None
    kv_heads, dim = match.integer("kv_heads"), match.integer("head_dim")
    group = match.integer("heads") // kv_heads
    seen = as_seen(match, _query(match, case, device), table()).reshape(kv_heads, group, dim)
    generator = _generator(case, 1, device)
    keys = 0.25 * torch.randn(operand.spec.shape, generator=generator, device=device)
    cached = min(case.position, operand.spec.shape[1])
    first = first_attended(match, case)
    if cached <= first:
        return keys
    top = math.log(cached - first + 1) + ABOVE
    peaks = seen * (top / (match.number("scale") * seen.square().sum(-1, keepdim=True).clamp_min(1e-6)))
    ends = torch.tensor([cached - 1, first], device=device)
    places = torch.stack([torch.cat((ends, torch.randint(first, cached, (PEAKS * group - 2,), generator=generator, device=device)))
                          for _ in range(kv_heads)])
    heads = torch.arange(kv_heads, device=device)
    for i in range(PEAKS * group):  # of several at one place the last one stays; all heads at once, so that nothing waits for the device
        keys[0, places[:, i], heads] = peaks[:, i % group]
    return keys


def _level(match: Match, operand: Operand, case: Case, device: str) -> Tensor | None:
    if operand.name in ("q_norm", "k_norm"):
        return torch.full(operand.spec.shape, FLAT - _neutral(match), device=device)
    if operand.name not in ("q", "v", "v_cache"):
        return None
    drawn = torch.randn(operand.spec.shape, generator=_generator(case, len(operand.name), device), device=device)
    return FLAT * drawn if operand.name == "q" else MEAN + DEVIATION * drawn


def _apart(match: Match, operand: Operand, case: Case, device: str) -> Tensor | None:
    if operand.name == "q_norm":
        weight = torch.full(operand.spec.shape, 1.0 - _neutral(match), device=device)
        weight.reshape(-1)[case.seed % weight.numel()] = HUGE
        return weight
    if operand.name != "q" or match.flag("qk_norm"):
        return None
    above = (torch.arange(match.integer("heads"), device=device) + case.seed) % 2
    return (_query(match, case, device) * (FLAT + FAR * above)[:, None]).reshape(operand.spec.shape)


def _neutral(match: Match) -> float:
    """What the norm adds to its weight."""
    return 1.0 if match.text("norm", "none") == "rms_one_plus" else 0.0


def _query(match: Match, case: Case, device: str) -> Tensor:
    shape = (match.integer("heads"), match.integer("head_dim"))
    return torch.randn(shape, generator=_generator(case, 2, device), device=device)


def as_seen(match: Match, query: Tensor, table: Table | None) -> Tensor:
    """The queries [H, D] after the norm (whose weight is 1 here) and the rotation that the match fuses."""
    if match.flag("qk_norm"):
        query = query * torch.rsqrt(query.square().mean(-1, keepdim=True) + match.number("norm_eps"))
    if table is None:
        return query
    cos, sin = (t.reshape(-1).to(query.dtype) for t in table)
    turned, rest = query[:, : cos.numel()], query[:, cos.numel() :]
    if match.flag("interleaved"):
        partners = torch.stack((-turned[:, 1::2], turned[:, ::2]), -1).flatten(-2)
    else:
        lower, upper = turned.chunk(2, -1)
        partners = torch.cat((-upper, lower), -1)
    return torch.cat((turned * cos + partners * sin, rest), -1)
