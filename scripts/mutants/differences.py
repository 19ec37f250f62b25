"""Whether mutants write other bits than the kernel they were made from, or leave the error budget, on random cases of the same launch."""

import random
from collections.abc import Iterable, Iterator, Sequence

import torch
from attrs import evolve

from agentcompile_core.plugin_api import Case, InputFamily, Role, StepSource, Trial, argument_values, compare, same_bits
from agentcompile_core.worker.buffers import Buffers
from agentcompile_core.worker.execution import Execution
from agentcompile_core.worker.operands import make_inputs

from .subjects import BACKEND, Subject, load

GIVEN = (Role.INPUT, Role.WEIGHT, Role.CONSTANT, Role.STATE, Role.LENGTH)
WRITTEN = (Role.OUTPUT, Role.STATE)


class Runner:
    """One source over buffers of its own, in which every run starts afresh."""

    def __init__(self, subject: Subject, source: StepSource) -> None:
        backend = load().find("agentcompile_backends", BACKEND)
        trial = subject.job(source).trial
        handle = backend.load(backend.build(source, subject.target))
        self.buffers = Buffers(trial, backend.device)
        self._runs = [backend.prepare_launch(handle, launch, argument_values(launch, self.buffers.addresses), launch.pdl)
                      for launch in source.launches]

    def run(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run on ``inputs`` by operand name; outputs and states."""
        into = self.buffers.tensors(*GIVEN)
        for name, tensor in inputs.items():
            into[name].copy_(tensor)
        for tensor in self.buffers.tensors(Role.OUTPUT).values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -77)
        for launch in self._runs:
            launch(0)
        return self.buffers.tensors(*WRITTEN)


def random_cases(trial: Trial, numbers: range) -> Iterator[Case]:
    """Cases of every input family that the trial knows, at any position up to the last of its cases; each is drawn from its number."""
    families = sorted({*InputFamily, *(case.family for case in trial.cases)})
    positions, carriers = [case.position for case in trial.cases], [case.carrier for case in trial.cases if case.carrier]
    for number in numbers:
        draw = random.Random(f"{trial.match.id} {number}")
        case = Case(family=draw.choice(families), seed=draw.randrange(1 << 30), position=draw.randint(min(positions), max(positions)))
        yield evolve(case, carrier=draw.choice(["", *carriers])) if case.family == InputFamily.NAN else case


def differences(subject: Subject, sources: Sequence[StepSource], numbers: range) -> list[str]:
    """For each source what the first of the random cases of these ``numbers`` shows on which it writes other bits; empty: none does."""
    kind = load().kinds[subject.match.kind]
    original = Runner(subject, subject.source)
    others = {index: Runner(subject, source) for index, source in enumerate(sources)}
    seen = [""] * len(sources)
    for case in random_cases(subject.job(subject.source).trial, numbers):
        inputs = make_inputs(subject.match, kind, case, "cpu")
        right = original.run(inputs)
        for index, runner in list(others.items()):
            seen[index] = _difference(right, runner.run(inputs), case)
            if seen[index]:
                del others[index]
    return seen


def beyond_budget(subject: Subject, sources: Sequence[StepSource], numbers: range) -> list[str]:
    """For each source the first of the random cases of these ``numbers`` in which it leaves the error budget; empty: none."""
    return [_beyond(subject, source, numbers) for source in sources]


def _beyond(subject: Subject, source: StepSource, numbers: range) -> str:
    return first_beyond(subject, source, random_cases(subject.job(source).trial, numbers))


def first_beyond(subject: Subject, source: StepSource, cases: Iterable[Case]) -> str:
    """Where a source first leaves the error budget, and in which of the cases; empty: nowhere."""
    trial, backend = subject.job(source).trial, load().find("agentcompile_backends", BACKEND)
    execution = Execution(trial, backend, backend.load(backend.build(source, subject.target)), kind=load().kinds[subject.match.kind])
    for case in cases:
        result = execution.run(case, float("nan"))
        expected = execution.expected(case, result.inputs)
        for name, tensor in execution.values(result.outputs).items():
            found = compare(tensor, expected[name])
            if not found.ok:
                return f"{name} on {case.family} seed {case.seed} position {case.position}: {found.detail}"
    return ""


def _difference(right: dict[str, torch.Tensor], found: dict[str, torch.Tensor], case: Case) -> str:
    for name, tensor in right.items():
        if not same_bits(tensor, found[name]):
            return f"{name} differs on {case.family} seed {case.seed} position {case.position}{_where(tensor, found[name])}"
    return ""


def _where(right: torch.Tensor, found: torch.Tensor) -> str:
    left, other = right.reshape(-1).double(), found.reshape(-1).double()
    unequal = ((left != other) & ~(left.isnan() & other.isnan())).nonzero().reshape(-1)
    if not len(unequal):
        return ": only signs of zeros or kinds of NaN"
    first = int(unequal[0])
    return f": {len(unequal)} of {len(left)} elements; element {first} is {other[first]:.6g}, not {left[first]:.6g}"
