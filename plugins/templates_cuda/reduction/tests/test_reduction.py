"""The reduction family against fp64 on the CPU: operations, axes, parts, tails, alignment, ties, NaN; and wrong kernels."""

import math

import pytest
import torch
from agentcompile_cuda_kit import pointwise_inputs
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import reduction_case
from agentcompile_templates_cuda_reduction import ReductionFamily, reduction
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Graph, Match, Schedule, oracle

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError
from agentcompile_validator_emulation.testing import TINY, TORCH, UNIT, Emulated, aligned

H200 = preset("h200")
FAMILY = ReductionFamily()
FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
DIM = {"sum": "aten.sum.dim_IntList", "mean": "aten.mean.dim", "amax": "aten.amax.default", "prod": "aten.prod.dim_int",
       "l2": "aten.linalg_vector_norm.default", "std": "aten.std.dim", "max": "aten.max.dim", "min": "aten.min.dim",
       "argmin": "aten.argmin.default", "logsumexp": "aten.logsumexp.default"}
TRUE = {"sum": lambda x, d: x.sum(d), "mean": lambda x, d: x.mean(d), "amax": lambda x, d: x.amax(d), "prod": lambda x, d: x.prod(d),
        "l2": lambda x, d: x.square().sum(d).sqrt(), "std": lambda x, d: x.std(d),
        "logsumexp": lambda x, d: x.logsumexp(d)}
LANES = {"path": "rows", "threads": 64, "warps_per_row": 1, "lanes": 8, "splits": 1}
WARP = {"path": "rows", "threads": 64, "warps_per_row": 1, "lanes": 32, "splits": 1}
PARTS = {"path": "rows", "threads": 96, "warps_per_row": 3, "lanes": 32, "splits": 3}
COLUMN = {"path": "strided", "warps": 3, "step": 4, "splits": 1}
COLUMN_PARTS = {"path": "strided", "warps": 2, "step": 8, "splits": 4}


def reduced(op: str, columns: int, inner: int, dtype: DType, before: tuple[str, ...] = ()) -> tuple[Match, Graph]:
    shape = (2, columns, inner) if inner > 1 else (1, 3, columns)
    return reduction_case(shape=shape, op=DIM[op], dim=1 if inner > 1 else -1, dtype=dtype, before=before)


def tensors_of(match: Match, x: torch.Tensor, offset: int = 0) -> dict[str, torch.Tensor]:
    found = {}
    for operand in match.operands:
        kind = TORCH[operand.spec.dtype]
        poison = torch.full(operand.spec.shape, -7 if kind is torch.int64 else math.nan)
        found[operand.name] = aligned(x.reshape(operand.spec.shape) if operand.name == "in0" else poison, kind, offset)
    return found


def run(match: Match, point: dict[str, int | str], tensors: dict[str, torch.Tensor], options: object = None) -> None:
    assert FAMILY.accepts(match, H200) is True
    Emulated(FAMILY.lower(match, Schedule(point), H200), match, H200).run(tensors, options)


@pytest.mark.parametrize("op,point,inner,dtype", [
    ("sum", WARP, 1, DType.F16), ("sum", LANES, 1, DType.F16), ("std", LANES, 1, DType.F32),
    ("mean", PARTS, 1, DType.BF16), ("std", COLUMN, 37, DType.F32), ("l2", COLUMN_PARTS, 40, DType.F16),
    ("logsumexp", PARTS, 1, DType.F32)])
@FEW
@given(data=st.data())
def test_within_budget(op: str, point: dict[str, int | str], inner: int, dtype: DType, data: st.DataObject) -> None:
    columns = data.draw(st.sampled_from((2, 7, 64, 255, 520)))
    match, _ = reduced(op, columns, inner, dtype)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(match.need("in0").spec.shape, generator=generator) + data.draw(st.sampled_from((0.0, 100.0)))
    tensors = tensors_of(match, x, data.draw(st.sampled_from((0, 1))))
    run(match, point, tensors, data.draw(st.sampled_from(SCHEDULES)))
    given_x, axis = tensors["in0"].double(), 1 if inner > 1 else -1
    expected = TRUE[op](given_x, axis)
    unit, tiny = UNIT[TORCH[dtype]], TINY[TORCH[dtype]]
    size = given_x.abs().sum(axis) / (columns if op == "mean" else 1) if op in ("sum", "mean") else expected.abs()
    if op == "std":  # the distances of elements from a mean of their own size
        size = expected + given_x.abs().amax(axis)
    if op == "logsumexp":  # a relative error of the sum is an absolute one of its logarithm
        size = expected.abs() + 1.0
    budget = 1.001 * unit * expected.abs() + tiny + (math.sqrt(columns) + 6) * 2.0**-24 * size
    assert bool(((tensors["out"].double().reshape(expected.shape) - expected).abs() <= budget).all())


