"""Kernels of steps that go on from their state, looked at after they were timed: those that stop, or work for whoever puts it back."""

from collections.abc import Callable

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.recurrence_kinds import CONVOLUTION_STEPS
from agentcompile_rules_transformers.testing import convolution_step_case
from agentcompile_templates_cuda_recurrence import ConvolutionStepFamily
from agentcompile_validator_emulation.backend import EmulationBackend
from attrs import evolve
from torch import Tensor

from agentcompile_core.plugin_api import Case, DType, InputFamily, Trial
from agentcompile_core.runtime.executables import BoundCall
from agentcompile_core.stages.analyze.checking import completed
from agentcompile_core.worker import after_timing, timing
from agentcompile_core.worker.execution import Execution

CHANNELS, WIDTH, H200 = 64, 4, preset("h200")
Step = Callable[..., None]


def work(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *, writes: bool = True) -> None:
    columns = torch.cat((state.view(CHANNELS, WIDTH)[:, 1:], x.view(CHANNELS, 1)), 1)
    out.view(-1).copy_(torch.nn.functional.silu((columns * weight.view(CHANNELS, WIDTH)).sum(1) + bias.view(-1)))
    if writes:
        state.view(CHANNELS, WIDTH).copy_(columns)


def honest() -> Step:
    return work


def stops() -> Step:
    runs: list[int] = []

    def run(**operands: Tensor) -> None:
        runs.append(1)
        if len(runs) <= 3:
            work(**operands)

    return run


def stops_writing_its_state() -> Step:
    runs: list[int] = []

    def run(**operands: Tensor) -> None:
        runs.append(1)
        work(**operands, writes=len(runs) <= 3)

    return run


def spoils_its_state_later() -> Step:
    runs: list[int] = []

    def run(**operands: Tensor) -> None:
        runs.append(1)
        work(**operands)
        if len(runs) > 3:
            operands["state"].fill_(7.0)

    return run


def works_where_somebody_moved_the_state() -> Step:
    left: dict[int, Tensor] = {}

    def run(**operands: Tensor) -> None:
        key = operands["out"].data_ptr()
        if key in left and torch.equal(left[key], operands["state"]):
            return
        work(**operands)
        left[key] = operands["state"].clone()

    return run


def found(make: Callable[[], Step], timed: bool) -> object:
    match, graph = convolution_step_case(channels=CHANNELS, width=WIDTH, dtype=DType.F32)
    match = completed(match, CONVOLUTION_STEPS, graph)
    family = ConvolutionStepFamily()
    source = family.lower(match, family.space(match, H200).points[0], H200)
    cases = tuple(Case(family=InputFamily.NORMAL, seed=seed) for seed in (1, 2))
    trial = Trial(match=match, graph=graph, source=source, target=H200, cases=cases)
    execution = Execution(trial, EmulationBackend(), None, bound=BoundCall(run=make()), kind=CONVOLUTION_STEPS)
    if not timed:
        return after_timing.look_untimed(execution, 5.0)
    turn = timing.rotation(trial, CONVOLUTION_STEPS, cases[0], "cpu")
    turn = evolve(turn, copies=turn.copies[:3])
    run = timing.in_rotation([execution.prepared(buffers) for buffers in turn.copies])
    for _ in range(12):
        run(0)
    return after_timing.look(execution, turn)


@pytest.mark.parametrize("timed", [True, False])
def test_an_honest_kernel_passes(timed: bool) -> None:
    assert found(honest, timed) is None


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("make", [stops, stops_writing_its_state, spoils_its_state_later, works_where_somebody_moved_the_state],
                         ids=lambda one: one.__name__)
def test_what_does_not_do_its_work_in_every_run_is_seen(make: Callable[[], Step], timed: bool) -> None:
    assert found(make, timed) is not None


def test_copies_of_what_is_read_and_written_exceed_the_cache_twice() -> None:
    match, graph = convolution_step_case(channels=1 << 16, width=WIDTH, dtype=DType.F32)
    match = completed(match, CONVOLUTION_STEPS, graph)
    trial = Trial(match=match, graph=graph, source=ConvolutionStepFamily().lower(
        match, ConvolutionStepFamily().space(match, H200).points[0], H200), target=H200, cases=())
    count, cold = timing.copies_needed(trial, H200)
    assert not cold or count * sum(operand.spec.nbytes for operand in match.operands) >= 2 * H200.l2_bytes
