"""Steps of short convolutions against the reference: widths, types, channels that fill no vector; wrong kernels; builds."""

import sys
from pathlib import Path

import pytest
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import convolution_step_case
from agentcompile_templates_cuda_recurrence import ConvolutionStepFamily
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Schedule

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from recurrence_tensors import H200, drawn, judged

FAMILY = ConvolutionStepFamily()
FEW = settings(max_examples=12, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(data=st.data())
def test_within_budget(data: st.DataObject) -> None:
    match, graph = convolution_step_case(
        channels=data.draw(st.sampled_from((1, 7, 64, 130, 1000))), width=data.draw(st.sampled_from((2, 3, 4, 8))),
        silu=data.draw(st.booleans()), bias=data.draw(st.booleans()), dtype=data.draw(st.sampled_from((DType.BF16, DType.F16, DType.F32))))
    assert FAMILY.accepts(match, H200) is True
    point = data.draw(st.sampled_from(FAMILY.space(match, H200).points))
    tensors = drawn(match, data.draw(st.integers(0, 99)), data.draw(st.sampled_from((0, 1))))
    for done in judged(FAMILY.lower(match, point, H200), match, graph, tensors, data.draw(st.sampled_from(SCHEDULES))):
        assert done.ok, (point, done)


WRONG = {  # what is wrong: text, with what it is replaced
    "the oldest column again": ("columns[c * width + k + 1]", "columns[c * width + k]"),
    "weights the other way around": ("fmaf(weights[c * width + k]", "fmaf(weights[c * width + width - 1 - k]"),
    "no bias": ("float sum = added[c];", "float sum = 0.0f;"),
    "no activation": ("? ac::silu(ac::round_to<T>(sum)) : sum", "? sum : sum"),
    "the state stays": ("kept[c * width + k] = column;", "kept[c * width + k] = columns[c * width + k];"),
    "the same channel twice": ("x[first + c]", "x[first]"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    text, wrong = WRONG[what]
    match, graph = convolution_step_case(channels=64)
    source = FAMILY.lower(match, Schedule({"threads": 64, "early": True}), H200)
    changed = evolve(source, code=source.code.replace(text, wrong))
    assert changed != source
    try:
        assert not all(done.ok for done in judged(changed, match, graph, drawn(match, 3)))
    except EmulationError:
        return


def test_spaces_and_rejects() -> None:
    assert {point["early"] for point in FAMILY.space(convolution_step_case(channels=64)[0], H200).points} == {True, False}
    assert {point["early"] for point in FAMILY.space(convolution_step_case(channels=64, width=3)[0], H200).points} == {False}
    wide = FAMILY.accepts(convolution_step_case(channels=8, width=65)[0], H200)
    assert wide is not True and "65 columns" in wide.reason


@pytest.mark.compile
@pytest.mark.parametrize("name", ["a100", "h200", "b200"])
def test_builds_without_spills(name: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    match = convolution_step_case(channels=10496)[0]
    assert backend.build(FAMILY.lower(match, FAMILY.space(match, target).points[0], target), target).resources.spill_bytes == 0
