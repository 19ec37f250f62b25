"""Kinds of a mixture of experts for one token: its linear layers and its router."""

import math

import torch
from torch import Tensor

from agentcompile_core.plugin_api import (
    READS,
    WEIGHTS,
    AttributeKind,
    Case,
    Match,
    MatchKind,
    Operand,
    OperandKind,
    Role,
    kind_names,
)

from . import sums

OUT = (Role.OUTPUT,)
LANES = 32  # of a warp
EDGES = 0.75  # of the cases have the first expert in a slot, and as many the last one


class ExpertLinear(MatchKind):
    """The linear layers of the chosen experts, all different as a router chooses them, and sums that half precision would lose."""

    def lasting_families(self, match: Match) -> tuple[str, ...]:
        """Sums whose small terms are lost where they are kept in half precision."""
        return (sums.SWAMPED,) if match.need("weight").spec.dtype in sums.NARROW else ()

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """Different experts; logits that tell them apart; and rows, matrices and weights of those sums."""
        if operand.name == "logits":
            return _apart(match, operand, generator, device)
        if operand.name == "experts":
            return _different(match.need("weight").spec.shape[0], operand, generator, device)
        return _swamped(match, operand, case, device) if case.family == sums.SWAMPED else None

    def weight_scale(self, match: Match, operand: Operand) -> tuple[float, float]:
        """Of matrices whose products have the size of what they are multiplied with, and of small biases."""
        return (0.0, match.integer("k") ** -0.5) if operand.name == "weight" else (0.0, 0.1)


def _apart(match: Match, operand: Operand, generator: torch.Generator, device: str) -> Tensor:
    """Logits in any order, evenly spread: of equal ones it would not be known which expert is right."""
    count = operand.spec.numel
    logits = torch.empty(count, device=device)
    logits[_order(count, match.integer("slots"), generator, device)] = 4.0 - torch.arange(1, count + 1, device=device) * (8.0 / count)
    return logits.reshape(operand.spec.shape)


