"""The norm family against fp64 on the CPU: every kind and type, tails, alignment, residual sums, roundings."""

import math

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_norm import NormFamily
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import NORM, Access, DType, Match, Role, Schedule, SemanticLabel

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES
from agentcompile_validator_emulation.testing import TINY, TORCH, UNIT, Emulated, aligned, operand

H200 = preset("h200")
FAMILY = NormFamily()
FEW = settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
EPS = 1e-6


def norm_match(rows: int, columns: int, kind: str, dtype: DType = DType.F16, weight: bool = True, bias: bool = False,
               residual: bool = False) -> Match:
    operands = [operand("x", Role.INPUT, (rows, columns), dtype), operand("out", Role.OUTPUT, (rows, columns), dtype, Access.WRITE)]
    if weight:
        operands.append(operand("weight", Role.WEIGHT, (columns,), dtype))
    if bias:
        operands.append(operand("bias", Role.WEIGHT, (columns,), dtype))
    if residual:
        operands += [operand("residual", Role.INPUT, (rows, columns), dtype),
                     operand("residual_out", Role.OUTPUT, (rows, columns), dtype, Access.WRITE)]
    return Match(kind=NORM, label=SemanticLabel.NORM, nodes=("norm",), operands=tuple(operands),
                 attributes=(("rows", rows), ("columns", columns), ("norm", kind), ("norm_eps", EPS)))


def draw(match: Match, seed: int, scale: float, offset: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for item in match.operands:
        values = torch.randn(item.spec.shape, generator=generator, dtype=torch.float64)
        values = torch.full_like(values, math.nan) if item.role is Role.OUTPUT else values * (scale if item.role is Role.INPUT else 1.0)
        tensors[item.name] = aligned(values, TORCH[item.spec.dtype], offset)
    return tensors


def budget_use(match: Match, tensors: dict[str, torch.Tensor], depth: int) -> float:
    dtype = tensors["x"].dtype
    x = (tensors["x"].double() + tensors["residual"].double()).to(dtype).double() if "residual" in tensors else tensors["x"].double()
    weight = tensors["weight"].double() if "weight" in tensors else 1.0
    bias = tensors["bias"].double() if "bias" in tensors else 0.0
    kind = match.text("norm")
    statistics = 2 * math.sqrt(depth) * 2.0**-24 + 2.0**-21
    if kind == "layer":
        mean = x.mean(-1, keepdim=True)
        y = (x - mean) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + EPS)
        expected, roundings = y * weight + bias, 1.001
        shift = mean.abs() * statistics * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + EPS)
        extra = statistics * ((y * weight).abs() + abs(bias)) + shift * abs(weight)
    else:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        expected = y * (1 + weight) if kind == "rms_one_plus" else y * weight
        roundings = 2.01 if kind == "rms" else 1.001
        extra = statistics * expected.abs() + (TINY[dtype] * abs(weight) if kind == "rms" else 0.0)
    budget = roundings * UNIT[dtype] * expected.abs() + TINY[dtype] + extra
    return float(((tensors["out"].double() - expected).abs() / budget).max())


def emulated(match: Match, threads: int, warps_per_row: int) -> Emulated:
    assert FAMILY.accepts(match, H200) is True
    return Emulated(FAMILY.lower(match, Schedule({"threads": threads, "warps_per_row": warps_per_row}), H200), match, H200)


@pytest.mark.parametrize("kind,dtype,bias", [("rms", DType.F16, False), ("rms_one_plus", DType.BF16, False), ("layer", DType.F16, True),
                                             ("rms", DType.F32, False), ("rms_once", DType.F16, False)], ids=str)
