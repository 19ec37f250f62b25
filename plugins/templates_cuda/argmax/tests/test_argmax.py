"""The argmax family against torch on the CPU: ties, NaN, infinities, tails, the advance of the decode state."""

import math

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_templates_cuda_argmax import ArgmaxFamily
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import ARGMAX, Access, DType, Match, Role, Schedule, SemanticLabel

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES
from agentcompile_validator_emulation.testing import TORCH, Emulated, aligned, operand

H200 = preset("h200")
FAMILY = ArgmaxFamily()
FEW = settings(max_examples=12, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
HISTORY = 6


def argmax_match(n: int, dtype: DType = DType.F16, advance: bool = True) -> Match:
    operands = [operand("logits", Role.INPUT, (1, 1, n), dtype), operand("token", Role.OUTPUT, (1,), DType.I64, Access.WRITE)]
    if advance:
        operands += [operand(name, Role.STATE, shape, DType.I64, Access.READ_WRITE)
                     for name, shape in (("ids", (1, 1)), ("position", (1,)), ("history", (HISTORY,)))]
    return Match(kind=ARGMAX, label=SemanticLabel.ARGMAX, nodes=("argmax",), operands=tuple(operands),
                 attributes=(("n", n), ("advance", advance)))


def state(logits: torch.Tensor, position: int = 0) -> dict[str, torch.Tensor]:
    return {"logits": logits, "token": torch.tensor([-1]), "ids": torch.tensor([[9]]), "position": torch.tensor([position]),
            "history": torch.zeros(HISTORY, dtype=torch.int64)}


def emulated(match: Match, threads: int = 64, blocks: int = 3, unroll: int = 2) -> Emulated:
    return Emulated(FAMILY.lower(match, Schedule({"threads": threads, "blocks": blocks, "unroll": unroll}), H200), match, H200)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32], ids=lambda d: d.value)
@FEW
@given(data=st.data())
def test_equals_torch(dtype: DType, data: st.DataObject) -> None:
    """Few distinct values, so that ties are everywhere; NaN and infinities among them."""
    n = data.draw(st.sampled_from((1, 7, 8, 9, 255, 1537, 3000)))
    drawn = st.sampled_from((-math.inf, -2.0, 0.0, 1.0, 3.0, math.inf, math.nan))
    values = torch.tensor(data.draw(st.lists(drawn, min_size=1, max_size=4)))
    logits = values[torch.randint(0, len(values), (n,), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))]
    tensors = state(aligned(logits, TORCH[dtype], data.draw(st.sampled_from((0, 1)))))
    kernel = emulated(argmax_match(n, dtype), blocks=data.draw(st.sampled_from((1, 3))))
    kernel.run(tensors, data.draw(st.sampled_from(SCHEDULES)))
    nan = logits.isnan()
    expected = int(nan.nonzero()[0]) if nan.any() else int((logits == logits.max()).nonzero()[0])
    assert tensors["token"].item() == expected
    assert kernel.clean()


def test_advance_moves_the_decode_state_on() -> None:
    kernel = emulated(argmax_match(40))
    tensors = state(torch.zeros(40, dtype=torch.float16), position=2)
    for step, token in enumerate((5, 39, 0, 17, 8)):
        tensors["logits"].zero_()
        tensors["logits"][token] = 1.0
        kernel.run(tensors)
        assert tensors["ids"].item() == tensors["token"].item() == token
        assert tensors["position"].item() == 3 + step
    assert tensors["history"].tolist() == [0, 0, 0, 5, 39, 8]  # a replay beyond the end stays in the last element


def test_without_advance_the_state_is_not_an_operand() -> None:
    match = argmax_match(40, advance=False)
    tensors = {"logits": torch.arange(40).half(), "token": torch.tensor([-1])}
    emulated(match).run(tensors)
    assert tensors["token"].item() == 39


def test_space_and_rejects() -> None:
    space = FAMILY.space(argmax_match(151936), H200)
    assert 1 < len(space.points) == len(set(space.points)) <= 64
    assert {point["blocks"] for point in FAMILY.space(argmax_match(10), H200).points} == {1}
    assert FAMILY.accepts(argmax_match(100), H200) is True
    assert "int64" in FAMILY.accepts(argmax_match(100, DType.I64), H200).reason


@pytest.mark.compile
@pytest.mark.parametrize("name", ["a100", "rtx3090", "rtx4090", "h200", "b200", "rtx5090"])
def test_builds_without_spills(name: str) -> None:
    backend = pytest.importorskip("agentcompile_runtime_cuda.backend").CudaBackend()
    target = preset(name)
    if not backend.can_build(target):
        pytest.skip(backend.can_build(target).reason)
    match = argmax_match(151936)
    assert backend.build(FAMILY.lower(match, FAMILY.space(match, target).points[0], target), target).resources.spill_bytes == 0
