"""Running sums and products of the family against the reference: ends, axes, parts, tails, alignment; wrong kernels; builds."""

import math

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import scan_case
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
WARP = {"path": "scan", "threads": 64, "warps_per_row": 1, "splits": 1}
PARTS = {"path": "scan", "threads": 64, "warps_per_row": 2, "splits": 3}
COLUMN = {"path": "scan_strided", "warps": 3, "step": 4}


def run(pair: tuple[Match, Graph], point: dict[str, int | str], x: torch.Tensor, offset: int = 0, options: object = None,
        source: StepSource | None = None) -> Comparison:
    match, graph = pair
    assert FAMILY.accepts(match, H200) is True
    tensors = {"out": aligned(torch.full(x.shape, math.nan), TORCH[match.need("out").spec.dtype], offset)}
    for number, operand in enumerate(o for o in match.operands if o.name != "out"):
        tensors[operand.name] = aligned(x if number == 0 else x.flip(-1), TORCH[operand.spec.dtype], offset)
    Emulated(source or FAMILY.lower(match, Schedule(point), H200), match, H200).run(tensors, options)
    values = {operand.values[0]: tensors[operand.name] for operand in match.operands if operand.name != "out"}
    return compare(tensors["out"], oracle(graph, values)[graph.outputs[0]])


@pytest.mark.parametrize("form,point,inner,dtype", [
    ({"before": ("mul",)}, WARP, 1, DType.F16), ({"reverse": True}, PARTS, 1, DType.BF16), ({"product": True}, COLUMN, 40, DType.F32)],
    ids=["warp", "parts", "strided product"])
@FEW
@given(data=st.data())
def test_within_budget(form: dict, point: dict[str, int | str], inner: int, dtype: DType, data: st.DataObject) -> None:
    """Rows of all lengths, aligned and not; NaN and infinities show from their place on and nowhere before."""
    columns = data.draw(st.sampled_from((2, 7, 64, 255, 1032)))
    shape = (2, columns, inner) if inner > 1 else (1, 3, columns)
    pair = scan_case(shape=shape, axis=1 if inner > 1 else -1, dtype=dtype, **form)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    x = x.sign() * (x.abs() * columns**-0.5).exp() if "product" in form else x + data.draw(st.sampled_from((0.0, 3.0)))
    x.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = data.draw(st.sampled_from((0.0, math.inf, -math.inf, math.nan)))
    done = run(pair, point, x, data.draw(st.sampled_from((0, 1))), data.draw(st.sampled_from(SCHEDULES)))
    assert done.ok, done


WRONG = {  # what is wrong: text, with what it is replaced, form, point
    "a lane also counts those behind it": ("if (lane >= offset) own", "if (lane > offset) own", {}, WARP),
    "a part begins from nothing": ("begin, before, totals", "begin, neutral, totals", {}, PARTS),
    "a warp forgets the last turn": ("carry = join(carry, total);", "carry = total;", {}, WARP),
    "the wrong end of a line": ("columns - 1 - c : c", "c : c", {"reverse": True}, COLUMN),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    text, wrong, form, point = WRONG[what]
    shape = (1, 70, 40) if point is COLUMN else (1, 1, 1032)
    match, graph = scan_case(shape=shape, axis=1 if point is COLUMN else -1, dtype=DType.F32, **form)
    source = FAMILY.lower(match, Schedule(point), H200)
    changed = evolve(source, code=source.code.replace(text, wrong))
    assert changed != source
    try:
        assert not run((match, graph), point, torch.randint(1, 9, shape).float(), source=changed).ok
    except EmulationError:
        return


def test_spaces_fit_their_shapes_and_rejects_explain() -> None:
    for shape, axis, splits in (((1, 151936), -1, 37), ((65536, 256), -1, 1), ((8192, 8192), -1, 1), ((256, 1 << 20), -1, 3)):
        points = FAMILY.space(scan_case(shape=shape, axis=axis)[0], H200).points
        assert 0 < len(points) == len(set(points)) <= 24 and points[0]["splits"] == splits, shape
    assert FAMILY.space(scan_case(shape=(65536, 256))[0], H200).points[0]["warps_per_row"] == 1
    assert {p["path"] for p in FAMILY.space(scan_case(shape=(65536, 256), axis=0)[0], H200).points} == {"scan_strided"}
    match = scan_case(shape=(4, 64))[0]
    changed = evolve(match, attributes=tuple((k, "max" if k == "op" else v) for k, v in match.attributes))
    assert "max" in FAMILY.accepts(changed, H200).reason


@pytest.mark.compile
@pytest.mark.parametrize("name,axis", [("a100", -1), ("b200", 0)])
def test_builds_without_spills(name: str, axis: int) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    match = scan_case(shape=(4096, 5120), axis=axis, reverse=axis == 0)[0]
    source = FAMILY.lower(match, FAMILY.space(match, target).points[0], target)
    assert backend.build(source, target).resources.spill_bytes == 0
