"""What the tests of both families share: operands as their kinds draw them, and one emulated step judged against the reference."""

import math

import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.recurrence_kinds import CONVOLUTION_STEPS, RECURRENCE_STEPS
from agentcompile_validator_emulation.testing import TORCH, Emulated, aligned

from agentcompile_core.plugin_api import Case, Comparison, Graph, InputFamily, Match, MatchKind, Role, StepSource, compare, oracle

H200 = preset("h200")
KINDS: dict[str, MatchKind] = {kind.name: kind for kind in (RECURRENCE_STEPS, CONVOLUTION_STEPS)}
Tensors = dict[str, torch.Tensor]


def drawn(match: Match, seed: int, offset: int = 0) -> Tensors:
    """Operands by name: normal numbers, rates and decays as trained models have them, NaN in what is written; ``offset`` of activations."""
    generator, kind = torch.Generator().manual_seed(seed), KINDS[match.kind]
    case, tensors = Case(family=InputFamily.NORMAL, seed=seed), {}
    for operand in match.operands:
        made = kind.make(match, operand, case, generator, "cpu")
        values = made if made is not None else torch.randn(operand.spec.shape, generator=generator)
        if operand.role is Role.OUTPUT:
            values = torch.full(operand.spec.shape, math.nan)
        tensors[operand.name] = aligned(values, TORCH[operand.spec.dtype], offset if operand.role in (Role.INPUT, Role.OUTPUT) else 0)
    return tensors


def judged(source: StepSource, match: Match, graph: Graph, tensors: Tensors, order: object = None) -> tuple[Comparison, Comparison]:
    """The result of a step, and the state behind it."""
    values = {operand.values[0]: tensors[operand.name].clone() for operand in match.operands if operand.role is not Role.OUTPUT}
    expected = oracle(graph, values)
    Emulated(source, match, H200).run(tensors, *([] if order is None else [order]))
    state, out = match.need("state").values[0], match.need("out").values[0]
    return compare(tensors["out"], expected[out]), compare(tensors["state"], expected[state])
