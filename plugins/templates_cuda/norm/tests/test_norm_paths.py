"""The paths of the norm family beyond one row in a block, against fp64, emulated, and their spaces.

Split rows, clusters, kept weights, several rows of a warp, rows that are read again.
"""

import math
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import channel_norm_case, norm_case
from agentcompile_templates_cuda_norm import NormFamily
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import NORM, Access, DType, Expression, Match, Operation, PointwiseKind, Role, Schedule, SemanticLabel

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError
from agentcompile_validator_emulation.testing import TINY, TORCH, UNIT, Emulated, aligned, operand

H200 = preset("h200")
FAMILY = NormFamily()
FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
EPS = 1e-6
ADDED = Expression(arguments=("acc0", "aux0"), operations=(Operation(PointwiseKind.ADD, ("aux0", "acc0")),))
POINTS: dict[str, dict[str, Any]] = {
    "split": {"path": "split", "threads": 32, "splits": 3}, "cluster": {"path": "cluster", "threads": 32, "splits": 4},
    "block": {"path": "kept", "threads": 64, "lanes": 64, "batch": 1, "blocks": 1},
    "warp": {"path": "kept", "threads": 64, "lanes": 32, "batch": 2, "blocks": 1},
    "part of a warp": {"path": "kept", "threads": 64, "lanes": 8, "batch": 2, "blocks": 1},
    "rows of a warp": {"threads": 64, "warps_per_row": 1, "rows_each": 3}, "looped": {"path": "looped", "threads": 64},
}
MANY_ROWS = ("block", "warp", "part of a warp", "rows of a warp")
COLUMNS = {"rows of a warp": (3, 200, 512), "looped": (7, 601, 2048),
           "split": (65, 601, 1024), "cluster": (64, 517, 1024), "block": (8, 257, 1000),
           "warp": (3, 200, 256), "part of a warp": (8, 61, 128)}
SMALL = evolve(H200, sm_count=2)  # a grid that walks over rows soon has several for each team


def norm_match(rows: int, columns: int, kind: str, dtype: DType, *, bias: bool = False, residual: bool = False,
               weights: DType | None = None, tail: Expression | None = None) -> Match:
    shape, written = (rows, columns), Access.WRITE
    operands = [operand("x", Role.INPUT, shape, dtype), operand("out", Role.OUTPUT, shape, dtype, written),
                operand("weight", Role.WEIGHT, (columns,), weights or dtype)]
    operands += [operand("bias", Role.WEIGHT, (columns,), weights or dtype)] * bias
    operands += [operand("residual", Role.INPUT, shape, dtype), operand("residual_out", Role.OUTPUT, shape, dtype, written)] * residual
    operands += [operand("aux0", Role.INPUT, shape, dtype)] * (tail is not None)
    return Match(kind=NORM, label=SemanticLabel.NORM, nodes=("norm",), operands=tuple(operands), epilogue=tail,
                 attributes=(("rows", rows), ("columns", columns), ("norm", kind), ("norm_eps", EPS)))


def draw(match: Match, seed: int, scale: float = 1.0, mean: float = 0.0, offset: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for item in match.operands:
        values = torch.randn(item.spec.shape, generator=generator, dtype=torch.float64)
        values = torch.full_like(values, math.nan) if item.role is Role.OUTPUT else values * scale + mean if item.name == "x" else values
        tensors[item.name] = aligned(values, TORCH[item.spec.dtype], offset)
    return tensors


def kernel_of(match: Match, path: str) -> Emulated:
    assert FAMILY.accepts(match, SMALL) is True
    return Emulated(FAMILY.lower(match, Schedule(POINTS[path]), SMALL), match, SMALL)


def budget_use(match: Match, tensors: dict[str, torch.Tensor], depth: int) -> float:
    """Largest error over what its roundings, its sums in float32 and, of layer norms, the mean in float32 may cost."""
    dtype, kind = tensors["x"].dtype, match.text("norm")
    x = tensors["residual_out"].double() if "residual" in tensors else tensors["x"].double()
    weight = (tensors["weight"] + 1 if kind == "layer_one_plus" else tensors["weight"]).double()  # rounded, as the framework adds
    bias = tensors["bias"].double() if "bias" in tensors else 0.0
    mean = x.mean(-1, keepdim=True) if kind.startswith("layer") else torch.zeros_like(x[..., :1])
    inverse = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + EPS)
    scaled = (x - mean) * inverse * (1 + weight if kind == "rms_one_plus" else weight)
    statistics = 2 * math.sqrt(depth) * 2.0**-24 + 2.0**-21
    extra = statistics * (scaled.abs() + abs(bias) + mean.abs() * inverse * weight.abs())
    extra += TINY[dtype] * weight.abs() if kind == "rms" else 0.0
    expected = scaled + bias
    budget = (2.01 if kind == "rms" else 1.001) * UNIT[dtype] * expected.abs() + TINY[dtype] + extra
    return float(((tensors["out"].double() - expected).abs() / budget).max())