@FEW
@given(data=st.data())
def test_within_budget(kind: str, dtype: DType, bias: bool, data: st.DataObject) -> None:
    one_warp = data.draw(st.booleans())
    columns = data.draw(st.sampled_from((1, 8, 31, 64, 120, 128) if one_warp else (257, 512, 640, 1000)))
    rows = data.draw(st.sampled_from((1, 3, 5)))
    match = norm_match(rows, columns, kind, dtype, bias=bias)
    tensors = draw(match, data.draw(st.integers(0, 99)), data.draw(st.sampled_from((1e-2, 1.0, 50.0))), data.draw(st.sampled_from((0, 1))))
    kernel = emulated(match, 64, 1 if one_warp else 2)
    kernel.run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    assert budget_use(match, tensors, kernel.source.reduction_depth) <= 1.0


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32], ids=lambda d: d.value)
def test_residual_sum_is_rounded_written_and_normalized(dtype: DType) -> None:
    match = norm_match(2, 520, "rms", dtype, residual=True)
    tensors = draw(match, 5, 2.0)
    kernel = emulated(match, 128, 4)
    kernel.run(tensors)
    assert torch.equal(tensors["residual_out"], tensors["x"] + tensors["residual"])
    assert budget_use(match, tensors, kernel.source.reduction_depth) <= 1.0


def test_half_precision_rounds_like_the_framework() -> None:
    """x is a power of two everywhere, so r is exact: the result must be the framework's, bit for bit."""
    match = norm_match(1, 256, "rms")
    tensors = draw(match, 6, 1.0)
    tensors["x"].fill_(4.0)
    emulated(match, 64, 2).run(tensors)
    x = tensors["x"].float()
    normalized = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).half()
    assert torch.equal(tensors["out"], tensors["weight"] * normalized)


def test_a_norm_that_rounds_twice_is_none_that_rounds_once() -> None:
    twice, once = norm_match(5, 1000, "rms"), norm_match(5, 1000, "rms_once")
    tensors = draw(twice, 9, 1.0)
    kernel = emulated(twice, 64, 2)
    kernel.run(tensors)
    assert budget_use(twice, tensors, kernel.source.reduction_depth) <= 1.0 < budget_use(once, tensors, kernel.source.reduction_depth)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_without_weight(kind: str) -> None:
    match = norm_match(1, 96, kind, weight=False)
    tensors = draw(match, 7, 3.0)
    kernel = emulated(match, 64, 2)
    kernel.run(tensors)
    assert budget_use(match, tensors, kernel.source.reduction_depth) <= 1.0


def test_a_nan_stays_in_its_row() -> None:
    match = norm_match(3, 40, "rms")
    tensors = draw(match, 8, 1.0)
    tensors["x"][1, 17] = math.nan
    emulated(match, 64, 1).run(tensors)
    assert tensors["out"].isnan().all(-1).tolist() == [False, True, False]
    assert not bool(tensors["out"][[0, 2]].isnan().any())


def test_space_and_rejects() -> None:
    for match in (norm_match(1, 2048, "rms"), norm_match(32, 128, "rms"), norm_match(1, 8192, "layer", DType.F32)):
        points = FAMILY.space(match, H200).points
        assert 0 < len(points) == len(set(points)) <= 64
        assert FAMILY.accepts(match, H200) is True
    assert FAMILY.space(norm_match(32, 128, "rms"), H200).points[0]["warps_per_row"] == 1
    assert FAMILY.space(norm_match(1, 2048, "rms"), H200).points[0]["warps_per_row"] > 1
    assert "registers" in FAMILY.accepts(norm_match(1, 1 << 20, "rms", residual=True), H200).reason
    assert "unknown norm" in FAMILY.accepts(norm_match(1, 64, "batch"), H200).reason


@pytest.mark.compile
@pytest.mark.parametrize("name", ["a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090"])
def test_builds_without_spills(name: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    for match in (norm_match(1, 2048, "rms", residual=True), norm_match(1, 4096, "layer", DType.BF16, bias=True)):
        source = FAMILY.lower(match, FAMILY.space(match, target).points[0], target)
        assert backend.build(source, target).resources.spill_bytes == 0
