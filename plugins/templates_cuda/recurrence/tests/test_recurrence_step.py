"""Steps of recurrences against the reference: forms, sizes, ways to lay out threads; wrong kernels; spaces; builds."""

import sys
from pathlib import Path

import pytest
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import recurrence_step_case
from agentcompile_templates_cuda_recurrence import RecurrenceStepFamily
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Schedule

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from recurrence_tensors import H200, drawn, judged

FAMILY = RecurrenceStepFamily()
FEW = settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
SIZES = {  # heads, width, terms, groups
    "mamba": (96, 1, 16, 1), "mamba2": (4, 64, 128, 1), "groups": (8, 16, 32, 2), "small": (2, 32, 8, 1), "delta": (4, 32, 64, 2),
}


@pytest.mark.parametrize("form", ("bare", "scan", "delta"))
@FEW
@given(data=st.data())
def test_within_budget(form: str, data: st.DataObject) -> None:
    """Any schedule of any size, states read early or late, results of any type, activations that begin anywhere."""
    heads, width, terms, groups = SIZES[data.draw(st.sampled_from([name for name in sorted(SIZES) if form == "scan" or name != "mamba"]))]
    dtype = data.draw(st.sampled_from((DType.BF16, DType.F16, DType.F32)))
    match, graph = recurrence_step_case(heads=heads, width=width, terms=terms, groups=groups, form=form, dtype=dtype,
                                        gated=data.draw(st.booleans()))
    assert FAMILY.accepts(match, H200) is True
    point = data.draw(st.sampled_from(FAMILY.space(match, H200).points))
    tensors = drawn(match, data.draw(st.integers(0, 99)), data.draw(st.sampled_from((0, 1))))
    for done in judged(FAMILY.lower(match, point, H200), match, graph, tensors, data.draw(st.sampled_from(SCHEDULES))):
        assert done.ok, (point, done)


def test_steps_follow_each_other() -> None:
    """The state of one step is what the next one begins with."""
    match, graph = recurrence_step_case(heads=2, width=32, terms=64, form="delta")
    source = FAMILY.lower(match, FAMILY.space(match, H200).points[0], H200)
    tensors = drawn(match, 0)
    for step in range(3):
        fresh = drawn(match, step)
        tensors = {name: tensors["state"] if name == "state" else fresh[name] for name in fresh}
        assert all(done.ok for done in judged(source, match, graph, tensors))


WRONG = {  # what is wrong: text, with what it is replaced, form
    "nothing decays": ("s[r][j] *= factor;", "", "scan"),
    "what it knows is not taken off": ("added - lane_sum(known)", "added", "delta"),
    "before it decays": ("known = fmaf(s[r][j], key[j], known);", "known = fmaf(s[r][j] / factor, key[j], known);", "delta"),
    "a lane's sum alone": ("lane_sum(sum[r]))", "sum[r])", "scan"),
    "no skip": ("? ac::to_float(given[place.head(r)]) : 0.0f", "? 0.0f : 0.0f", "scan"),
    "rates are not logarithms": ("? -expf(given) : given", "? given : given", "scan"),
    "no softplus": ("? softplus(given) : given", "? given : given", "scan"),
    "no bias": ("+ of.bias[r][j]", "", "delta"),
    "x is not scaled": ("? of_x[r] * step[r][0] : of_x[r]", "? of_x[r] : of_x[r]", "scan"),
    "strength as it is": ("ac::sigmoid(given) : given", "given : given", "delta"),
    "lines of any length": ("eps > 0.0f ? rsqrtf(lane_sum(squares) + eps) : 1.0f", "1.0f", "delta"),
    "queries are not scaled": ("to[j] = to[j] * factor * scale;", "to[j] = to[j] * factor;", "delta"),
    "the lines of another group": ("const int group = place.first", "const int group = 0 * place.first", "scan"),
    "the state stays": ("*reinterpret_cast<float4*>(state + place.quad(r, q)) =", "(void)", "scan"),
    "one decay for all terms": ("expf(step[r][step_of_terms ? j : 0]", "expf(step[r][0]", "bare"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    text, wrong, form = WRONG[what]
    match, graph = recurrence_step_case(heads=4, width=32, terms=64, groups=2, form=form, dtype=DType.F32)
    source = FAMILY.lower(match, Schedule({"lanes": 8, "held": 4, "warps": 2, "early": True}), H200)
    changed = evolve(source, code=source.code.replace(text, wrong))
    assert changed != source
    try:
        assert not all(done.ok for done in judged(changed, match, graph, drawn(match, 3)))
    except EmulationError:
        return


def test_a_state_that_is_read_plainly_before_the_wait_is_seen() -> None:
    match, graph = recurrence_step_case(heads=4, width=32, terms=64)
    source = FAMILY.lower(match, Schedule({"lanes": 8, "held": 4, "warps": 2, "early": True}), H200)
    changed = evolve(source, code=source.code.replace("return ac::load_settled16(from);", "return ac::load_stream16(from);"))
    with pytest.raises(EmulationError, match="wait"):
        judged(changed, match, graph, drawn(match, 0))


def test_spaces_fit_their_shapes_and_rejects_explain() -> None:
    for heads, width, terms, form in ((5120, 1, 16, "scan"), (80, 64, 128, "scan"), (32, 128, 128, "delta"), (48, 64, 256, "scan")):
        points = FAMILY.space(recurrence_step_case(heads=heads, width=width, terms=terms, form=form)[0], H200).points
        assert 0 < len(points) == len(set(points)) <= 200
    older = FAMILY.space(recurrence_step_case(heads=4, width=32, terms=64)[0], preset("a100")).points
    assert {point["early"] for point in older} == {False}
    odd = FAMILY.accepts(recurrence_step_case(heads=3, width=5, terms=10)[0], H200)
    assert odd is not True and "3 heads of 5 rows and 10 terms" in odd.reason


@pytest.mark.compile
@pytest.mark.parametrize("name", ["a100", "h200", "b200"])
@pytest.mark.parametrize("size", [(5120, 1, 16, "scan"), (80, 64, 128, "scan"), (32, 128, 128, "delta")], ids=["mamba", "mamba2", "delta"])
def test_builds_without_spills(name: str, size: tuple[int, int, int, str]) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    heads, width, terms, form = size
    match = recurrence_step_case(heads=heads, width=width, terms=terms, form=form)[0]
    for point in FAMILY.space(match, target).points[::16]:
        assert backend.build(FAMILY.lower(match, point, target), target).resources.spill_bytes == 0, point