@pytest.mark.parametrize("path", POINTS)
@FEW
@given(data=st.data())
def test_within_budget(path: str, data: st.DataObject) -> None:
    kind, dtype, weights = data.draw(st.sampled_from((
        ("layer", DType.F16, DType.F16), ("layer", DType.F32, DType.F32), ("rms", DType.BF16, DType.BF16),
        ("rms_once", DType.F32, DType.F16), ("rms_one_plus", DType.BF16, DType.F32),
        ("layer_one_plus", DType.BF16, DType.BF16), ("layer_one_plus", DType.F32, DType.F16))))
    rows = data.draw(st.sampled_from((1, 3, 9, 70) if path in MANY_ROWS else (1, 3)))
    columns, residual = data.draw(st.sampled_from(COLUMNS[path])), path != "looped" and data.draw(st.booleans())
    match = norm_match(rows, columns, kind, dtype, bias=kind.startswith("layer"), weights=weights, residual=residual)
    mean = data.draw(st.sampled_from((0.0, 300.0))) if kind.startswith("layer") else 0.0
    scale, offset = data.draw(st.sampled_from((1e-2, 1.0, 50.0))), data.draw(st.sampled_from((0, 1)))
    tensors = draw(match, data.draw(st.integers(0, 99)), scale, mean, offset)
    kernel = kernel_of(match, path)
    kernel.run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    assert not residual or torch.equal(tensors["residual_out"], tensors["x"] + tensors["residual"])
    assert budget_use(match, tensors, kernel.source.reduction_depth) <= 1.0


@pytest.mark.parametrize("path", ["split", "cluster", "rows of a warp"])
@FEW
@given(dtype=st.sampled_from((DType.F16, DType.F32)), columns=st.sampled_from((201, 512)), seed=st.integers(0, 99))
def test_a_tail_is_what_the_framework_computes_of_the_rounded_norm(path: str, dtype: DType, columns: int, seed: int) -> None:
    plain, match = (norm_match(2, columns, "rms_once", dtype, tail=tail) for tail in (None, ADDED))
    tensors = draw(match, seed)
    kernel_of(plain, path).run({o.name: tensors[o.name] for o in plain.operands})
    wanted = (tensors["aux0"].float() + tensors["out"].float()).to(tensors["out"].dtype)
    kernel_of(match, path).run(tensors)
    assert torch.equal(tensors["out"], wanted)


@pytest.mark.parametrize("path", ["split", "cluster"])
def test_the_mean_of_a_row_may_be_large_and_one_element_huge(path: str) -> None:
    """Parts of a row have means of their own: what lies between those belongs to the squares, and nothing cancels."""
    match = norm_match(3, 1000, "layer", DType.F32, bias=True)
    tensors = draw(match, 4)
    tensors["x"][0] += 4096.0
    tensors["x"][1, 700] = 1e6
    tensors["x"][2] += torch.arange(1000) * 8.0
    kernel = kernel_of(match, path)
    kernel.run(tensors)
    assert budget_use(match, tensors, kernel.source.reduction_depth) <= 1.0


@pytest.mark.parametrize("splits,threads", [(300, 32), (70, 64)])
def test_parts_that_more_than_a_warp_adds_up(splits: int, threads: int) -> None:
    match = norm_match(2, splits * 4 - 1, "layer", DType.F32, bias=True)
    tensors = draw(match, 6, mean=9.0)
    source = FAMILY.lower(match, Schedule({"path": "split", "threads": threads, "splits": splits}), H200)
    Emulated(source, match, H200).run(tensors)
    assert budget_use(match, tensors, source.reduction_depth) <= 1.0


@pytest.mark.parametrize("path", ["split", "cluster"])
def test_channels(path: str) -> None:
    match = channel_norm_case(shape=(2, 6, 9, 11), groups=3, dtype=DType.F32)[0]
    tensors = draw(match, 3)
    kernel_of(match, path).run(tensors)
    expected = torch.group_norm(tensors["x"].double(), 3, tensors["weight"].double(), tensors["bias"].double(), EPS)
    assert ((tensors["out"].double() - expected).abs() <= 2.0**-21 * expected.abs() + 2.0**-17).all()


