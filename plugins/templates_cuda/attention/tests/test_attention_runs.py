"""Attention of several sequences in one launch, by a kernel made of the text of one: each as it is alone, in any order; and mistakes."""

import contextlib
import math
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from agentcompile_cuda_kit.runs import several_runs
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_attention import AttentionFamily
from agentcompile_templates_cuda_attention.space import schedule
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import ContractError, DType, StepSource

pytest.importorskip("agentcompile_validator_emulation")
sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError, LaunchOptions
from agentcompile_validator_emulation.testing import Emulated, run_several
from attention_cases import Model

H200 = preset("h200")
FAMILY = AttentionFamily()
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=6, suppress_health_check=list(HealthCheck))
SMALL = Model(group=2, head_dim=32, rotary_dim=32, capacity=100)
# name: the layer, and path, warps, lanes, unroll, splits and how they merge
KERNELS = {
    "tensor, by messages": (evolve(SMALL, dtype=DType.BF16, window=60, sinks=True), ("tensor", 1, 4, 1), (4, "message")),
    "staged, by a cluster": (SMALL, ("staged", 1, 4, 2), (4, "cluster")),
    "tensor, by messages of 16": (evolve(SMALL, capacity=300), ("tensor", 1, 4, 1), (16, "message")),
    "lanes, through memory": (evolve(SMALL, dtype=DType.F32, norm="none"), ("lanes", 2, 4, 1), (3, "memory")),
    "whole, by messages": (evolve(SMALL, capacity=200), ("whole", 1, 4, 2), (4, "message")),
    "one split": (SMALL, ("lanes", 2, 4, 1), (1, "memory")),
}


@cache
def source(name: str) -> StepSource:
    model, choices, (splits, merge) = KERNELS[name]
    assert FAMILY.accepts(model.match(), H200) is True
    return FAMILY.lower(model.match(), schedule(*choices, splits, merge, True), H200)


def worst(name: str, several: StepSource, positions: list[int], seed: int, options: LaunchOptions | None) -> float:
    """Runs a step of each position in one launch, with caches and workspaces of its own; the largest share of a budget that is used."""
    model = KERNELS[name][0]
    kernels = [Emulated(source(name), model.match(), H200) for _ in positions]
    tensors = [model.draw(position, seed + 7 * run) for run, position in enumerate(positions)]
    before = [{key: tensor.clone() for key, tensor in one.items()} for one in tensors]
    run_several(several, kernels, tensors, options)
    used = [model.use(one, was, kernel.source.reduction_depth) for one, was, kernel in zip(tensors, before, kernels, strict=True)]
    alone = [{key: tensor.clone() for key, tensor in was.items()} for was in before]
    for kernel, one, together in zip(kernels, alone, tensors, strict=True):
        kernel.run(one, options)
        same = all(torch.equal(one[key].nan_to_num(7.0), together[key].nan_to_num(7.0)) for key in one)
        used.append(0.0 if same and kernel.clean() else math.inf)
    return max(used)


@pytest.mark.parametrize("name", KERNELS)
@SETTINGS
@given(positions=st.lists(st.integers(0, 99), min_size=1, max_size=4), order=st.sampled_from(SCHEDULES), seed=st.integers(0, 99))
def test_each_run_is_what_it_is_alone(name: str, positions: list[int], order: LaunchOptions, seed: int) -> None:
    several = several_runs(source(name))
    assert several is not None and several.launches[0].cluster == source(name).launches[0].cluster
    assert worst(name, several, positions, seed, evolve(order, seed=seed)) <= 1.0


def test_heads_in_parts_keep_their_depth() -> None:
    """The z of a block is that of its part, whatever run it belongs to."""
    model = Model(group=8, kv_heads=1, head_dim=32, rotary_dim=32, capacity=60)
    points = [point for point in FAMILY.space(model.match(), H200).points if dict(point.items).get("parts", 1) > 1]
    kernel = FAMILY.lower(model.match(), points[0], H200)
    assert kernel.launches[0].grid[2] > 1
    several = several_runs(kernel)
    assert several is not None
    runs = [Emulated(kernel, model.match(), H200) for _ in range(3)]
    tensors = [model.draw(position, position) for position in (0, 17, 59)]
    before = [{key: tensor.clone() for key, tensor in one.items()} for one in tensors]
    run_several(several, runs, tensors)
    assert max(model.use(one, was, kernel.reduction_depth) for one, was in zip(tensors, before, strict=True)) <= 1.0


@pytest.mark.parametrize("right, wrong", [
    ("blockIdx.z / AC_RUN_DEPTH", "0"), ("make_uint3(blockIdx.x,", "make_uint3(blockIdx.y,"),
    ("ac::number_of_run() * ", "ac::number_of_run() + "), ("of_run[2])", "of_run[1])"), ("ac::grid_dependency_wait();", "")])
def test_a_wrong_wrapper_is_seen(right: str, wrong: str) -> None:
    name = "staged, by a cluster"
    several = several_runs(source(name))
    assert several is not None and (right in several.code or any(right in text for _, text in several.headers))
    several = evolve(several, code=several.code.replace(right, wrong),
                     headers=tuple((header, text.replace(right, wrong)) for header, text in several.headers))
    with contextlib.suppress(EmulationError):
        assert worst(name, several, [40, 71, 3], 1, SCHEDULES[0]) > 1.0


def test_what_has_no_such_kernel_says_so() -> None:
    one = source("one split")
    launch = one.launches[0]
    assert several_runs(evolve(one, language="triton")) is None
    assert several_runs(evolve(one, launches=(launch, evolve(launch, grid=(1, 1, 2))))) is None
    with pytest.raises(ContractError, match="no kernel other"):
        several_runs(evolve(one, launches=(evolve(launch, entry="other"),)))
    for variable in ("__device__ int arrived;", "__device__ static float last[4];", "__managed__ int n = 3;"):
        assert several_runs(evolve(one, code=f"{variable}\n{one.code}")) is None
        assert several_runs(evolve(one, headers=(("other.cuh", variable), *one.headers))) is None
    for harmless in ("__device__ const int four = 4;", "static __device__ constexpr float half = 0.5f;", "// __device__ int arrived;",
                     "__device__ int twice(int a);"):
        assert several_runs(evolve(one, code=f"{harmless}\n{one.code}")) is not None
    said = one.code.replace("attention_kernel_" + one.digest + "(", "attention_kernel_" + one.digest + "(/* q, (k */ // and (v\n", 1)
    assert said != one.code and several_runs(evolve(one, code=said)) is not None
    for wrong in ("float softcap = zero) {", "float softcap"):
        with pytest.raises(ContractError, match=r"not a type and a name|no end"):
            several_runs(evolve(one, code=one.code[: one.code.index("float softcap) {")] + wrong))
    with pytest.raises(ContractError, match="parameters and its launch"):
        several_runs(evolve(one, launches=(evolve(launch, arguments=launch.arguments[1:]),)))
