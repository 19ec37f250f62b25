"""The norm family against fp64 on the CPU: every kind and type, tails, alignment, residual sums, roundings."""

import math

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_norm import NormFamily
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import NORM, Access, DType, Expression, Match, Operation, PointwiseKind, Role, Schedule, SemanticLabel

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES
from agentcompile_validator_emulation.testing import TINY, TORCH, UNIT, Emulated, aligned, operand

H200 = preset("h200")
FAMILY = NormFamily()
FEW = settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
EPS = 1e-6


ADDED = Expression(arguments=("acc0", "aux0"), operations=(Operation(PointwiseKind.ADD, ("aux0", "acc0")),))
GATED = Expression(arguments=("acc0", "aux0", "aux1"), operations=(Operation(PointwiseKind.MUL, ("acc0", "aux0")),
                                                                   Operation(PointwiseKind.SUB, (0, "aux1"))))


def norm_match(rows: int, columns: int, kind: str, dtype: DType = DType.F16, weight: bool = True, bias: bool = False,
               residual: bool = False, weights: DType | None = None, tail: Expression | None = None) -> Match:
    operands = [operand("x", Role.INPUT, (rows, columns), dtype), operand("out", Role.OUTPUT, (rows, columns), dtype, Access.WRITE)]
    if weight:
        operands.append(operand("weight", Role.WEIGHT, (columns,), weights or dtype))
    if bias:
        operands.append(operand("bias", Role.WEIGHT, (columns,), weights or dtype))
    operands += [operand(name, Role.INPUT, (rows, columns), dtype) for name in (tail.arguments[1:] if tail else ())]
    if residual:
        operands += [operand("residual", Role.INPUT, (rows, columns), dtype),
                     operand("residual_out", Role.OUTPUT, (rows, columns), dtype, Access.WRITE)]
    return Match(kind=NORM, label=SemanticLabel.NORM, nodes=("norm",), operands=tuple(operands),
                 attributes=(("rows", rows), ("columns", columns), ("norm", kind), ("norm_eps", EPS)), epilogue=tail)


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
    if kind == "layer_one_plus":
        weight = (tensors["weight"] + 1).double()  # rounded, as the framework adds
    if kind.startswith("layer"):
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
                                             ("rms", DType.F32, False), ("rms_once", DType.F16, False), ("layer_one_plus", DType.F16, True),
                                             ("layer_one_plus", DType.BF16, True), ("layer_one_plus", DType.F32, False)], ids=str)
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


@pytest.mark.parametrize("weights", [DType.F16, DType.BF16, DType.F32], ids=lambda d: d.value)
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32], ids=lambda d: d.value)
@settings(FEW, max_examples=4)  # of each pair of types, and each is a build
@given(kind=st.sampled_from(("rms_once", "rms_one_plus", "layer", "layer_one_plus")), columns=st.sampled_from((7, 64, 520, 1000)),
       seed=st.integers(0, 99))
def test_weights_of_another_type_than_the_rows(dtype: DType, weights: DType, kind: str, columns: int, seed: int) -> None:
    match = norm_match(2, columns, kind, dtype, weights=weights, bias=kind.startswith("layer"))
    tensors = draw(match, seed, 1.0)
    kernel = emulated(match, 128, 4)
    kernel.run(tensors)
    assert budget_use(match, tensors, kernel.source.reduction_depth) <= 1.0


@pytest.mark.parametrize("tail", [ADDED, GATED], ids=["added", "gated"])
@FEW
@given(dtype=st.sampled_from((DType.F16, DType.BF16, DType.F32)), columns=st.sampled_from((1, 31, 256, 1003)),
       residual=st.booleans(), offset=st.sampled_from((0, 1)), seed=st.integers(0, 99))
def test_a_tail_is_what_the_framework_computes_of_the_rounded_norm(
    tail: Expression, dtype: DType, columns: int, residual: bool, offset: int, seed: int
) -> None:
    """Bit for bit: of the norm that the same kernel writes without it, in float32 and rounded once."""
    plain, match = (norm_match(3, columns, "rms_one_plus", dtype, residual=residual, tail=each) for each in (None, tail))
    tensors = draw(match, seed, 1.0, offset)
    emulated(plain, 64, 2).run({name: tensors[name] for name in (o.name for o in plain.operands)})
    normal = tensors["out"].float()
    if tail is GATED:
        wanted = (normal * tensors["aux0"].float() - tensors["aux1"].float()).to(tensors["out"].dtype)
    else:
        wanted = (tensors["aux0"].float() + normal).to(tensors["out"].dtype)
    emulated(match, 64, 2).run(tensors)
    assert torch.equal(tensors["out"], wanted)