@pytest.mark.parametrize("path", POINTS)
def test_a_nan_stays_in_its_row(path: str) -> None:
    match = norm_match(9, 64, "rms", DType.F16)
    tensors = draw(match, 8)
    tensors["x"][4, 17] = math.nan
    kernel_of(match, path).run(tensors)
    assert tensors["out"].isnan().all(-1).tolist() == [row == 4 for row in range(9)] and int(tensors["out"].isnan().sum()) == 64


WRONG = {  # what is wrong: text, with what it is replaced, path
    "parts have one mean": ("norm_part.cuh", "(part.mean - mean) * (part.mean - mean) * count", "0.0f", "split"),
    "parts overlap": ("norm_part.cuh", "min((part + 1)", "max((part + 1)", "split"),
    "blocks do not wait for each other": ("norm_cluster.cu", "  ac::cluster_arrive_release();\n  ac::cluster_wait();\n", "", "cluster"),
    "a row of a warp is another": ("norm.cu", "return first_row + j * rows_at_once", "return first_row + j", "rows of a warp"),
    "the second pass reads its neighbour": ("norm_looped.cu", "again = Held<T>::load(own, first", "again = Held<T>::load(own, first + step",
                                            "looped"),
    "the next rows are the same": ("norm_kept.cu", "residual, first + stride + team", "residual, first + team", "warp"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    file, text, wrong, path = WRONG[what]
    many = path in MANY_ROWS
    match = norm_match(70 if many else 2, 256 if many else 601, "layer", DType.F32, bias=True)
    source = FAMILY.lower(match, Schedule(POINTS[path]), SMALL)
    headers = tuple((name, part.replace(text, wrong) if name == file else part) for name, part in source.headers)
    changed = evolve(source, headers=headers, code=source.code.replace(text, wrong) if file not in dict(headers) else source.code)
    assert changed != source
    tensors = draw(match, 5)
    tensors["x"] += torch.arange(tensors["x"].shape[-1]) * 0.01
    try:
        Emulated(changed, match, SMALL).run(tensors)
    except EmulationError:
        return
    assert not budget_use(match, tensors, source.reduction_depth) <= 1.0


def test_spaces_fit_their_rows() -> None:
    expected = (((65536, 256), None), ((8192, 8192), None), ((4096, 4096), None), ((128, 2048), None), ((1, 2048), None),
                ((16, 131072), "cluster"), ((1, 151936), "split"), ((400, 131072), "cluster"))
    for dtype in (DType.F16, DType.F32):
        for (rows, columns), first in expected:
            for target in (H200, preset("a100")):
                points = FAMILY.space(norm_case(rows=rows, columns=columns, norm="layer", dtype=dtype)[0], target).points
                paths = [dict(point.items).get("path") for point in points]
                assert paths[0] == ("split" if first == "cluster" and target != H200 else first), (rows, columns, target.name)
                assert 0 < len(points) == len(set(points)) <= 24
                assert ("kept" in paths[:3]) == (rows >= 4096), (rows, columns, target.name)
                fills = columns in (4096, 8192) and columns * dtype.bytes >= 16384
                assert ("looped" in paths[:5] and "split" not in paths) == fills, (rows, columns, target.name)
                assert ("rows_each" in {name for point in points for name, _ in point.items}) == (rows == 65536)


def test_clusters_are_for_targets_that_have_them_and_kept_weights_for_rows_alone() -> None:
    long = norm_match(16, 131072, "layer", DType.F16, bias=True)
    assert "cluster" not in {dict(p.items).get("path") for p in FAMILY.space(long, preset("a100")).points}
    tail = norm_match(4096, 4096, "rms", DType.F16, tail=ADDED)
    assert "kept" not in {dict(p.items).get("path") for p in FAMILY.space(tail, H200).points}


@pytest.mark.compile
@pytest.mark.parametrize(("place", "name"), enumerate(["a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090"]))
def test_builds_without_spills(place: int, name: str) -> None:
    """Of each operand's paths every target builds its share: between them they build all."""
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    for match in (norm_match(65536, 256, "layer", DType.F16, bias=True), norm_match(16384, 8192, "layer", DType.F16, bias=True),
                  norm_match(16384, 8192, "rms", DType.F32, residual=True), norm_match(16, 131072, "layer", DType.F32, bias=True),
                  norm_match(65536, 256, "layer", DType.F32, bias=True), norm_match(1, 151936, "layer", DType.F16, bias=True, tail=ADDED)):
        points = [p for p in FAMILY.space(match, target).points if {"path", "rows_each"} & set(dict(p.items))]
        for point in points[place % 3::3]:
            assert backend.build(FAMILY.lower(match, point, target), target).resources.spill_bytes == 0, (match, point)