@pytest.mark.parametrize("op,point,inner,dtype", [
    ("max", PARTS, 1, DType.F16), ("max", LANES, 1, DType.BF16), ("argmin", COLUMN, 37, DType.F32)])
@FEW
@given(data=st.data())
def test_places_are_the_first_ones(op: str, point: dict[str, int | str], inner: int, dtype: DType, data: st.DataObject) -> None:
    """Few distinct values, so that ties are everywhere; NaN and infinities among them."""
    columns = data.draw(st.sampled_from((2, 7, 64, 255)))
    match, _ = reduced(op, columns, inner, dtype)
    drawn = st.sampled_from((-math.inf, -2.0, 0.0, 1.0, 3.0, math.inf, math.nan))
    values = torch.tensor(data.draw(st.lists(drawn, min_size=1, max_size=4)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = values[torch.randint(0, len(values), match.need("in0").spec.shape, generator=generator)]
    tensors = tensors_of(match, x, data.draw(st.sampled_from((0, 1))))
    run(match, point, tensors, data.draw(st.sampled_from(SCHEDULES)))
    axis = 1 if inner > 1 else -1
    best = x.amax(axis, keepdim=True) if op == "max" else x.amin(axis, keepdim=True)
    first = ((x == best) | (x.isnan() & best.isnan())).to(torch.uint8).argmax(axis)
    assert torch.equal(tensors["indices"].reshape(first.shape), first)
    if op == "max":
        assert torch.equal(tensors["out"].float().reshape(first.shape).nan_to_num(nan=9.0), best.squeeze(axis).nan_to_num(nan=9.0))


@pytest.mark.parametrize("op", ["amax", "prod", "logsumexp"])
def test_a_nan_stays_in_its_row_and_extremes_are_torchs(op: str) -> None:
    match, _ = reduced(op, 40, 1, DType.F32)
    for put in (math.nan, math.inf, -math.inf, 0.0):
        x = torch.full((1, 3, 40), -1.0)
        x[0, 1, 17] = put
        x[0, 2] = put
        tensors = tensors_of(match, x)
        run(match, WARP, tensors)
        torch.testing.assert_close(tensors["out"], TRUE[op](x, -1), rtol=1e-6 if op == "logsumexp" else 0.0, atol=0.0, equal_nan=True)


def test_what_is_before_a_sum_is_taken_in() -> None:
    match, graph = reduced("sum", 200, 1, DType.F16, before=("mul", "neg"))
    assert len(match.nodes) == 3 and [o.name for o in match.operands] == ["in0", "in1", "out"]
    x, y = torch.randn(1, 3, 200), torch.randn(1, 3, 200)
    tensors = {**tensors_of(match, x), "in1": aligned(y, torch.float16)}
    run(match, WARP, tensors)
    expected = oracle(graph, {"x": tensors["in0"], "other0": tensors["in1"]})[graph.outputs[0]]
    assert bool(((tensors["out"].double() - expected.value).abs() <= expected.error).all())


def results(match: Match, point: dict[str, int | str], x: torch.Tensor) -> list[torch.Tensor]:
    """Of aligned and of unaligned elements, none of which is written to."""
    found = []
    for offset in (0, 1):
        tensors = tensors_of(match, x, offset)
        run(match, point, tensors)
        assert torch.equal(tensors["in0"].view(torch.uint8), aligned(x.reshape(tensors["in0"].shape), x.dtype, offset).view(torch.uint8))
        found += [tensors[name] for name in ("out", "indices") if name in tensors]
    return found


@pytest.mark.parametrize("op,point,columns", [
    ("sum", WARP, 512),  # one pass
    ("std", WARP, 2304),  # two turns of four steps and a ninth
    ("max", LANES, 320),  # of a turn and half of it, the last thread has nothing
    ("sum", PARTS, 960),  # threads of a part that have no step; rows in parts of one length
    ("logsumexp", PARTS, 2048)])  # the last part is shorter than the others
def test_a_length_known_to_the_kernel_changes_no_bit(
    op: str, point: dict[str, int | str], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    match, _ = reduced(op, columns, 1, DType.F16)
    x = torch.randn(match.need("in0").spec.shape, generator=torch.Generator().manual_seed(columns)).half()
    known, constant = results(match, point, x), FAMILY.lower(match, Schedule(point), H200)
    monkeypatch.setattr(reduction, "known_length", lambda columns: 0)
    told = FAMILY.lower(match, Schedule(point), H200)
    assert constant.digest != told.digest and constant.launches[0].arguments == told.launches[0].arguments
    assert all(torch.equal(a, b) for a, b in zip(known, results(match, point, x), strict=True))


def test_lengths_that_are_told_share_a_kernel() -> None:
    """Ragged and tiny rows are of one kernel each schedule, whatever their length."""
    digests = {FAMILY.lower(reduced("sum", columns, 1, DType.F16)[0], Schedule(WARP), H200).digest for columns in (2, 7, 64, 127, 250)}
    assert len(digests) == 1


def test_many_bytes_are_loaded_through_l1(monkeypatch: pytest.MonkeyPatch) -> None:
    match, _ = reduced("sum", 512, 1, DType.F16)
    x = torch.randn(match.need("in0").spec.shape, generator=torch.Generator().manual_seed(1)).half()
    few, digest = results(match, WARP, x), FAMILY.lower(match, Schedule(WARP), H200).digest
    monkeypatch.setattr(pointwise_inputs, "FEW_BYTES", 0)
    assert FAMILY.lower(match, Schedule(WARP), H200).digest != digest
    assert all(torch.equal(a, b) for a, b in zip(few, results(match, WARP, x), strict=True))


WRONG = {  # what is wrong: file, text, with what it is replaced, operation, point
    "the tail of a row counts": ("reduction.cu", "(end - first + threads_per_row - 1) / threads_per_row", "step", "std", WARP),
    "the last of equals": ("states.cuh", "index + e * apart}", "-index - e}", "argmin", COLUMN),
    "elements of a thread are taken for neighbours": ("reduction.cu", "threads_per_row, threads_per_row)", "threads_per_row, 1)", "argmin",
                                                      WARP),
    "lanes mix their rows": ("reduction.cu", "merge_warp<lanes>", "merge_warp<32>", "sum", LANES),
    "parts are added twice": ("finish.cuh", "split += ac::warp_size", "split += 1", "sum", PARTS),
    "the largest moves and its sum does not": ("states.cuh", "sum *= share(largest, above);", "", "logsumexp", WARP),
    "means of groups do not count": ("states.cuh", "fmaf(distance * distance, count", "fmaf(0.0f, count", "std", COLUMN),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    file, text, wrong, op, point = WRONG[what]
    match, _ = reduced(op, 255, 37 if point is COLUMN else 1, DType.F32)
    source = FAMILY.lower(match, Schedule(point), H200)
    headers = tuple((name, part.replace(text, wrong) if name == file else part) for name, part in source.headers)
    changed = evolve(source, headers=headers, code=source.code.replace(text, wrong) if file == "reduction.cu" else source.code)
    assert changed != source
    x = torch.randint(0, 9, match.need("in0").spec.shape, generator=torch.Generator().manual_seed(3)).float()
    tensors = tensors_of(match, x)
    try:
        Emulated(changed, match, H200).run(tensors)
    except EmulationError:
        return
    axis = 1 if point is COLUMN else -1
    found, expected = (tensors["indices"], x.argmin(axis)) if op == "argmin" else (tensors["out"], TRUE[op](x, axis))
    assert not torch.allclose(found.double(), expected.double(), rtol=1e-3)


def test_spaces_fit_their_shapes_and_rejects_explain() -> None:
    expected = (((1, 2048), -1, 2), ((1, 151936), -1, 149), ((65536, 256), -1, 1), ((8192, 8192), -1, 1))
    for shape, dim, splits in expected:
        points = FAMILY.space(reduction_case(shape=shape, dim=dim)[0], H200).points
        assert 0 < len(points) == len(set(points)) <= 24 and points[0]["splits"] <= splits, shape
    assert FAMILY.space(reduction_case(shape=(65536, 256))[0], H200).points[0]["warps_per_row"] == 1
    columns = FAMILY.space(reduction_case(shape=(65536, 256), dim=0)[0], H200).points
    assert {point["path"] for point in columns} == {"strided"} and columns[0]["splits"] > 100
    match = reduction_case(shape=(4, 64))[0]
    changed = evolve(match, attributes=tuple((k, "median" if k == "op" else v) for k, v in match.attributes))
    assert "median" in FAMILY.accepts(changed, H200).reason
    assert "indices" in FAMILY.accepts(evolve(match, operands=match.operands[:1]), H200).reason


@pytest.mark.compile
@pytest.mark.parametrize("name,rows", [("a100", False), ("rtx3090", True), ("rtx4090", False), ("h200", False), ("b200", True),
                                       ("rtx5090", False)])
def test_builds_without_spills(name: str, rows: bool) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    match = reduction_case(shape=(4096, 512), op="aten.max.dim" if rows else "aten.std.dim", dim=int(rows))[0]
    source = FAMILY.lower(match, FAMILY.space(match, target).points[0], target)
    assert backend.build(source, target).resources.spill_bytes == 0
