"""The rope families against fp64 and the framework's formula on the CPU."""


import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_rope import RopeFamily, RopeTableFamily
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import ROPE, ROPE_TABLE, Access, DType, Match, Role, Schedule, SemanticLabel

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES
from agentcompile_validator_emulation.testing import TINY, TORCH, UNIT, Emulated, operand

H200 = preset("h200")
ROPE_FAMILY, TABLE_FAMILY = RopeFamily(), RopeTableFamily()
FEW = settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def rope_match(heads: int, head_dim: int, rotary_dim: int, dtype: DType = DType.F16, style: str = "half") -> Match:
    shape = (1, heads, 1, head_dim)
    operands = (operand("x", Role.INPUT, shape, dtype), operand("cos", Role.INPUT, (1, 1, rotary_dim), dtype),
                operand("sin", Role.INPUT, (1, 1, rotary_dim), dtype), operand("out", Role.OUTPUT, shape, dtype, Access.WRITE))
    return Match(kind=ROPE, label=SemanticLabel.ROPE, nodes=("rope",), operands=operands,
                 attributes=(("heads", heads), ("head_dim", head_dim), ("rotary_dim", rotary_dim), ("style", style)))


def table_match(half: int, dtype: DType = DType.F16, scaling: float = 1.0, style: str = "half") -> Match:
    operands = (operand("position", Role.LENGTH, (1,), DType.I64), operand("inv_freq", Role.CONSTANT, (half,), DType.F32),
                *(operand(name, Role.OUTPUT, (1, 1, 2 * half), dtype, Access.WRITE) for name in ("cos", "sin")))
    return Match(kind=ROPE_TABLE, label=SemanticLabel.ROPE_TABLE, nodes=("rope_table",), operands=operands,
                 attributes=(("half", half), ("attention_scaling", scaling), ("style", style)))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x rotated, and the sum of the magnitudes of its two products."""
    r = cos.shape[-1]
    head, rest = x[..., :r], x[..., r:]
    if style == "half":
        other = torch.cat((-head[..., r // 2:], head[..., :r // 2]), -1)
    else:
        other = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
    turned, size = head * cos + other * sin, (head * cos).abs() + (other * sin).abs()
    return torch.cat((turned, rest), -1), torch.cat((size, rest.abs()), -1)


@pytest.mark.parametrize("dtype,style", [(DType.F16, "half"), (DType.BF16, "half"), (DType.F32, "interleaved")], ids=str)
@FEW
@given(data=st.data())
def test_within_budget(dtype: DType, style: str, data: st.DataObject) -> None:
    head_dim = data.draw(st.sampled_from((2, 64, 80, 128)))
    rotary_dim = data.draw(st.sampled_from([r for r in (2, 32, 64, 80, 128) if r <= head_dim]))
    heads = data.draw(st.sampled_from((1, 3, 8)))
    match = rope_match(heads, head_dim, rotary_dim, dtype, style)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tensors = {name: torch.randn(match.need(name).spec.shape, generator=generator).to(TORCH[dtype]) for name in ("x", "cos", "sin")}
    tensors["out"] = torch.full_like(tensors["x"], float("nan"))
    kernel = Emulated(ROPE_FAMILY.lower(match, Schedule({"threads": 64}), H200), match, H200)
    kernel.run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    expected, size = rotated(*(tensors[name].double() for name in ("x", "cos", "sin")), style)
    budget = 1.001 * UNIT[tensors["x"].dtype] * expected.abs() + TINY[tensors["x"].dtype] + 2.0**-23 * size
    assert bool(((tensors["out"].double() - expected).abs() <= budget).all())
    assert torch.equal(tensors["out"][..., rotary_dim:], tensors["x"][..., rotary_dim:])


@pytest.mark.parametrize("style,dtype", [("half", DType.F16), ("half", DType.BF16), ("half", DType.F32), ("interleaved", DType.F16),
                                         ("interleaved", DType.F32)], ids=str)
def test_table_is_the_framework_s(style: str, dtype: DType) -> None:
    """The angle is the fp32 product that the framework rounds, so far positions agree although fp64 angles would not."""
    half, scaling = 48, 1.25
    match = table_match(half, dtype, scaling, style)
    frequencies = 1.0 / 1e6 ** (torch.arange(half, dtype=torch.float32) / half)
    for position in (0, 1, 191, 40_959, 131_071):
        tensors = {"position": torch.tensor([position]), "inv_freq": frequencies,
                   **{name: torch.full((1, 1, 2 * half), float("nan"), dtype=TORCH[dtype]) for name in ("cos", "sin")}}
        kernel = Emulated(TABLE_FAMILY.lower(match, Schedule({"threads": 32}), H200), match, H200)
        kernel.run(tensors)
        angles = (torch.tensor(float(position)) * frequencies).double()
        angles = angles.repeat(2) if style == "half" else angles.repeat_interleave(2)
        for name, exact in (("cos", angles.cos() * scaling), ("sin", angles.sin() * scaling)):
            budget = 1.001 * UNIT[TORCH[dtype]] * exact.abs() + TINY[TORCH[dtype]] + 2.0**-22
            assert bool(((tensors[name].flatten().double() - exact).abs() <= budget).all())


def test_spaces_and_rejects() -> None:
    assert ROPE_FAMILY.accepts(rope_match(16, 128, 128), H200) is True
    assert TABLE_FAMILY.accepts(table_match(64), H200) is True
    for points in (ROPE_FAMILY.space(rope_match(16, 128, 128), H200).points, TABLE_FAMILY.space(table_match(64), H200).points):
        assert 0 < len(points) == len(set(points)) <= 64
    assert "inside the head" in ROPE_FAMILY.accepts(rope_match(16, 64, 66), H200).reason
    assert "unknown style" in ROPE_FAMILY.accepts(rope_match(16, 64, 64, style="spiral"), H200).reason
    assert "unknown style" in TABLE_FAMILY.accepts(table_match(64, style="spiral"), H200).reason
    assert "serves" in TABLE_FAMILY.accepts(rope_match(16, 64, 64), H200).reason


@pytest.mark.compile
@pytest.mark.parametrize("name", ["a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090"])
def test_builds(name: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    for family, match in ((ROPE_FAMILY, rope_match(16, 128, 128)), (TABLE_FAMILY, table_match(64))):
        source = family.lower(match, family.space(match, target).points[0], target)
        assert backend.build(source, target).resources.spill_bytes == 0
