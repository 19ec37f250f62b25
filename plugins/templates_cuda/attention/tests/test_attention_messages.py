"""Splits that merge by messages of a cluster: any length, group and width of V, every kernel; what is sent or awaited wrongly is caught."""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from agentcompile_cuda_kit import include_dir
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_attention import AttentionFamily
from agentcompile_templates_cuda_attention.space import schedule
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
BLOCKS = 8
# name: the layer, (path, warps, lanes, unroll), and the positions of a block's tile. Outputs per KV head: 216, whose last chunk of 16 is
# half; 24, fewer than the blocks could own, in heads narrower than a cluster; 128 of one head.
KERNELS = {
    "tensor_padded": (Model(dtype=DType.BF16, group=3, head_dim=32, rotary_dim=32, value_dim=72, norm="none", window=125, softcap=3.0,
                            sinks=True, capacity=150), ("tensor", 1, 4, 1), 16),
    "lanes_narrow": (Model(dtype=DType.F32, kv_heads=1, head_dim=16, value_dim=12, rotary_dim=0, norm="none", capacity=140),
                     ("lanes", 2, 4, 1), 16),
    "staged": (Model(group=2, head_dim=64, rotary_dim=64, capacity=150), ("staged", 1, 4, 2), 16),
    "whole": (Model(group=2, head_dim=64, rotary_dim=64, capacity=150), ("whole", 1, 4, 2), 16),
    "lanes_one_head": (Model(group=1, head_dim=128, rotary_dim=128, capacity=80), ("lanes", 2, 16, 2), 8),
}


@cache
def emulated(name: str, merge: str = "message") -> Emulated:
    model, choices, _ = KERNELS[name]
    assert FAMILY.accepts(model.match(), H200) is True
    return Emulated(FAMILY.lower(model.match(), schedule(*choices, BLOCKS, merge, True), H200), model.match(), H200)


def outputs(kernel: Emulated, model: Model, position: int, seed: int, options: LaunchOptions | None) -> torch.Tensor:
    """Runs a step; asserts that it is within the budget."""
    tensors = model.draw(position, seed)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    kernel.run(tensors, options)
    assert model.use(tensors, before, kernel.source.reduction_depth) <= 1.0 and kernel.clean()
    return tensors["out"]


def in_any_order(data: st.DataObject) -> LaunchOptions:
    return evolve(data.draw(st.sampled_from(SCHEDULES)), lazy_copies=data.draw(st.booleans()))


@pytest.mark.parametrize("name", KERNELS)
@settings(max_examples=2, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_number_of_blocks_with_work_is_within_budget_and_repeats(name: str, data: st.DataObject) -> None:
    model, _, tile = KERNELS[name]
    for active in range(1, BLOCKS + 1):
        edge = active * tile + data.draw(st.sampled_from((-1, -2, 0, -tile // 2)))
        position, seed = min(max(edge, 0), model.capacity - 1), data.draw(st.integers(0, 99))
        first, again = (outputs(emulated(name), model, position, seed, in_any_order(data)) for _ in range(2))
        assert torch.equal(first, again)


def test_the_three_ways_to_merge_give_the_same_bits() -> None:
    """All merge the splits in their order; up to eight of them are added up in one round in each way."""
    name = "lanes_one_head"
    model, _, tile = KERNELS[name]
    for position in (0, tile, 3 * tile + 1, model.capacity - 1):
        kernels = (emulated(name, merge) for merge in ("message", "cluster", "global"))
        one, *others = (outputs(kernel, model, position, position, SCHEDULES[0]) for kernel in kernels)
        assert all(torch.equal(one, other) for other in others)


# A text of split.cuh, what stands there instead, and what the emulator says of it.
WRONG = {
    "fewer bytes expected": ("active * bytes)", "active * bytes - 8)", "in flight|does not expect|has exited|-8 bytes missing"),
    "another block owns it": ("return i / chunk * active / chunks;", "return i / chunk % active;",
                              "bytes missing|in flight|has exited|uninitialised read|out of bounds"),
    "no wait": ("mbarrier_wait_cluster(&parts.arrived, 0);", "", "uninitialised read|in flight|has exited"),
}


def planted(source: StepSource, text: str, wrong: str) -> StepSource:
    """The source with a mistake in its own copy of split.cuh."""
    name = "agentcompile/split.cuh"
    library = (include_dir() / name).read_text(encoding="utf-8")
    assert library.count(text) == 1
    return evolve(source, headers=(*source.headers, (name, library.replace(text, wrong))))


@pytest.mark.parametrize("what", WRONG)
def test_what_is_sent_or_awaited_wrongly_is_caught(what: str) -> None:
    text, wrong, said = WRONG[what]
    model, choices, tile = KERNELS["lanes_narrow"]
    model = evolve(model, value_dim=40)
    source = FAMILY.lower(model.match(), schedule(*choices, BLOCKS, "message", True), H200)
    kernel = Emulated(planted(source, text, wrong), model.match(), H200)
    for options in SCHEDULES[:3]:
        with pytest.raises(EmulationError, match=said):
            outputs(kernel, model, 3 * tile, 1, options)
