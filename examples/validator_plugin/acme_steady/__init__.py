"""A validator from outside: a winner must give the same bits every time, whatever lay in its outputs before."""

import torch

from agentcompile_core.plugin_api import (
    Access,
    Case,
    Cause,
    Check,
    DType,
    Launch,
    Outcome,
    Role,
    StepSource,
    Trial,
    TrialRun,
    Validator,
    Verdict,
    hookimpl,
    i32,
    pointer,
)
from agentcompile_core.testing.doubles import fake_trial

RUNS = 8  # of each case
CONTROL = """
extern "C" __global__ void steady_control_{number}(const float* in0, const float* in1, float* out, int count) {{
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = in0[i] + in1[i]{defect};
}}
"""


class SteadyValidator(Validator):
    """Two runs, as the numerics validator has them, miss what goes wrong once in a while."""

    name = "steady"
    scope = "winner"  # eight runs are too dear for every candidate

    def applies(self, trial: Trial) -> bool:
        """Every step."""
        return trial.kind == "step"

    def controls(self) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
        """An addition, and one that adds what was in its output before."""
        return (control(0, ""),), (control(1, " + out[i] * 0.25f"),)

    def check(self, trial: Trial, run: TrialRun) -> Verdict:
        """Judge the first and the last case."""
        checks = []
        for case in dict.fromkeys((trial.cases[0], trial.cases[-1])):
            detail = unsteady(case, run)
            name = f"{case.family} seed {case.seed} position {case.position}"
            checks.append(Check(name=name, outcome=Outcome.FAIL if detail else Outcome.PASS, detail=detail))
            if detail:
                return Verdict(validator=self.name, outcome=Outcome.FAIL, checks=tuple(checks), cause=Cause.TOLERANCE,
                               message=f"{name}: {detail}")
        return Verdict(validator=self.name, outcome=Outcome.PASS, checks=tuple(checks))


def unsteady(case: Case, run: TrialRun) -> str:
    """Which operands differ between runs on equal inputs, and in how many runs; empty if none does."""
    first = run.run(case, poison=0.0).outputs
    others = [run.run(case, poison=float(n)).outputs for n in range(1, RUNS)]
    for name, tensor in first.items():
        differ = sum(not torch.equal(bits(tensor), bits(other[name])) for other in others)
        if differ:
            return f"{name} differs from the first run in {differ} of {len(others)} others"
    return ""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaN equals NaN, and -0 differs from 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def control(number: int, defect: str) -> Trial:
    """The addition of two vectors as a trial; its match, graph and cases are those of the core's own tests."""
    trial, count = fake_trial("honest"), 100
    arguments = (pointer("in0", Role.INPUT, DType.F32), pointer("in1", Role.INPUT, DType.F32),
                 pointer("out", Role.OUTPUT, DType.F32, Access.WRITE), i32("count", count))
    launch = Launch(entry=f"steady_control_{number}", grid=(1, 1, 1), block=(128, 1, 1), arguments=arguments)
    source = StepSource(digest=f"57ead7{number:06d}", code=CONTROL.format(number=number, defect=defect), launches=(launch,))
    return Trial(match=trial.match, graph=trial.graph, source=source, target=trial.target, cases=trial.cases)


@hookimpl
def agentcompile_validators() -> list[Validator]:
    """What this distribution offers."""
    return [SteadyValidator()]
