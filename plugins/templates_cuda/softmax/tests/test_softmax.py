"""The softmax family against fp64 on the CPU: every path, tails, alignment, masks, rows without a finite score; and wrong kernels."""

import math

import pytest
import torch
from agentcompile_cuda_kit import pointwise_inputs
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import softmax_case
from agentcompile_templates_cuda_softmax import SoftmaxFamily, softmax
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Match, Schedule, StepSource

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError
from agentcompile_validator_emulation.testing import TINY, TORCH, UNIT, Emulated, aligned

H200 = preset("h200")
FAMILY = SoftmaxFamily()
FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
SCALE = 0.25
POINTS = {
    "lanes": {"path": "held", "threads": 64, "warps_per_row": 1, "lanes": 8},
    "warp": {"path": "held", "threads": 64, "warps_per_row": 1, "lanes": 32},
    "block": {"path": "held", "threads": 64, "warps_per_row": 2, "lanes": 32},
    "looped": {"path": "looped", "threads": 64}, "split": {"path": "split", "threads": 32, "splits": 3},
    "strided": {"path": "strided", "warps": 3},
}
COLUMNS = {"lanes": (1, 30, 64, 72, 256), "warp": (1, 31, 200, 256),
           "block": (8, 257, 512), "looped": (7, 600, 1100), "split": (64, 601, 1024), "strided": (1, 5, 40)}


def softmax_match(path: str, columns: int, dtype: DType, log: bool, masked: bool) -> Match:
    shape, axis = ((2, columns, 37), 1) if path == "strided" else ((1, 3, columns), -1)
    mask = (columns, 37) if path == "strided" else (columns,)
    return softmax_case(shape=shape, axis=axis, log=log, scale=1 / SCALE if masked else 1.0, mask=mask if masked else (), dtype=dtype)[0]


def draw(match: Match, seed: int, offset: int, holes: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for operand in match.operands:
        values = torch.randn(operand.spec.shape, generator=generator) * 4.0
        if operand.name == "in0":
            values[torch.rand(operand.spec.shape, generator=generator) < holes] = -math.inf
        values = torch.full_like(values, math.nan) if operand.name == "out" else values
        tensors[operand.name] = aligned(values, TORCH[operand.spec.dtype], offset)
    return tensors


def budget_use(match: Match, tensors: dict[str, torch.Tensor]) -> float:
    """Largest error over what rounding the scores, the exponentials, the sum and the result once may cost; NaN where torch has one."""
    dtype, axis = tensors["out"].dtype, 1 if match.integer("inner") > 1 else -1
    scores = tensors["in0"].double() * (SCALE if "in1" in tensors else 1.0) + (tensors["in1"].double() if "in1" in tensors else 0.0)
    expected = scores.log_softmax(axis) if match.flag("log") else scores.softmax(axis)
    below = (scores.amax(axis, keepdim=True) - scores).nan_to_num(posinf=0.0)
    terms = scores.abs().nan_to_num(posinf=0.0).amax(axis, keepdim=True) + below
    relative = (2 * math.sqrt(match.integer("columns")) + 8 + 3 * terms) * 2.0**-24
    budget = 1.001 * UNIT[dtype] * expected.abs() + TINY[dtype] + relative * (1.0 if match.flag("log") else expected.abs()) + 2.0**-126
    out = tensors["out"].double()
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())
    return float(torch.where(expected.isfinite(), (out - expected).abs() / budget, 0.0).nan_to_num().max())


def lowered(match: Match, path: str) -> StepSource:
    assert FAMILY.accepts(match, H200) is True
    return FAMILY.lower(match, Schedule(POINTS[path]), H200)


@pytest.mark.parametrize("path,dtype,log,masked", [
    ("lanes", DType.F16, False, False), ("lanes", DType.F32, True, True), ("warp", DType.BF16, False, False),
    ("block", DType.F32, True, False), ("looped", DType.BF16, False, False),
    ("split", DType.F16, False, True), ("strided", DType.F32, True, True)], ids=str)
@FEW
@given(data=st.data())
def test_within_budget(path: str, dtype: DType, log: bool, masked: bool, data: st.DataObject) -> None:
    match = softmax_match(path, data.draw(st.sampled_from(COLUMNS[path])), dtype, log, masked)
    holes = data.draw(st.sampled_from((0.0, 0.5, 1.0)))
    tensors = draw(match, data.draw(st.integers(0, 99)), data.draw(st.sampled_from((0, 1))), holes)
    Emulated(lowered(match, path), match, H200).run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    assert budget_use(match, tensors) <= 1.0