def _different(count: int, operand: Operand, generator: torch.Generator, device: str) -> Tensor:
    slots = operand.spec.numel
    drawn = [_order(count, min(slots, count), generator, device) for _ in range(-(-slots // count))]
    return torch.cat(drawn)[:slots].reshape(operand.spec.shape)


def _order(count: int, slots: int, generator: torch.Generator, device: str) -> Tensor:
    """All experts in any order. The first and the last are each drawn into the slots three times in four, for what lies before and
    behind their matrices is nobody's: an index that is off shows there, while it meets another expert's numbers elsewhere."""
    keys = torch.rand(count, generator=generator, device=device)
    edges = torch.tensor([0, count - 1], device=device)
    drawn = torch.rand(2, generator=generator, device=device)
    keys[edges] = torch.where(drawn < EDGES, drawn - 1.0, keys[edges])
    order = keys.argsort()
    within = torch.randperm(slots, generator=generator, device=device)
    return torch.cat((order[:slots][within], order[slots:]))


def _swamped(match: Match, operand: Operand, case: Case, device: str) -> Tensor | None:
    """All slots read one row, so that its products with every expert's rows are large or below half a step; so are the slots' weights."""
    small = sums.SMALL * sums.half_step(match.need("weight"))
    k = match.integer("k")
    signs = torch.where(torch.rand(k, generator=sums.seeded(case, 3, device), device=device) < 0.5, -1.0, 1.0)
    row = sums.large_and_small((k,), sums.SHARES[1], small, sums.seeded(case, 1, device), device).sqrt() * signs
    if operand.name == "x":
        return row.expand(operand.spec.numel // k, k).reshape(operand.spec.shape)
    if operand.name == "weight":
        shape = (*operand.spec.shape[:-2], -1, k)
        drawn = sums.large_and_small(operand.spec.shape, sums.SHARES[1], small, sums.seeded(case, 2, device), device).reshape(shape)
        made = sums.WEIGHED * drawn / row
        return made.mT.reshape(operand.spec.shape) if match.flag("transposed") else made.reshape(operand.spec.shape)
    if operand.name != "scale":
        return torch.zeros(operand.spec.shape, device=device) if operand.name == "bias" else None
    made = torch.full((operand.spec.numel,), small, device=device)
    made[0] = sums.LARGE  # first: what comes before it would be added up without a loss
    return made.reshape(operand.spec.shape)


CHOICE_ATTRIBUTES = (
    AttributeKind("over_chosen", bool, False), AttributeKind("scoring", str, "softmax", doc="softmax or sigmoid"),
    AttributeKind("eps", float, 0.0), AttributeKind("floored", bool, False), AttributeKind("factor", float, 1.0),
)
EXPERT_LINEAR = ExpertLinear(
    name=kind_names.EXPERT_LINEAR, version=2,
    doc="out[s] = epilogue(acc) of each slot s, acc[p] = W[e] x[s] + bias[e] of row p*n + i (2*i + p if interleaved), e = experts[s];"
        " if summed: out = epilogue(acc0, aux), acc0 = sum_s scale[s] (W[e] x[s] + bias[e]); if routed: experts = choice, which with scores"
        " is that of the kind router from logits and router_bias",
    operands=(
        OperandKind("x", READS, doc="[.., slots, k], or [.., k] where all slots read one row (shared)"),
        OperandKind("weight", WEIGHTS, doc="[experts, pair*n, k] T, or [experts, k, pair*n] if transposed"),
        OperandKind("experts", READS, optional=True, index_of="weight", doc="i64 [slots], all different; where not routed"),
        OperandKind("logits", READS, optional=True, doc="[.., experts], where routed"),
        OperandKind("router_bias", WEIGHTS, optional=True, doc="[experts], where routed"),
        OperandKind("bias", WEIGHTS, optional=True, doc="[experts, pair*n] T"),
        OperandKind("scale", READS, optional=True, doc="[slots] T or f32, where summed"),
        OperandKind("aux", READS, repeated=True, doc="[n], where summed: a residual"),
        OperandKind("out", OUT, doc="[slots, n], or [n] where summed"),
        OperandKind("scores", OUT, optional=True, doc="[.., slots], where routed"),
        OperandKind("choice", OUT, optional=True, doc="i64 [.., slots], where routed"),
    ),
    attributes=(
        AttributeKind("n"), AttributeKind("k"), AttributeKind("slots"), AttributeKind("experts"),
        AttributeKind("pair", int, 1, doc="2: a gate and what it is multiplied with"),
        AttributeKind("interleaved", bool, False, doc="of a pair: row by row, not half by half"),
        AttributeKind("transposed", bool, False), AttributeKind("shared", bool, False, doc="all slots read one row of x"),
        AttributeKind("summed", bool, False), AttributeKind("routed", bool, False, doc="with the router in front"), *CHOICE_ATTRIBUTES,
        AttributeKind("unread_bytes", int, 0, doc="of the experts that are not chosen"),
    ),
)


class Router(MatchKind):
    """A softmax of few logits: its sum."""

    def lasting_families(self, match: Match) -> tuple[str, ...]:
        """A sum whose small terms are lost where lanes keep it in half precision."""
        return (sums.SWAMPED,) if match.need("logits").spec.dtype in sums.NARROW else ()

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """A large term for every lane of a warp, first; all others lie just below half a step of it."""
        if case.family != sums.SWAMPED:
            return None
        logits = torch.full((operand.spec.numel,), math.log(sums.SMALL * sums.half_step(operand)), device=device)
        logits[:LANES] = 0.0
        return logits.reshape(operand.spec.shape)


ROUTER = Router(
    name=kind_names.ROUTER, version=2,
    doc="experts = those of the slots largest logits, largest first; scores = their softmax, over all logits or over_chosen: over these"
        " alone. With a bias, or by sigmoid: s = softmax or sigmoid of the logits, experts = those of the largest s + bias, scores = their"
        " s, or over_chosen s / (sum of these s + eps), or s / max(sum, eps) if floored; times factor",
    operands=(OperandKind("logits", READS, doc="[.., experts]"), OperandKind("bias", WEIGHTS, optional=True, doc="[experts]"),
              OperandKind("scores", OUT, doc="[.., slots]"), OperandKind("experts", OUT, doc="i64 [.., slots]")),
    attributes=(AttributeKind("experts"), AttributeKind("slots"), *CHOICE_ATTRIBUTES),
)
