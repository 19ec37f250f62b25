"""Group, instance and batch norm against torch on the CPU: rows of channels, weights that neighbours share, rows of any length."""

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import channel_norm_case
from agentcompile_templates_cuda_norm import NormFamily
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Schedule
from agentcompile_core.testing.conformance import TemplateFamilyConformance

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES
from agentcompile_validator_emulation.testing import TORCH, UNIT, Emulated, aligned

H200 = preset("h200")
FAMILY = NormFamily()
FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
EPS = 1e-6


class TestChannelNorms(TemplateFamilyConformance):
    family = FAMILY
    cases = (channel_norm_case(shape=(2, 6, 5, 3), groups=3), channel_norm_case(shape=(2, 4, 5, 7), groups=2, tail=("silu", "add")),
             channel_norm_case(shape=(1, 3, 8, 8), weight=False, tail=("mul",), dtype=DType.F32))
    rejected = ()
    targets = (preset("h200"),)
    samples = 1


@pytest.mark.parametrize("dtype,weight,schedule", [
    (DType.F16, True, {"threads": 64, "warps_per_row": 1}), (DType.F32, True, {"path": "looped", "threads": 64}),
    (DType.BF16, False, {"threads": 64, "warps_per_row": 2})], ids=str)
@FEW
@given(data=st.data())
def test_within_a_rounding(dtype: DType, weight: bool, schedule: dict[str, int | str], data: st.DataObject) -> None:
    groups, each = data.draw(st.sampled_from(((1, 6), (2, 3), (4, 1)))), data.draw(st.sampled_from(((), (1,), (5, 7), (16,))))
    shape = (data.draw(st.integers(1, 3)), groups[0] * groups[1], *each)
    match = channel_norm_case(shape=shape, groups=groups[0], weight=weight, dtype=dtype)[0]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensors = {o.name: aligned(torch.randn(o.spec.shape, generator=generator), TORCH[dtype]) for o in match.operands}
    Emulated(FAMILY.lower(match, Schedule(schedule), H200), match, H200).run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    parameters = [tensors[name].double() if weight else None for name in ("weight", "bias")]
    expected = torch.group_norm(tensors["x"].double(), groups[0], *parameters, EPS)  # that of torch.nn refuses single elements
    assert ((tensors["out"].double() - expected).abs() <= 1.01 * UNIT[tensors["out"].dtype] * expected.abs() + 2.0**-17).all()


def test_long_rows_are_split_or_read_again_and_short_ones_are_not() -> None:
    long, short = (channel_norm_case(shape=(1, 32, side, side), groups=2)[0] for side in (96, 8))
    assert FAMILY.accepts(long, H200) is True
    assert {dict(p.items).get("path") for p in FAMILY.space(long, H200).points} == {"split", "looped"}
    assert not [p for p in FAMILY.space(short, H200).points if dict(p.items).get("path")]
