"""A validator from outside: a winner must give the same bits every time, whatever lay in its outputs before."""

import torch

from agentcompile_core.plugin_api import (
    NO_TARGET,
    Backend,
    Case,
    Cause,
    Check,
    ContractError,
    Outcome,
    Trial,
    TrialRun,
    Validator,
    Verdict,
    control_trials,
    hookimpl,
)

RUNS = 8  # of each case


class SteadyValidator(Validator):
    """Two runs, as the numerics validator has them, miss what goes wrong once in a while."""

    name = "steady"
    scope = "winner"  # eight runs are too dear for every candidate

    def applies(self, trial: Trial) -> bool:
        """Every step."""
        return trial.kind == "step"

    def controls(self, backend: Backend) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
        """The backend's own addition, and the one that leaves its last element as it was."""
        right, unwritten = backend.control(""), backend.control("unwritten element")
        if right is None or unwritten is None:
            raise ContractError(f"the backend {backend.name} offers no control kernels, so nothing shows that steady works on it")
        good, bad = control_trials((right, unwritten), NO_TARGET)  # judged for the target of the candidates
        return (good,), (bad,)

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


@hookimpl
def agentcompile_validators() -> list[Validator]:
    """What this distribution offers."""
    return [SteadyValidator()]
