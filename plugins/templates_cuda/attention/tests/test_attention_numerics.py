"""The three attention kernels against fp64 on the CPU, and what must hold between runs: append, padding, splits, repetition."""

import math
import sys
from pathlib import Path

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_attention import AttentionFamily
from agentcompile_templates_cuda_attention.space import schedule
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Schedule

pytest.importorskip("agentcompile_validator_emulation")
sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from agentcompile_validator_emulation.module import SCHEDULES, LaunchOptions
from agentcompile_validator_emulation.testing import Emulated
from attention_cases import Model

H200 = preset("h200")
FAMILY = AttentionFamily()
FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))

SLOPES = (0.5, 0.25, 0.0625, 0.01, 0.7, 0.3, 0.03, 0.001)  # of ALiBi: heads that look far and heads that do not
# name: the layer, and (path, warps, lanes, unroll)
KERNELS = {
    "lanes_f16": (Model(), ("lanes", 2, 8, 2)),
    "lanes_f32_group4": (Model(dtype=DType.F32, group=4, norm="none", capacity=48), ("lanes", 2, 16, 1)),
    "lanes_bf16_partial_padded": (Model(dtype=DType.BF16, group=1, head_dim=80, rotary_dim=32, norm="rms_one_plus"), ("lanes", 2, 16, 2)),
    "lanes_wide_heads": (Model(dtype=DType.F32, kv_heads=1, head_dim=256, rotary_dim=256), ("lanes", 1, 32, 1)),
    "tensor_f16": (Model(head_dim=128, rotary_dim=128), ("tensor", 2, 4, 1)),
    "tensor_bf16_all": (Model(dtype=DType.BF16, group=4, norm="none", window=37, softcap=3.0, sinks=True, slopes=SLOPES),
                        ("tensor", 1, 4, 2)),
    "lanes_chunks": (Model(group=3, chunk=29, norm="none"), ("lanes", 2, 8, 2)),
    "tensor_chunks_in_a_window": (Model(dtype=DType.BF16, chunk=37, window=30), ("tensor", 1, 4, 2)),
    "staged_chunks": (Model(group=4, chunk=41, sinks=True), ("staged", 2, 4, 2)),
    "tensor_padded": (Model(group=3, head_dim=80, rotary_dim=32), ("tensor", 2, 4, 1)),
    # Without norm and RoPE nothing is rounded before the output, so the budget shows the error of the weights themselves.
    "tensor_plain": (Model(rotary_dim=0, norm="none"), ("tensor", 2, 4, 1)),
    "lanes_plain": (Model(rotary_dim=0, norm="none"), ("lanes", 2, 8, 1)),
    "lanes_slopes": (Model(dtype=DType.F32, rotary_dim=0, norm="none", capacity=48, slopes=SLOPES[:4]), ("lanes", 2, 16, 1)),
    "lanes_narrow_value": (Model(dtype=DType.F32, head_dim=48, rotary_dim=16, value_dim=32, norm="none"), ("lanes", 2, 16, 1)),
    "tensor_narrow_value": (Model(head_dim=96, rotary_dim=0, value_dim=64, norm="none"), ("tensor", 2, 4, 1)),
    "tensor_wide_value": (Model(head_dim=32, rotary_dim=32, value_dim=72, group=3), ("tensor", 1, 4, 1)),
    "tensor_group8": (Model(group=8, head_dim=32, rotary_dim=32, norm="none"), ("tensor", 1, 4, 1)),
    "lanes_pairs": (Model(dtype=DType.F32, head_dim=48, rotary_dim=20, interleaved=True), ("lanes", 2, 16, 1)),
    "tensor_pairs": (Model(dtype=DType.BF16, head_dim=128, rotary_dim=128, norm="none", interleaved=True), ("tensor", 2, 4, 1)),
    "staged_pairs": (Model(group=3, head_dim=80, rotary_dim=40, norm="none", interleaved=True), ("staged", 2, 4, 2)),
    "staged_f16": (Model(head_dim=128, rotary_dim=128), ("staged", 2, 4, 2)),
    "staged_bf16_all": (Model(dtype=DType.BF16, group=4, norm="none", window=37, softcap=3.0, sinks=True, slopes=SLOPES),
                        ("staged", 1, 4, 3)),
    "whole_f16": (Model(head_dim=128, rotary_dim=128), ("whole", 2, 4, 3)),
    "whole_bf16_all": (Model(dtype=DType.BF16, group=4, norm="none", window=37, softcap=3.0, sinks=True, slopes=SLOPES),
                       ("whole", 1, 4, 3)),
    "whole_padded": (Model(group=3, head_dim=80, rotary_dim=32), ("whole", 2, 4, 2)),
    "staged_padded": (Model(group=3, head_dim=80, rotary_dim=32), ("staged", 2, 4, 1)),
    "staged_narrow_value": (Model(head_dim=72, rotary_dim=0, value_dim=64, norm="none"), ("staged", 2, 4, 3)),
    "staged_wide_value": (Model(head_dim=32, rotary_dim=32, value_dim=136, group=3), ("staged", 1, 4, 2)),
}
EVERY_MERGE = ("lanes_f16", "tensor_f16", "tensor_bf16_all", "staged_f16", "staged_bf16_all", "whole_f16", "whole_bf16_all")
LANES_ALL = Model(window=37, softcap=3.0, sinks=True, group=3, norm="none", slopes=SLOPES[:6])


