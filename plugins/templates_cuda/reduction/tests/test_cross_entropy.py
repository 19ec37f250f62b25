"""Cross entropies of the family against the reference: mean, sum and rows, classes that are left out; wrong kernels."""

import math

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import cross_entropy_case
from agentcompile_templates_cuda_reduction import ReductionFamily
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.reference.second_opinion import disagreement
from agentcompile_core.plugin_api import Comparison, DType, Graph, Match, Schedule, StepSource, compare, oracle

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError
from agentcompile_validator_emulation.testing import TORCH, Emulated, aligned

H200 = preset("h200")
FAMILY = ReductionFamily()
FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
BLOCK, WARP = ({"path": "cross_entropy", "threads": 64, "warps_per_row": warps} for warps in (2, 1))


def run(pair: tuple[Match, Graph], point: dict[str, int | str], given_: tuple[torch.Tensor, torch.Tensor], options: object = None,
        source: StepSource | None = None) -> Comparison:
    match, graph = pair
    assert FAMILY.accepts(match, H200) is True
    out = match.need("out").spec
    tensors = {"in0": aligned(given_[0], TORCH[match.need("in0").spec.dtype]), "classes": aligned(given_[1], torch.int64),
               "out": aligned(torch.full(out.shape, math.nan), TORCH[out.dtype])}
    Emulated(source or FAMILY.lower(match, Schedule(point), H200), match, H200).run(tensors, options)
    values = {match.need(name).values[0]: tensors[name] for name in ("in0", "classes")}
    expected = oracle(graph, values)
    assert disagreement(graph, values, expected) == ""
    return compare(tensors["out"], expected[graph.outputs[0]])


@pytest.mark.parametrize("reduction,point,before,dtype", [("mean", BLOCK, "", DType.F32), ("none", WARP, "tanh", DType.BF16)])
@FEW
@given(data=st.data())
def test_within_budget(reduction: str, point: dict[str, int | str], before: str, dtype: DType, data: st.DataObject) -> None:
    rows, columns = data.draw(st.sampled_from((1, 3, 9))), data.draw(st.sampled_from((2, 7, 255, 1032)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(rows, columns, generator=generator) * data.draw(st.sampled_from((1.0, 30.0)))
    x.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = data.draw(st.sampled_from((0.0, math.inf, -math.inf, math.nan)))
    classes = torch.randint(0, columns, (rows,), generator=generator)
    classes[data.draw(st.integers(0, rows - 1))] = data.draw(st.sampled_from((-100, 0, columns - 1)))
    pair = cross_entropy_case(rows=rows, columns=columns, reduction=reduction, before=before, dtype=dtype)
    done = run(pair, point, (x, classes), data.draw(st.sampled_from(SCHEDULES)))
    assert done.ok, done


WRONG = {
    "classes that are left out are counted": ("if (classes[row] != ignored) count", "count"),
    "the class of another row": ("= classes[row];", "= classes[row ^ 1];"),
    "the score is not taken off": ("state.largest - own", "state.largest"),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    pair = cross_entropy_case(rows=8, columns=255, dtype=DType.F32)
    source = FAMILY.lower(pair[0], Schedule(BLOCK), H200)
    changed = evolve(source, code=source.code.replace(*WRONG[what]))
    assert changed != source
    classes = torch.arange(8) * 3
    classes[5] = -100
    try:
        assert not run(pair, BLOCK, (torch.randn(8, 255, generator=torch.Generator().manual_seed(1)), classes), source=changed).ok
    except EmulationError:
        return


@pytest.mark.compile
def test_builds_without_spills() -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset("a100")
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    match = cross_entropy_case(rows=4096, columns=4096)[0]
    points = FAMILY.space(match, target).points
    short = FAMILY.space(cross_entropy_case(rows=4096, columns=10)[0], target).points
    assert (points[0]["warps_per_row"], short[0]["warps_per_row"]) == (8, 1)
    assert backend.build(FAMILY.lower(match, points[0], target), target).resources.spill_bytes == 0
