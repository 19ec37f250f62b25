"""Pools of the family against the reference: windows that reach outside, lie apart or overlap, of one to three axes; wrong kernels."""

import math

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import pool_case
from agentcompile_templates_cuda_reduction import ReductionFamily
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import Comparison, DType, Graph, Match, Schedule, StepSource, compare, oracle

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError
from agentcompile_validator_emulation.testing import TORCH, Emulated, aligned

H200 = preset("h200")
FAMILY = ReductionFamily()
FEW = settings(max_examples=5, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
POINT = {"path": "pool", "threads": 64, "items": 2}
LARGEST = {"shape": (2, 3, 9, 11), "windows": ((3, 2, 1, 2), (4, 1, 2)), "op": "largest"}
FORMS = {
    "largest": LARGEST, "mean inside": {"shape": (3, 9, 11), "windows": ((3, 3, 1), (2, 2, 1)), "op": "inside", "before": ("abs",)},
    "signal": {"shape": (2, 3, 40), "windows": ((4, 3, 2),), "dtype": DType.F32},
}


def run(pair: tuple[Match, Graph], x: torch.Tensor, options: object = None, source: StepSource | None = None) -> Comparison:
    match, graph = pair
    assert FAMILY.accepts(match, H200) is True
    out = match.need("out").spec
    tensors = {"in0": aligned(x, TORCH[match.need("in0").spec.dtype], 1),
               "out": aligned(torch.full(out.shape, math.nan), TORCH[out.dtype], 1)}
    Emulated(source or FAMILY.lower(match, Schedule(POINT), H200), match, H200).run(tensors, options)
    return compare(tensors["out"], oracle(graph, {match.need("in0").values[0]: tensors["in0"]})[graph.outputs[0]])


@pytest.mark.parametrize("name", FORMS)
@FEW
@given(data=st.data())
def test_within_budget(name: str, data: st.DataObject) -> None:
    """NaN and infinities show in the windows that hold them and nowhere else."""
    form = FORMS[name]
    x = torch.randn(form["shape"], generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) - 2.0
    for _ in range(3):
        x.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = data.draw(st.sampled_from((0.0, math.inf, -math.inf, math.nan)))
    done = run(pool_case(**form), x, data.draw(st.sampled_from(SCHEDULES)))
    assert done.ok, done


WRONG = {
    "what is outside counts as zero": ("0xff800000u", "0u"),
    "windows lie side by side": ("::step2", "::window2"),
    "their elements too": ("::apart1", "::pad1"),
    "a NaN is passed over": ("ac::is_nan(own) || own > other", "own > other || ac::is_nan(other)"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    match, graph = pool_case(**LARGEST)
    source = FAMILY.lower(match, Schedule(POINT), H200)
    changed = evolve(source, code=source.code.replace(*WRONG[what]))
    assert changed != source
    x = torch.randn(LARGEST["shape"], generator=torch.Generator().manual_seed(3)) - 3.0
    x[0, 1, 5, 5] = math.nan
    try:
        assert not run((match, graph), x, source=changed).ok
    except EmulationError:
        return


def test_spaces_fill_the_device_and_rejects_explain() -> None:
    points = FAMILY.space(pool_case(shape=(64, 64, 112, 112), windows=((2,), (2,)))[0], H200).points
    assert len(points) == len(set(points)) == 9 and points[0]["items"] == 2
    assert {p["items"] for p in FAMILY.space(pool_case(shape=(2, 8, 8), windows=((2,), (2,)))[0], H200).points} == {1}
    match = pool_case(shape=(2, 8, 8), windows=((2,), (2,)))[0]
    changed = evolve(match, attributes=tuple((k, "median" if k == "op" else v) for k, v in match.attributes))
    assert "median" in FAMILY.accepts(changed, H200).reason


@pytest.mark.compile
@pytest.mark.parametrize("name", ["a100", "b200"])
def test_builds_without_spills(name: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    match = pool_case(shape=(64, 64, 112, 112), windows=((3, 2, 1), (3, 2, 1)), op="largest")[0]
    source = FAMILY.lower(match, FAMILY.space(match, target).points[0], target)
    assert backend.build(source, target).resources.spill_bytes == 0