def emulated(model: Model, choices: tuple[str, int, int, int], splits: int, merge: str = "global", early_kv: bool = False) -> Emulated:
    point: Schedule = schedule(*choices, splits, merge, early_kv)
    assert FAMILY.accepts(model.match(), H200) is True
    return Emulated(FAMILY.lower(model.match(), point, H200), model.match(), H200)


def snapshot(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def tile_of(choices: tuple[str, int, int, int]) -> int:
    path, warps, lanes, unroll = choices
    return warps * {"tensor": 16 * unroll, "staged": 16, "whole": 16}.get(path, 32 // lanes * unroll)


@pytest.mark.parametrize("name", KERNELS)
@FEW
@given(data=st.data())
def test_within_budget(name: str, data: st.DataObject) -> None:
    model, choices = KERNELS[name]
    tile = tile_of(choices)
    edges = [p for t in (0, 1, 2, 3, 4) for p in (t * tile - 1, t * tile, t * tile + 1) if 0 <= p < model.capacity]
    position = data.draw(st.one_of(st.sampled_from(edges), st.integers(0, model.capacity - 1)))
    kernel = emulated(model, choices, data.draw(st.sampled_from((1, 2, 3))))
    tensors = model.draw(position, data.draw(st.integers(0, 1000)), data.draw(st.sampled_from((0.1, 1.0, 4.0))))
    before = snapshot(tensors)
    kernel.run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    assert model.use(tensors, before, kernel.source.reduction_depth) <= 1.0
    assert kernel.clean()


def test_lanes_with_window_cap_and_sinks() -> None:
    kernel = emulated(LANES_ALL, ("lanes", 2, 8, 1), 2)
    for position in (0, 36, 37, 70):
        tensors = LANES_ALL.draw(position, position)
        before = snapshot(tensors)
        kernel.run(tensors)
        assert LANES_ALL.use(tensors, before, kernel.source.reduction_depth) <= 1.0


@pytest.mark.parametrize("name", ["lanes_f16", "tensor_f16", "staged_f16", "whole_f16"])
def test_append_writes_one_row_and_equals_recomputing_it(name: str) -> None:
    model, choices = KERNELS[name]
    kernel = emulated(model, choices, 2)
    for position in (0, 5, 33, 63):
        tensors = model.draw(position, position + 1)
        before = snapshot(tensors)
        kernel.run(tensors)
        expected, error = model.prepared(before, "k")
        assert bool(((tensors["k_cache"][0, position].double() - expected).abs() <= error).all())
        assert torch.equal(tensors["v_cache"][0, position].flatten(), before["v"].flatten())
        for cache in ("k_cache", "v_cache"):
            others = [p for p in range(model.capacity) if p != position]
            assert torch.equal(tensors[cache][0, others].nan_to_num(7.0), before[cache][0, others].nan_to_num(7.0))


@pytest.mark.parametrize("name", ["lanes_f16", "tensor_f16", "staged_f16", "whole_f16"])
def test_decoding_on_from_an_appended_row(name: str) -> None:
    """Step t + 1 over the cache that step t wrote equals fp64 over the row as it should have been."""
    model, choices = KERNELS[name]
    kernel = emulated(model, choices, 2)
    tensors = model.draw(40, 3)
    kernel.run(tensors)
    fresh = model.draw(41, 4)
    for cache in ("k_cache", "v_cache"):
        fresh[cache].copy_(tensors[cache])
    before = snapshot(fresh)
    kernel.run(fresh)
    assert model.use(fresh, before, kernel.source.reduction_depth) <= 1.0


@pytest.mark.parametrize("name", ["lanes_f16", "tensor_f16", "staged_f16", "whole_f16"])
def test_repetition_and_thread_order_give_the_same_bits(name: str) -> None:
    model, choices = KERNELS[name]
    kernel = emulated(model, choices, 3)
    tensors = model.draw(90, 5)
    before = snapshot(tensors)
    kernel.run(tensors)
    first = tensors["out"].clone()
    for options in (*SCHEDULES[1:4], LaunchOptions(preempt_per_million=20000, seed=3)):
        again = snapshot(before)
        kernel.run(again, options)
        assert torch.equal(again["out"], first)
        assert kernel.clean()


@pytest.mark.parametrize("name", ["lanes_f16", "tensor_f16", "staged_f16", "whole_f16"])
def test_every_number_of_splits_is_within_budget(name: str) -> None:
    model, choices = KERNELS[name]
    tensors = model.draw(95, 6)
    before = snapshot(tensors)
    for splits in (1, 2, 3, 4, 9, 20):
        again = snapshot(before)
        kernel = emulated(model, choices, splits)
        kernel.run(again)
        assert model.use(again, before, kernel.source.reduction_depth) <= 1.0


@pytest.mark.parametrize("name", EVERY_MERGE)
def test_clusters_are_within_budget_and_repeat(name: str) -> None:
    """Blocks without work leave early, one block alone needs no merge, all of them push to each other."""
    model, choices = KERNELS[name]
    kernel = emulated(model, choices, 4, "cluster")
    for number, position in enumerate((0, 15, 40, 64, 95)):
        tensors = model.draw(position, number)
        before = snapshot(tensors)
        kernel.run(tensors, SCHEDULES[number])
        assert model.use(tensors, before, kernel.source.reduction_depth) <= 1.0
        again = snapshot(before)
        kernel.run(again, SCHEDULES[(number + 2) % len(SCHEDULES)])
        assert torch.equal(again["out"], tensors["out"])


@pytest.mark.parametrize("name", EVERY_MERGE)
def test_rows_loaded_before_the_wait_give_the_same_bits(name: str) -> None:
    """The emulator makes the hint of the position stale in odd blocks, and reports any other early read."""
    model, choices = KERNELS[name]
    for position in (0, 1, 32, 64, 95):
        tensors = model.draw(position, position)
        late, early = snapshot(tensors), snapshot(tensors)
        emulated(model, choices, 4).run(late, LaunchOptions(programmatic_launch=True))
        emulated(model, choices, 4, early_kv=True).run(early, LaunchOptions(programmatic_launch=True))
        assert torch.equal(early["out"], late["out"])
        assert torch.equal(early["k_cache"].nan_to_num(7.0), late["k_cache"].nan_to_num(7.0))


@pytest.mark.parametrize("name", ["lanes_f16", "tensor_f16", "staged_f16", "whole_f16"])
def test_a_used_nan_propagates_to_its_kv_head_only(name: str) -> None:
    model, choices = KERNELS[name]
    kernel = emulated(model, choices, 2)
    tensors = model.draw(50, 7)
    tensors["k_cache"][0, 20, 1, 3] = math.nan
    kernel.run(tensors)
    bad = tensors["out"].view(model.kv_heads, -1).isnan()
    assert bool(bad[1].all()) and not bool(bad[0].any())


@pytest.mark.parametrize("name", ["lanes_f16", "tensor_f16", "staged_f16", "whole_f16"])
def test_a_position_beyond_the_capacity_touches_nothing_outside(name: str) -> None:
    """The session refuses such a step; slots of a replay that overran must still not corrupt memory."""
    model, choices = KERNELS[name]
    kernel = emulated(model, choices, 2)
    tensors = model.draw(model.capacity - 1, 8)
    for cache in ("k_cache", "v_cache"):
        tensors[cache].nan_to_num_(0.5)
    before = snapshot(tensors)
    for beyond in (model.capacity, model.capacity + 31):
        tensors["position"].fill_(beyond)
        kernel.run(tensors)  # out-of-bounds accesses raise
        assert torch.equal(tensors["k_cache"], before["k_cache"]) and bool(tensors["out"].isfinite().all())


def test_one_position_returns_its_value() -> None:
    model, choices = KERNELS["tensor_f16"]
    kernel = emulated(model, choices, 2)
    tensors = model.draw(0, 9)
    kernel.run(tensors)
    rows = tensors["v"].view(model.kv_heads, 1, -1).expand(-1, model.group, -1)
    assert torch.equal(tensors["out"].view(model.kv_heads, model.group, -1), rows)
