"""The checks, case by case; the first failing case ends them."""

from agentcompile_core.plugin_api import (
    Backend,
    Case,
    Cause,
    Check,
    Outcome,
    Trial,
    TrialResult,
    TrialRun,
    Validator,
    Verdict,
    compare,
    same_bits,
)

from .controls import trials_for

POISONS = (float("nan"), 777.0)


class NumericsValidator(Validator):
    """Runs every case twice (those of a single NaN once), with other poisons in the outputs and at other addresses, and demands:

    - every output within the error budget of the fp64 reference (integers, copies and small-integer sums bit for bit);
    - both runs equal bit for bit: nothing unwritten, nothing left to chance, nothing depends on the address;
    - guard bands around every buffer intact, inputs and weights unchanged, zeroed workspaces zero again.
    """

    name = "numerics"
    version = 1

    def applies(self, trial: Trial) -> bool:
        """Every trial of a step."""
        return trial.kind == "step"

    def controls(self, backend: Backend) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
        """A correct kernel, and that kernel with each of its planted defects."""
        return trials_for(backend)

    def check(self, trial: Trial, run: TrialRun) -> Verdict:
        """Judge all cases of ``trial``."""
        checks: list[Check] = []
        for case in trial.cases:
            found, cause = self._case(case, run)
            checks.append(found)
            if found.outcome is Outcome.FAIL:
                message = f"{found.name}: {found.detail}"
                return Verdict(validator=self.name, outcome=Outcome.FAIL, checks=tuple(checks), cause=cause, message=message)
        if not checks:
            return Verdict(validator=self.name, outcome=Outcome.FAIL, cause=Cause.CONTRACT, message="the trial has no cases")
        return Verdict(validator=self.name, outcome=Outcome.PASS, checks=tuple(checks))

    def _case(self, case: Case, run: TrialRun) -> tuple[Check, Cause | None]:
        name = f"{case.family} seed {case.seed} position {case.position}{f' of {case.carrier}' if case.carrier else ''}"
        first = run.run(case, POISONS[-1 if case.carrier else 0])  # what is to be NaN must have been written
        damage = _damage(first)
        if damage:
            return Check(name=name, outcome=Outcome.FAIL, detail=damage), Cause.MEMORY_FAULT
        check = _compared(name, case, run, first)
        if check.outcome is Outcome.FAIL:
            return check, Cause.TOLERANCE
        if case.carrier:  # one run of these shows what they are for; that runs agree is shown by all others
            return check, None
        second = run.run(case, POISONS[1])
        damage = _damage(second)
        if damage:
            return Check(name=name, outcome=Outcome.FAIL, detail=damage), Cause.MEMORY_FAULT
        unequal = [operand for operand, tensor in first.outputs.items() if not same_bits(tensor, second.outputs[operand])]
        if unequal:
            detail = f"{', '.join(unequal)}: two runs on the same data differ (unwritten elements, a race, or the addresses)"
            return Check(name=name, outcome=Outcome.FAIL, detail=detail), Cause.TOLERANCE
        return check, None


def _damage(result: TrialResult) -> str:
    if result.guards_intact and result.inputs_unchanged and result.workspaces_restored:
        return ""
    return result.detail or "memory that may not be written was changed"


def _compared(name: str, case: Case, run: TrialRun, result: TrialResult) -> Check:
    expected = run.expected(case, result.inputs)
    actual = run.values(result.outputs)
    worst = Check(name=name, outcome=Outcome.PASS)
    for value, tensor in actual.items():
        if value not in expected:
            return Check(name=name, outcome=Outcome.FAIL, detail=f"{value} is written, but the reference does not define it")
        seen = compare(tensor, expected[value])
        detail = f"{value}: {seen.detail}" if seen.detail else worst.detail
        worst = Check(name=name, outcome=Outcome.PASS if seen.ok else Outcome.FAIL, detail=detail, max_abs=max(worst.max_abs, seen.max_abs),
                      max_rel=max(worst.max_rel, seen.max_rel), budget_use=max(worst.budget_use, seen.budget_use))
        if not seen.ok:
            return _finite(worst)
    return worst


def _finite(check: Check) -> Check:
    """Verdicts are stored as JSON, which has no infinities."""
    most = 1e308
    return Check(name=check.name, outcome=check.outcome, detail=check.detail, max_abs=min(check.max_abs, most),
                 max_rel=min(check.max_rel, most), budget_use=min(check.budget_use, most))