@FEW
@given(dtype=st.sampled_from((DType.F16, DType.BF16, DType.F32)), rows=st.sampled_from(((1, 1), (5, 2), (1, 4))), one_warp=st.booleans(),
       columns=st.sampled_from(((128, 128), (96, 8), (31, 100), (8, 120))), weight=st.booleans(), schedule=st.sampled_from(SCHEDULES))
def test_rows_beside_others_are_those_of_a_norm_of_their_own(
    dtype: DType, rows: tuple[int, int], columns: tuple[int, int], one_warp: bool, weight: bool, schedule: object
) -> None:
    """Bit for bit, whichever of the two has more rows or longer ones; nothing is written outside of either."""
    singles = [norm_match(*each, "rms", dtype, weight=weight) for each in zip(rows, columns, strict=True)]
    drawn = [draw(match, seed, 1.0) for seed, match in enumerate(singles)]
    beside = [evolve(o, name=f"{o.name}_beside") for o in singles[1].operands]
    match = evolve(singles[0], operands=(*singles[0].operands, *beside),
                   attributes=(*singles[0].attributes, ("rows_beside", rows[1]), ("columns_beside", columns[1])))
    tensors = {**drawn[0], **{f"{name}_beside": tensor.clone() for name, tensor in drawn[1].items()}}
    tensors["out"] = tensors["out"].clone()
    kernel = emulated(match, 64, 1 if one_warp else 2)
    kernel.run(tensors, schedule)
    for single, own in zip(singles, drawn, strict=True):
        emulated(single, 64, 1 if one_warp else 2).run(own)
    assert torch.equal(tensors["out"], drawn[0]["out"]) and torch.equal(tensors["out_beside"], drawn[1]["out"])


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


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=lambda d: d.value)
def test_one_plus_weight_of_a_layer_norm_is_rounded_like_the_framework(dtype: DType) -> None:
    """Within the budget of one rounding of what the framework multiplies with; where it is not rounded, beyond it."""
    match = norm_match(5, 1000, "layer_one_plus", dtype, bias=True)
    tensors = draw(match, 9, 1.0)
    source = FAMILY.lower(match, Schedule({"threads": 64, "warps_per_row": 2}), H200)
    exact = tuple((name, text.replace("ac::round_to<Plan_" + source.digest + "::W>", "")) for name, text in source.headers)
    assert exact != source.headers
    for headers, is_within in ((source.headers, True), (exact, False)):
        Emulated(evolve(source, headers=headers), match, H200).run(tensors)
        assert (budget_use(match, tensors, source.reduction_depth) <= 1.0) is is_within


def test_one_plus_says_itself_in_the_plan_alone() -> None:
    """The text of other norms stays as it was, and so does what is stored of them."""
    layer, one_plus = (FAMILY.lower(norm_match(1, 64, kind, bias=True), Schedule({"threads": 64, "warps_per_row": 2}), H200)
                       for kind in ("layer", "layer_one_plus"))
    texts = [{name: text.replace(source.digest, "") for name, text in (("", source.code), *source.headers)} for source in (layer, one_plus)]
    assert {name for name in texts[0].keys() | texts[1].keys() if texts[0].get(name) != texts[1].get(name)} == {"plan.cuh"}
    assert "normalize_unrounded" not in texts[0]["plan.cuh"]


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
    for kind in ("rms_one_plus", "layer_one_plus"):
        assert "needs a weight" in FAMILY.accepts(norm_match(1, 64, kind, weight=False), H200).reason
    assert "unknown norm" in FAMILY.accepts(norm_match(1, 64, "batch"), H200).reason
    assert "same type" in FAMILY.accepts(norm_match(1, 64, "rms", weights=DType.F32), H200).reason
    plain = norm_match(1, 64, "rms")
    beside = evolve(plain, operands=(*plain.operands, operand("x_beside", Role.INPUT, (1, 64), DType.F16)))
    assert "beside" in FAMILY.accepts(beside, H200).reason
    long = norm_match(1, 1 << 20, "rms", weight=False)
    others = [evolve(o, name=f"{o.name}_beside") for o in long.operands]
    beside = evolve(long, operands=(*long.operands, *others), attributes=(*long.attributes, ("rows_beside", 1), ("columns_beside", 64)))
    assert "registers" in FAMILY.accepts(beside, H200).reason


@pytest.mark.compile
@pytest.mark.parametrize("name", ["a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090"])
def test_builds_without_spills(name: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    for match in (norm_match(1, 2048, "rms", residual=True), norm_match(1, 4096, "layer", DType.BF16, bias=True),
                  norm_match(1, 2304, "rms_once", DType.BF16, weights=DType.F32, tail=GATED)):
        source = FAMILY.lower(match, FAMILY.space(match, target).points[0], target)
        assert backend.build(source, target).resources.spill_bytes == 0
