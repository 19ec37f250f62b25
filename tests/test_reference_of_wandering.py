"""Attention whose partial sums go far and come back: what honest sums in the order of positions round is inside the budget."""

import pytest
import torch
from agentcompile_rules_transformers import testing as cases
from agentcompile_rules_transformers.kinds import KINDS

from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.verdict import Case
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import compare, oracle
from agentcompile_core.worker.operands import graph_values, make_inputs

ATTENTION = next(kind for kind in KINDS if kind.name == "attention")
CAPACITY, DIM = 1024, 64


def one_by_one(values: dict[str, torch.Tensor], position: int, scale: float, backwards: bool) -> torch.Tensor:
    """Attention of one row [1, 1, H, D] in float32; one accumulator adds the positions in their order, or from the last to the first."""
    keys, held = (torch.cat((values[f"{x}_cache"][0, :position, 0], values[x].reshape(1, DIM))) for x in ("k", "v"))
    scores = values["q"].view(-1, DIM) @ keys.T * scale
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    found = torch.zeros(weights.shape[0], DIM)
    for j in reversed(range(position + 1)) if backwards else range(position + 1):
        found = found + weights[:, j, None] * held[j]
    return found / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("seed", range(4))
def test_sums_that_go_far_and_come_back_are_inside(seed: int) -> None:
    """The first half of V lies above zero and the second one below it: every partial sum between them is far larger than the result."""
    match, graph = cases.attention_case(heads=(2, 1), head_dim=DIM, capacity=CAPACITY, rope="", dtype=DType.F32)
    position = CAPACITY - 1
    values = graph_values(match, graph, make_inputs(match, ATTENTION, Case(family="normal", seed=seed, position=position), "cpu"))
    sides = torch.where(torch.arange(CAPACITY) < CAPACITY // 2, 1.0, -1.0)[:, None]
    values["v_cache"][0, :, 0] += sides
    values["v"].view(1, DIM).add_(-1.0)
    expected = oracle(graph, values)[graph.outputs[0]]
    wandered = [one_by_one(values, position, match.number("scale"), backwards) for backwards in (False, True)]
    framework = compile_nodes(graph, device="cpu").run({name: tensor.clone() for name, tensor in values.items()})[graph.outputs[0]]
    for found in (*wandered, framework):
        made = compare(found.view(framework.shape), expected)
        assert made.ok, made.detail
    missing = {**values, "v_cache": values["v_cache"].clone()}
    missing["v_cache"][0, 700, 0] = 0.0  # a single position left out
    assert not compare(one_by_one(missing, position, match.number("scale"), False).view(framework.shape), expected).ok
