"""Splits that merge through global memory: any number of them, in teams of the last block's threads; and what teams could do wrong."""

import sys
from pathlib import Path

import pytest
import torch
from agentcompile_cuda_kit import include_dir
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_attention import AttentionFamily
from agentcompile_templates_cuda_attention.space import schedule, with_parts
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, StepSource

pytest.importorskip("agentcompile_validator_emulation")
sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import Emulated
from attention_cases import Model

H200 = preset("h200")
FAMILY = AttentionFamily()
SETTINGS = settings(max_examples=10, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
LANES = 4  # of a position: a warp owns eight


def layer(group: int, value_dim: int, warps: int, splits: int, **more: object) -> Model:
    """One whose positions give every split a tile and a half."""
    return Model(**{"dtype": DType.F32, "kv_heads": 2, "group": group, "head_dim": 16, "value_dim": value_dim, "rotary_dim": 0,
                    "norm": "none", "capacity": splits * warps * 12} | more)


def lowered(model: Model, warps: int, splits: int, parts: int = 1) -> StepSource:
    assert FAMILY.accepts(model.match(), H200) is True
    return FAMILY.lower(model.match(), with_parts(schedule("lanes", warps, LANES, 1, splits), parts), H200)


def output(kernel: Emulated, model: Model, position: int, options: LaunchOptions) -> torch.Tensor:
    """Runs a step; asserts that it is within the budget."""
    tensors = model.draw(position, position)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    kernel.run(tensors, options)
    assert model.use(tensors, before, kernel.source.reduction_depth) <= 1.0 and kernel.clean()
    return tensors["out"]


@SETTINGS
@given(data=st.data())
def test_any_number_of_splits_with_work_is_within_budget_and_repeats(data: st.DataObject) -> None:
    """In one team or several: of 8, of a fraction of the splits, the last one with fewer; heads in parts and with sinks as well."""
    group, value_dim = data.draw(st.integers(1, 5)), data.draw(st.sampled_from((4, 8, 12, 20, 32, 64)))
    warps, splits = data.draw(st.sampled_from((1, 2, 4))), data.draw(st.sampled_from((9, 16, 31, 40)))
    model = layer(group, value_dim, warps, splits, sinks=data.draw(st.booleans()))
    kernel = Emulated(lowered(model, warps, splits, data.draw(st.sampled_from((1, 1, group)))), model.match(), H200)
    for active in (data.draw(st.integers(1, 8)), data.draw(st.integers(9, splits)), splits):
        position = active * warps * 8 - 1 - data.draw(st.integers(0, 7))
        orders = data.draw(st.permutations(SCHEDULES))[:2]
        first, again = (output(kernel, model, position, evolve(order, seed=active)) for order in orders)
        assert torch.equal(first, again)


@SETTINGS
@given(data=st.data())
def test_any_number_of_warps_and_stages_streams_heads_of_any_width(data: st.DataObject) -> None:
    """Positions at, before and behind the ends of a split's rounds; rows of one vector to more than a warp copies at once."""
    path, warps = data.draw(st.sampled_from(("staged", "whole"))), data.draw(st.sampled_from((1, 3, 5, 6)))
    head_dim, value_dim = data.draw(st.sampled_from((8, 16, 64, 80, 128, 264))), data.draw(st.sampled_from((16, 32, 96, 128, 256)))
    stages, splits = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    rounds, each = stages + 2, splits * warps * 16
    dtype, group = data.draw(st.sampled_from((DType.F16, DType.BF16))), data.draw(st.integers(1, 3))
    model = Model(dtype=dtype, kv_heads=2, group=group, head_dim=head_dim, value_dim=value_dim, rotary_dim=0, norm="none",
                  capacity=rounds * each)
    assert FAMILY.accepts(model.match(), H200) is True
    source = FAMILY.lower(model.match(), schedule(path, warps, 4, stages, splits, "global", data.draw(st.booleans())), H200)
    kernel = Emulated(source, model.match(), H200)
    for _ in range(2):
        position = max(0, min(rounds * each, data.draw(st.integers(1, rounds)) * each + data.draw(st.sampled_from((-17, -1, 0, 1)))) - 1)
        output(kernel, model, position, evolve(data.draw(st.sampled_from(SCHEDULES)), lazy_copies=data.draw(st.booleans())))


# A text of split.cuh, what stands there instead, and what the emulator says of it; empty: the numbers are wrong.
WRONG = {
    "teams do not wait for each other": ("  if (busy == 1) return;\n  __syncthreads();\n", "  if (busy == 1) return;\n",
                                         "race|uninitialised read"),
    "the last team has as many splits as the others": ("min(each, active - first), [&]", "each, [&]", "uninitialised read|beyond|outside"),
    "there are more runs of splits than teams": ("max(batch, (active + teams - 1) / teams)", "batch",
                                                 "index|beyond|outside|overflow|bounds"),
    "all teams read the first splits": ("first = team * each, output", "first = 0, output", ""),
    "a team's state is its neighbour's": ("return states[team][i / HeadDim]; }, [&](int team)",
                                          "return states[0][i / HeadDim]; }, [&](int team)", ""),
    "splits of heads share their memory": ("static_cast<long long>(memory.head) * gridDim.x;", "0;", "race|uninitialised read"),
    "no fence behind the arrival": ("      __threadfence();\n      atomicExch", "      atomicExch", "race|fence"),
}
MODEL, WARPS, SPLITS = layer(2, 16, 2, 20), 2, 20


@pytest.mark.parametrize("what", WRONG)
def test_what_a_team_could_do_wrong_is_caught(what: str) -> None:
    text, wrong, said = WRONG[what]
    name = "agentcompile/split.cuh"
    library = (include_dir() / name).read_text(encoding="utf-8")
    assert library.count(text) == 1
    source = lowered(MODEL, WARPS, SPLITS)
    kernel = Emulated(evolve(source, headers=(*source.headers, (name, library.replace(text, wrong)))), MODEL.match(), H200)
    with pytest.raises((EmulationError, AssertionError), match=said or None):
        for number, order in enumerate(SCHEDULES):
            output(kernel, MODEL, (SPLITS - number) * WARPS * 8 - 1, evolve(order, seed=number))