def test_rows_keep_to_themselves_and_extremes_are_torchs() -> None:
    match = softmax_match("warp", 31, DType.F32, False, False)
    largest = torch.finfo(torch.float32).max
    for put in (math.nan, math.inf, -math.inf, largest, -largest):
        tensors = draw(match, 3, 0, 0.0)
        tensors["in0"][0, 1, 17] = put
        tensors["in0"][0, 2] = put
        Emulated(lowered(match, "warp"), match, H200).run(tensors)
        assert torch.allclose(tensors["out"], tensors["in0"].softmax(-1), rtol=1e-5, atol=0.0, equal_nan=True), put


@pytest.mark.parametrize("change", ["a length told at launch", "loads through L1"])
@pytest.mark.parametrize("path,columns", [("lanes", 192), ("block", 512)])
def test_neither_a_known_length_nor_loads_past_l1_change_a_bit(
    path: str, columns: int, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    match = softmax_match(path, columns, DType.F16, False, False)
    found, digests = [], set()
    for changed in (False, True):
        if changed and change == "loads through L1":
            monkeypatch.setattr(pointwise_inputs, "FEW_BYTES", 0)
        elif changed:
            monkeypatch.setattr(softmax, "known_length", lambda columns: 0)
        for offset in (0, 1):
            tensors = draw(match, 7, offset, 0.1)
            Emulated(lowered(match, path), match, H200).run(tensors)
            found.append(tensors["out"])
        digests.add(lowered(match, path).digest)
    assert len(digests) == 2 and torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert not bool(found[0].isnan().any())


WRONG = {  # what is wrong: text, with what it is replaced, path
    "the tail of a row counts": ("softmax.cu", "(row + place) : minus_infinity()", "(row + place) : 0.0f", "block"),
    "lanes without a step count": ("softmax.cu", "values[i][e] : minus_infinity()", "values[i][e] : 0.0f", "lanes"),
    "lanes mix their rows": ("softmax.cu", "whole.merge_warp<threads_per_row>()", "whole.merge_warp<32>()", "lanes"),
    "an old sum is not scaled": ("softmax.cuh", "sum *= expf(maximum - larger);", "", "looped"),
    "a barrier is missing": ("softmax.cuh", "__syncthreads();", "", "block"),
    "parts are left out": ("softmax_split.cu", "split += ac::warp_size", "split += gridDim.x", "split"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    file, text, wrong, path = WRONG[what]
    match = softmax_match(path, {"warp": 31, "lanes": 72, "split": 1024, "looped": 1100}.get(path, 257), DType.F32, False, False)
    source = lowered(match, path)
    if path == "split":  # one part per element of a step, so that a warp has more than it can read in one turn
        source = FAMILY.lower(match, Schedule({"path": "split", "threads": 32, "splits": 64}), H200)
    headers = tuple((name, part.replace(text, wrong) if name == file else part) for name, part in source.headers)
    changed = evolve(source, headers=headers, code=source.code.replace(text, wrong) if file not in dict(headers) else source.code)
    assert changed != source
    tensors = draw(match, 5, 0, 0.0)
    try:
        Emulated(changed, match, H200).run(tensors)
    except EmulationError:
        return
    assert not torch.allclose(tensors["out"], tensors["in0"].softmax(-1), rtol=1e-5, atol=1e-9)


def test_spaces_fit_their_rows() -> None:
    expected = (((65536, 256), "held"), ((1, 151936), "split"), ((4096, 4096), "held"), ((400, 131072), "looped"), ((16, 131072), "split"))
    for shape, first in expected:
        match = softmax_case(shape=shape)[0]
        points = FAMILY.space(match, H200).points
        assert points[0]["path"] == first and 0 < len(points) == len(set(points)) <= 20, shape
    assert {point["path"] for point in FAMILY.space(softmax_case(shape=(8, 64, 100), axis=1)[0], H200).points} == {"strided"}
    many = softmax_case(shape=(65536, 256))[0]
    assert FAMILY.space(many, H200).points[0]["warps_per_row"] == 1
    assert "int64" in FAMILY.accepts(evolve(many, operands=(evolve(many.operands[0], spec=evolve(many.operands[0].spec, dtype=DType.I64)),
                                                           many.operands[1])), H200).reason


@pytest.mark.compile
@pytest.mark.parametrize("name,path", [("a100", "split"), ("rtx3090", "held"), ("rtx4090", "looped"), ("h200", "held"), ("b200", "split"),
                                       ("rtx5090", "held")])
def test_builds_without_spills(name: str, path: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    match = softmax_case(shape=(2, 8192), scale=8.0, mask=(8192,), wide=True)[0]
    point = next(p for p in FAMILY.space(match, target).points if p["path"] == path)
    assert backend.build(FAMILY.lower(match, point, target), target).resources.spill_bytes == 0
