"""What the tests of both families share: operands as a router makes them, runs on the emulator, and use of the budget."""

import math

import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_validator_emulation.testing import TORCH, Emulated, aligned
from attrs import evolve

from agentcompile_core.plugin_api import DType, Graph, Match, StepSource, compare, oracle

H200 = preset("h200")


def drawn(match: Match, seed: int, integers: bool = False, offset: int = 0) -> dict[str, torch.Tensor]:
    """Operands by name: different experts, small whole numbers or normal ones (matrices as trained), NaN in what is written."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for operand in match.operands:
        shape, dtype = operand.spec.shape, operand.spec.dtype
        values = torch.randint(-2, 3, shape, generator=generator) if integers else torch.randn(shape, generator=generator)
        if operand.name == "weight" and not integers:
            values = values * match.integer("k") ** -0.5
        if dtype is DType.I64:
            count = match.integer("experts")
            values = torch.randperm(count, generator=generator)[: operand.spec.numel].reshape(shape)
        elif operand.access.value == "write":
            values = torch.full(shape, math.nan)
        tensors[operand.name] = aligned(values if dtype is DType.I64 else values.float(), TORCH[dtype], offset)
    return tensors


def ran(source: StepSource, match: Match, tensors: dict[str, torch.Tensor], order: object = None) -> dict[str, torch.Tensor]:
    """The operands after a run."""
    Emulated(source, match, H200).run(tensors, *([] if order is None else [order]))
    return tensors


def budget_use(match: Match, graph: Graph, tensors: dict[str, torch.Tensor]) -> float:
    """The largest error of any output over its budget."""
    written = {o.values[0]: o.name for o in match.operands if o.access.value == "write"}
    values = {o.values[0]: tensors[o.name] for o in match.operands if o.name not in written.values()}
    expected = oracle(graph, values)
    return max(compare(tensors[name], expected[value]).budget_use for value, name in written.items())


def replaced(source: StepSource, text: str, wrong: str) -> StepSource:
    """The source with a mistake in its template, or in a header of its own."""
    headers = tuple((name, part.replace(text, wrong)) for name, part in source.headers)
    changed = evolve(source, code=source.code.replace(text, wrong), headers=headers)
    assert changed != source
    return changed
