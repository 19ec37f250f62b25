"""The kinds of one token of linear recurrences and of short causal convolutions, whose states are written in place."""

import math

import torch
from torch import Tensor

from agentcompile_core.plugin_api import (
    CONVOLUTION_STEP,
    READS,
    RECURRENCE_STEP,
    WEIGHTS,
    AttributeKind,
    Case,
    Match,
    MatchKind,
    Operand,
    OperandKind,
    Role,
)

KNOWN = "known"
STILL = -40.0  # the softplus of which is nothing
FASTEST_RATE, LONGEST_STEP, SHORTEST_STEP = 16.0, 0.1, 0.001  # of trained scans: rates from -16 to -1, steps as they are initialized


class RecurrenceStep(MatchKind):
    """A step of a recurrence: factors are below one, as those of trained models are."""

    def lasting_families(self, match: Match) -> tuple[str, ...]:
        """Of delta rules, states that know already what comes: only the exact sum of what they know takes all of it off."""
        return (KNOWN,) if match.operand("strength") is not None else ()

    def make(self, match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor | None:
        """Rates and steps of scans, and decays of delta rules; what is made softplus or -exp of is drawn so that those come out."""
        if case.family == KNOWN:
            return _known(match, operand, case, device)
        if operand.name not in ("rates", "decay", "decay_bias"):
            return None
        drawn = torch.rand(operand.spec.shape, generator=generator, device=generator.device).to(device)
        if operand.name == "decay_bias":
            return drawn - 0.5
        if operand.name == "rates":
            rates = 1.0 + (FASTEST_RATE - 1.0) * drawn
            return rates.log() if match.flag("log_rates") else -rates
        if match.flag("softplus"):
            return math.log(SHORTEST_STEP) + (math.log(2.0) - math.log(SHORTEST_STEP)) * drawn
        steps = SHORTEST_STEP * (LONGEST_STEP / SHORTEST_STEP) ** drawn
        return steps if match.operand("rates") is not None else -FASTEST_RATE * steps


def _known(match: Match, operand: Operand, case: Case, device: str) -> Tensor | None:
    """Operands of a state whose product with the keys is x, and that does not decay."""
    heads, width, terms, groups = (match.integer(name) for name in ("heads", "width", "terms", "groups"))
    drawn = torch.Generator().manual_seed(case.seed)
    x, keys = (torch.randn(shape, generator=drawn).to(getattr(torch, match.need(name).spec.dtype.value)).double()
               for name, shape in (("x", (heads, width)), ("keys", (groups, terms))))
    if operand.name in ("x", "keys"):
        return (x if operand.name == "x" else keys).reshape(operand.spec.shape).to(device)
    if operand.name in ("decay", "decay_bias"):
        still = STILL if operand.name == "decay" and match.flag("softplus") else 0.0
        return torch.full(operand.spec.shape, still, device=device)
    if operand.name != "state":
        return None
    length = keys.square().sum(-1, keepdim=True)
    lines = (keys / (length.sqrt() if match.number("keys_eps") > 0.0 else length)).repeat_interleave(heads // groups, 0)
    rows = x.unsqueeze(-1) * lines.unsqueeze(1)
    return (rows.transpose(1, 2) if match.flag("by_rows") else rows).reshape(operand.spec.shape).to(device)


class ConvolutionStep(MatchKind):
    """A step of a convolution: what is read and written is as large whatever the position."""

    def weight_scale(self, match: Match, operand: Operand) -> tuple[float, float]:
        """Of weights that keep the size of what they are multiplied with."""
        return (0.0, match.integer("width") ** -0.5) if operand.name == "weight" else super().weight_scale(match, operand)


RECURRENCE_STEPS = RecurrenceStep(
    name=RECURRENCE_STEP,
    doc="S = f S; S += w keys^T; out = epilogue(S queries + skip x, aux) for each head, in float32, w = x, or step x where scaled, or"
        " strength (x - S keys); f = exp(step rate) of each head or term; state is S, in place",
    operands=(
        OperandKind("state", (Role.STATE,), moves=True, doc="[1, heads, width, terms], by_rows [1, heads, terms, width], f32"),
        OperandKind("x", READS, doc="[heads * width]"),
        OperandKind("keys", READS, doc="[groups * terms]: heads / groups neighbours share one line; divided by its length where keys_eps"),
        OperandKind("queries", READS, doc="[groups * terms]: the same with queries_eps, then times queries_scale"),
        OperandKind("decay", READS, doc="[heads * decay_each]: step, or softplus(decay + decay_bias)"),
        OperandKind("decay_bias", READS, optional=True, doc="[heads * decay_each]"),
        OperandKind("rates", READS, optional=True, doc="[heads * rates_each]: rate, or with log_rates -exp of it; none: 1"),
        OperandKind("strength", READS, optional=True, doc="[heads], of a delta rule: strength, or strength_scale sigmoid of it"),
        OperandKind("skip", READS, optional=True, doc="[heads]"),
        OperandKind("aux", READS, repeated=True, doc="[heads * width]"),
        OperandKind("out", (Role.OUTPUT,), doc="[heads * width]"),
    ),
    attributes=(
        AttributeKind("heads"), AttributeKind("width", doc="rows of a head"), AttributeKind("terms", doc="of a row"),
        AttributeKind("groups"),
        AttributeKind("by_rows", bool, False, doc="neighbours in the state are rows"),
        AttributeKind("decay_each", int, 1, doc="1 or terms"), AttributeKind("rates_each", int, 0, doc="0, 1 or terms"),
        AttributeKind("softplus", bool, False), AttributeKind("log_rates", bool, False), AttributeKind("scaled", bool, False),
        AttributeKind("sigmoid", bool, False), AttributeKind("strength_scale", float, 1.0),
        AttributeKind("keys_eps", float, 0.0, doc="added to a line's sum of squares; 0: lines as they are"),
        AttributeKind("queries_eps", float, 0.0), AttributeKind("queries_scale", float, 1.0),
        AttributeKind("state_bytes", int, doc="read and written"),
    ),
)
CONVOLUTION_STEPS = ConvolutionStep(
    name=CONVOLUTION_STEP,
    doc="out[c] = act(sum over k of weight[c, k] column[c, k] + bias[c]), column[c] = state[c, 1 ..], x[c]; state = column",
    operands=(
        OperandKind("state", (Role.STATE,), moves=True, doc="[1, channels, width]"), OperandKind("x", READS, doc="[channels]"),
        OperandKind("weight", WEIGHTS, doc="[channels, width]"), OperandKind("bias", WEIGHTS, optional=True, doc="[channels]"),
        OperandKind("out", (Role.OUTPUT,), doc="[channels]"),
    ),
    attributes=(AttributeKind("channels"), AttributeKind("width"), AttributeKind("silu", bool, False),
                AttributeKind("state_bytes", int, doc="read and written")),
)
