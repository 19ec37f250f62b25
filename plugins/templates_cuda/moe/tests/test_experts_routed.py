"""Gate and up of chosen experts with the router in front: each block chooses for itself, and one of them says what was chosen."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.testing import routed_experts_case
from agentcompile_templates_cuda_moe import ExpertsFamily
from agentcompile_templates_cuda_moe.stream_space import stream_schedule
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Schedule

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from moe_cases import H200, budget_use, drawn, ran, replaced

FAMILY = ExpertsFamily()
FEW = settings(max_examples=4, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
ROWS = Schedule({"warps": 4, "rows": 1, "unroll": 2, "turns": 2})
STREAM = stream_schedule(warps=4, rows=1, columns=256, stages=3, in_flight=2, blocks_per_sm=2)
COLUMNS = Schedule({"lanes": 8, "warps": 4, "unroll": 2, "split": 2})
FORMS: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "softmax": (ROWS, {}), "softmax, over all": (ROWS, {"normalized": False, "dtype": DType.BF16}),
    "sigmoid": (ROWS, {"scoring": "sigmoid", "dtype": DType.F32}),
    "sigmoid, biased": (ROWS, {"scoring": "sigmoid", "bias": DType.F32, "dtype": DType.BF16, "expert_bias": True}),
    "stream": (STREAM, {}), "stream, dependents late": (Schedule({**dict(STREAM.items), "late_dependents": True}), {"dtype": DType.BF16}),
    "stream, sigmoid, biased": (STREAM, {"scoring": "sigmoid", "bias": DType.F32, "normalized": False}),
    "stream, biases": (STREAM, {"expert_bias": True, "dtype": DType.BF16}),
    "columns": (COLUMNS, {"lies": ("columns", "interleaved"), "expert_bias": True, "dtype": DType.BF16}),
}


def tensors_of(match: Any, seed: int) -> dict[str, torch.Tensor]:
    """As drawn, with logits of which no two are equal."""
    tensors, count = drawn(match, seed), match.integer("experts")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    tensors["logits"].copy_((order * (4.0 / count) - 2.0).reshape(tensors["logits"].shape))
    if "router_bias" in tensors:
        tensors["router_bias"].mul_(0.1)
    return tensors


@pytest.mark.parametrize("form", FORMS)
@FEW
@given(data=st.data())
def test_within_budget_and_the_choice_is_torchs(form: str, data: st.DataObject) -> None:
    schedule, said = FORMS[form]
    count, slots = data.draw(st.sampled_from((3, 31, 64, 70)), "experts"), data.draw(st.integers(1, 3), "slots")
    k = data.draw(st.sampled_from((8, 264, 520)), "k")
    match, graph = routed_experts_case(sizes=(count, slots, data.draw(st.integers(1, 40), "n"), k), **said)
    assert match.flag("routed") and FAMILY.accepts(match, H200) is True and match.operand("experts") is None
    tensors = tensors_of(match, data.draw(st.integers(0, 99), "seed"))
    ran(FAMILY.lower(match, schedule, H200), match, tensors, data.draw(st.sampled_from(SCHEDULES), "order"))
    assert budget_use(match, graph, tensors) <= 1.0
    if match.operand("router_bias") is None:
        assert tensors["choice"].flatten().tolist() == tensors["logits"].flatten().float().topk(slots).indices.tolist()


@pytest.mark.parametrize("form", ["softmax", "stream", "columns"])
def test_equal_logits_are_chosen_in_their_order(form: str) -> None:
    schedule, said = FORMS[form]
    match, graph = routed_experts_case(sizes=(9, 2, 20, 264), **said)
    tensors = tensors_of(match, 1)
    tensors["logits"][:] = 0.0
    tensors["logits"].view(-1)[3:5] = 1.0
    tensors["logits"].view(-1)[7] = 1.0
    ran(FAMILY.lower(match, schedule, H200), match, tensors)
    assert tensors["choice"].flatten().tolist() == [3, 4] and budget_use(match, graph, tensors) <= 1.0


def test_what_is_not_served_says_why() -> None:
    match, _ = routed_experts_case(sizes=(40, 2, 5, 8))
    for changes, why in (({"experts": 2000}, "2 of 2000 experts; router serves 1 to 32 of at most 1024"), ({"scoring": "tanh"}, "'tanh'"),
                         ({"summed": True, "pair": 1}, "sums have their router before gate and up")):
        refused = FAMILY.accepts(evolve(match, attributes=tuple((k, changes.get(k, v)) for k, v in match.attributes)), H200)
        assert refused is not True and why in refused.reason


WRONG = {
    "the choice is told by nobody": ("if (tells && lane < slots)", "if (false)"),
    "the second best is taken first": ("slot == lane) mine = best", "slot == (lane ^ 1)) mine = best"),
    "weights are not divided": ("weight / total * factor", "weight * factor"),
    "the last logits are not looked at": ("if (index >= count) missing", "if (index >= count - 2) missing"),
    "no barrier behind the choice": ("part.slots, chosen);\n  __syncthreads();", "part.slots, chosen);"),
    "each slot has the first expert": ("chosen[place] = expert", "chosen[place] = __shfl_sync(1u << threadIdx.x, expert, 0)"),
}


@pytest.mark.parametrize("schedule", [ROWS, STREAM], ids=["rows", "stream"])
@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str, schedule: Schedule) -> None:
    text, wrong = WRONG[what]
    if schedule is STREAM and "chosen" in text:
        return  # nothing of that is in it
    match, graph = routed_experts_case(sizes=(40, 3, 45, 520))
    tensors = tensors_of(match, 5)
    tensors["logits"].view(-1)[39] = 3.0
    source = replaced(FAMILY.lower(match, schedule, H200), text, wrong)
    try:
        for order in (None, SCHEDULES[2], SCHEDULES[3]):
            ran(source, match, tensors, order)
    except EmulationError:
        return
    assert budget_use(match, graph, tensors) > 1.0
