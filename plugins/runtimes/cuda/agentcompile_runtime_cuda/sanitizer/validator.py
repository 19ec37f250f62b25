"""The validator ``sanitizer``: winners at full size under memcheck, racecheck, initcheck and synccheck, each in a process of its own."""

from importlib import resources
from typing import Literal

from attrs import evolve

from agentcompile_core.plugin_api import (
    NO_TARGET,
    Access,
    Backend,
    Cause,
    Check,
    ContractError,
    DType,
    Feature,
    Kernel,
    Launch,
    Outcome,
    Reject,
    Role,
    StepSource,
    Target,
    Trial,
    TrialRun,
    Validator,
    Verdict,
    control_trials,
    pointer,
)

from .. import machine_code
from ..backend import CudaBackend
from . import reports, running

CAUSES = {"memcheck": Cause.MEMORY_FAULT, "racecheck": Cause.RACE, "initcheck": Cause.MEMORY_FAULT, "synccheck": Cause.RACE}
BULK = "bulk_control_b01kc0de"
BULK_COUNT = 128
MANY_BLOCKS = 1 << 18  # of the control: more hazards than racecheck keeps, so that it says so of a right kernel too


class SanitizerValidator(Validator):
    """Refuses what compute-sanitizer reports, on the first and the last case of a winner.

    It is asked where ``--sanitize`` is given. What a tool says of a kernel with bulk copies is a false alarm only if it says the
    same of the least kernel that fills a slot by bulk copies and is right, run in the same way; a race only if one side of it is
    such a copy in the machine code.
    """

    name = "sanitizer"
    version = 2
    scope = "winner"
    deadline_s = len(running.TOOLS) * running.TOOL_S + 120.0

    def __init__(self) -> None:
        self._alarms: dict[tuple[str, str, int], frozenset[str]] = {}

    def available(self) -> Literal[True] | Reject:
        """Whether compute-sanitizer and a CUDA device are here."""
        program, device = running.find(), CudaBackend().available()
        if isinstance(device, Reject):
            return Reject(f"--sanitize runs kernels on a GPU under {running.PROGRAM}, and there is none here: {device.reason}")
        return program if isinstance(program, Reject) else True

    def applies(self, trial: Trial) -> bool:
        """Every source in CUDA."""
        return trial.source.language == "cuda" and bool(trial.source.launches)

    def controls(self, backend: Backend) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
        """The standard addition, and the one that writes behind its output."""
        sources = [backend.control(defect) for defect in ("", "write behind the end")]
        found = [source for source in sources if source is not None and source.language == "cuda"]
        if len(found) != len(sources):
            raise ContractError(f"the backend {backend.name} offers no CUDA controls, so nothing shows that the sanitizer works on it")
        right, behind = control_trials(found, NO_TARGET)
        return (right,), (behind,)

    def check(self, trial: Trial, run: TrialRun) -> Verdict:
        """Ask every tool, until one refuses."""
        program = running.find()
        if isinstance(program, Reject):
            raise ContractError(program.reason)
        kernel = CudaBackend().build(trial.source, trial.target)
        inputs = [run.inputs(case, "cpu") for case in dict.fromkeys((trial.cases[0], trial.cases[-1]))]
        checks: list[Check] = []
        for tool in running.TOOLS:
            report = running.run(tool, trial, kernel, inputs, program)
            check = self._judged(tool, trial, kernel, report)
            checks.append(check)
            if check.outcome is Outcome.FAIL:
                cause = Cause.MISALIGNED if "misaligned" in check.detail.lower() else CAUSES[tool]
                return Verdict(validator=self.name, outcome=Outcome.FAIL, checks=tuple(checks), cause=cause,
                               message=f"{tool}: {check.detail}")
        return Verdict(validator=self.name, outcome=Outcome.PASS, checks=tuple(checks))

    def _judged(self, tool: str, trial: Trial, kernel: Kernel, report: reports.Report) -> Check:
        if not report.errors:
            return Check(name=tool, outcome=Outcome.PASS)
        if Feature.BULK_COPY not in trial.source.features:
            return judged(tool, report, frozenset(), frozenset())
        false = self._false_alarms(tool, trial.target)
        if any(finding.kind.startswith(reports.FULL) for finding in report.findings):
            false |= self._false_alarms(tool, trial.target, MANY_BLOCKS)
        return judged(tool, report, false, machine_code.bulk_copies(kernel.binary))

    def _false_alarms(self, tool: str, target: Target, blocks: int = 1) -> frozenset[str]:
        """The kinds of findings that the tool has about the bulk control, which is right. Asked once per tool and target."""
        key = (tool, target.arch, blocks)
        if key not in self._alarms:
            program = running.find()
            assert isinstance(program, running.Path)
            trial = bulk_control(target, blocks)
            import torch

            tensors = {name: torch.arange(float(BULK_COUNT)) for name in ("in0", "in1")}
            report = running.run(tool, trial, CudaBackend().build(trial.source, target), [tensors], program)
            self._alarms[key] = frozenset(finding.kind for finding in report.findings)
        return self._alarms[key]


def judged(tool: str, report: reports.Report, false_alarms: frozenset[str], bulk_copies: frozenset[tuple[str, int]]) -> Check:
    """The check of one tool's report, given what it reports of a right kernel too. Errors that no finding explains count."""
    real = [finding for finding in report.findings if not _is_false(finding, false_alarms, bulk_copies)]
    unseen = report.errors > len(report.findings) or len(report.findings) >= reports.MOST
    if report.findings and not real and not unseen:
        said = f"{len(report.findings)} false alarms, which the least right kernel with a bulk copy raises too: {report.findings[0].kind}"
        return Check(name=tool, outcome=Outcome.PASS, detail=said)
    first = str(real[0]) if real else "errors without a report"
    return Check(name=tool, outcome=Outcome.FAIL, detail=f"{report.errors} errors, the first one: {first}")


def _is_false(finding: reports.Finding, kinds: frozenset[str], bulk_copies: frozenset[tuple[str, int]]) -> bool:
    if not finding.accesses:
        return finding.kind in kinds
    first, *others = (access in bulk_copies for access in finding.accesses)
    return finding.kind in kinds and (first or (bool(others) and all(others)))


def bulk_control(target: Target, blocks: int = 1) -> Trial:
    """A trial of the bulk control: out = in0 + in1, 128 elements, in0 by way of bulk copies into one slot, the same in every block."""
    code = resources.files(__package__).joinpath("control.cu").read_text(encoding="utf-8")
    arguments = (pointer("in0", Role.INPUT, DType.F32), pointer("in1", Role.INPUT, DType.F32),
                 pointer("out", Role.OUTPUT, DType.F32, Access.WRITE))
    launch = Launch(entry=BULK, grid=(blocks, 1, 1), block=(64, 1, 1), arguments=arguments)
    source = StepSource(digest="b01kc0de", code=code, features=(Feature.BULK_COPY, Feature.MBARRIER), launches=(launch,))
    (made,) = control_trials((source,), target)
    operands = tuple(evolve(o, spec=evolve(o.spec, shape=(BULK_COUNT,))) for o in made.match.operands)
    return evolve(made, match=evolve(made.match, operands=operands))
