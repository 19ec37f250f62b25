"""The test that every template family passes: subclass, say what to try, run pytest.

    class TestMine(TemplateFamilyConformance):
        family = MyFamily()
        cases = (gather_case(columns=64, vocabulary=100),)
        rejected = (gather_case(columns=7, vocabulary=100),)

Three tiers: static (needs nothing), compile (needs a backend that can build), run (needs a backend that can launch: the
emulator, or a GPU; kernels run in a child process and are judged by the validators of a compilation). A tier that this
machine cannot serve is skipped with the reason.
"""

import atexit
from collections.abc import Iterator, Sequence
from functools import cache
from typing import ClassVar

import pytest
from attrs import evolve

from ..configuration import defaults
from ..errors import BuildError, ContractError, Reject
from ..ir import serial
from ..ir.candidate import StepSource
from ..ir.graph import Graph
from ..ir.plan import Origin, Schedule, ScheduleSpace, Step
from ..ir.region import Match
from ..ir.source_check import check_source
from ..ir.target import Target
from ..ir.verdict import Trial
from ..plugin.catalog import Catalog
from ..plugin.discovery import load_catalog
from ..plugin.interfaces import Backend, TemplateFamily
from ..stages.plan import unfit
from ..stages.validate.input_cases import cases_for
from ..worker import Evaluation, Job, Worker
from .demands import SHORTEST_REASON, demand_identity, sampled, space_of
from .demands import demand as _demand

UNKNOWN_KIND = "no_such_kind"


class TemplateFamilyConformance:
    """Subclass as ``class Test...``: ``family``, ``cases`` it serves, cases ``rejected`` by it (a rule's package makes them).

    ``samples`` schedules of each case are built and run: the best guess, the last, and some between them.
    """

    family: ClassVar[TemplateFamily]
    cases: ClassVar[Sequence[tuple[Match, Graph]]]
    rejected: ClassVar[Sequence[tuple[Match, Graph]]] = ()
    targets: ClassVar[Sequence[Target]] = ()  # empty: the installed one of the family's language that is preferred
    samples: ClassVar[int] = 3

    # ---- static

    def test_identity(self) -> None:
        """It is a TemplateFamily with a name and a version, and there is something to try it on."""
        demand_identity(self.family, TemplateFamily)
        _demand(len(self.cases) > 0, "cases is empty; give at least one match that the family serves")

    def test_accepts_and_explains(self) -> None:
        """It answers True for its cases, and a Reject with a reason for the others and for kinds it has never heard of."""
        for match, _ in self.cases:
            for target in self._targets():
                answer = self.family.accepts(match, target)
                _demand(answer is True, f"{match.id} on {target.name}: accepts() returned {answer!r}, expected True")
        strange = evolve(self.cases[0][0], kind=UNKNOWN_KIND)
        for match in (*(match for match, _ in self.rejected), strange):
            for target in self._targets():
                answer = self.family.accepts(match, target)
                _demand(isinstance(answer, Reject), f"{match.id} on {target.name}: accepts() returned {answer!r}, expected a Reject")
                reason = getattr(answer, "reason", "")
                _demand(len(reason) >= SHORTEST_REASON, f"{match.id}: the reason {reason!r} says too little; name what is served")

    def test_space_is_bounded_and_repeatable(self) -> None:
        """Every space has 1 to 256 different points inside its own parameters, in the same order each time it is asked for."""
        for match, target in self._pairs():
            first, second = (self._space(match, target) for _ in range(2))
            _demand(first == second, f"{match.id}: space() gave another answer the second time; it must depend on its arguments alone")

    def test_lowering_is_pure_and_fits_the_target(self) -> None:
        """Every point lowers twice to equal source, whose arguments fit the match and whose launches fit the target."""
        texts: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {}
        for match, target in self._pairs():
            for schedule in self._space(match, target).points:
                where = f"{match.id} [{schedule}]"
                source = self._source(match, schedule, target)
                again = self.family.lower(match, schedule, target)
                _demand(source == again, f"{where}: lower() gave another source the second time; it must depend on its arguments alone")
                _demand(serial.loads(serial.dumps(source), StepSource) == source, f"{where}: the source changes when it is stored as JSON")
                missing = [launch.entry for launch in source.launches if launch.entry not in source.code]
                _demand(not missing, f"{where}: the code has no entry called {', '.join(missing)}")
                text = (source.code, source.headers)
                _demand(texts.setdefault(source.digest, text) == text, f"{where}: the digest {source.digest} names another text as well")

    # ---- compile

    def test_sampled_schedules_build(self) -> None:
        """Every sampled schedule compiles without register spills."""
        for match, target in self._pairs():
            for schedule in self._sampled(match, target):
                source = self._source(match, schedule, target)
                backend = _builder(source, target)
                try:
                    kernel = backend.build(source, target)
                except BuildError as exc:
                    raise AssertionError(f"{match.id} [{schedule}] does not build with {backend.name} for {target.arch}:\n{exc}") from exc
                spilled = kernel.resources.spill_bytes
                _demand(not spilled, f"{match.id} [{schedule}] spills {spilled} bytes of registers on {target.arch}; use fewer per thread")

    # ---- run

    def test_emulated_results(self) -> None:
        """Results are right under emulation: error budget, bounds, races, poison, guard bands, untouched inputs."""
        self._run(emulated=True)

    def test_device_results(self) -> None:
        """Results are right on the hardware of this machine."""
        self._run(emulated=False)

    def _run(self, emulated: bool) -> None:
        backend = _launcher(self.family.language, emulated)
        live = backend.live_target()
        jobs = []
        for match, graph in self.cases:
            for target in (live,) if live else self._targets()[:1]:
                for schedule in self._sampled(match, target):
                    jobs.append(self._job(match, graph, schedule, target, backend))
        jobs = [job for job in jobs if not _lacking(job.trial.source, backend)]
        if not jobs:
            pytest.skip(f"{backend.name} lacks the device features that every sampled schedule uses")
        for judge in reversed(jobs[0].validators):  # the backend's own first: it says what a kernel did that others only see die
            for index, evaluation in _worker().evaluate([evolve(job, validators=(judge,)) for job in jobs]):
                step = jobs[index].step
                _demand(evaluation.failure is None, f"{step.match_id} [{step.schedule}] on {backend.name}: {_story(evaluation)}")

    def _job(self, match: Match, graph: Graph, schedule: Schedule, target: Target, backend: Backend) -> Job:
        kind = _catalog().kinds.get(match.kind)
        _demand(kind is not None, f"{match.id}: no installed region rule offers the kind {match.kind}; install the rule that does")
        assert kind is not None
        source = self._source(match, schedule, target)
        cases = cases_for(match, kind, self.family.name, emulated=backend.emulated, source=source, schedule=schedule)
        trial = Trial(match=match, graph=graph, source=source, target=target, cases=cases)
        step = Step(match_id=match.id, implementation=f"conformance/{self.family.name}", origin=Origin.GENERATED, schedule=schedule)
        return Job(trial=trial, step=step, backend=backend.name, validators=_validators(backend), time=False)

    # ---- what the family says, checked on the way

    def _targets(self) -> Sequence[Target]:
        if self.targets:
            return self.targets
        fitting = [t for t in _catalog().targets.values() if unfit(self.family, t) is None]
        if not fitting:
            pytest.skip(f"no installed target runs {self.family.language}; install a backend for it, or name targets in this class")
        return (max(fitting, key=lambda t: t.preference),)

    def _pairs(self) -> Iterator[tuple[Match, Target]]:
        for match, _ in self.cases:
            for target in self._targets():
                yield match, target

    def _space(self, match: Match, target: Target) -> ScheduleSpace:
        return space_of(self.family, match, target)

    def _source(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        source = self.family.lower(match, schedule, target)
        _demand(isinstance(source, StepSource), f"{match.id}: lower() returned {type(source).__name__}, not StepSource")
        try:
            check_source(match, source, target)
            own = _catalog().backend_of(target)
            if own is not None:
                own.check(source, target)
        except ContractError as exc:
            raise AssertionError(f"{match.id} [{schedule}]: {exc}") from exc
        return source

    def _sampled(self, match: Match, target: Target) -> tuple[Schedule, ...]:
        return sampled(self._space(match, target), self.samples)


def _story(evaluation: Evaluation) -> str:
    failed = [check.name for verdict in evaluation.verdicts for check in verdict.checks if check.outcome.value == "fail"]
    cause = evaluation.failure.value if evaluation.failure else "none"
    return f"{cause}{' in case ' + failed[0] if failed else ''}: {evaluation.message}"


@cache
def _catalog() -> Catalog:
    return load_catalog(strict=False)


@cache
def _worker() -> Worker:
    worker = Worker()
    atexit.register(worker.close)
    return worker


def _builder(source: StepSource, target: Target) -> Backend:
    """The backend that compiles for real hardware, else the emulator; skips the test if neither can build the source."""
    reasons = []
    for backend in sorted(_catalog().backends.values(), key=lambda b: (b.emulated, b.name)):
        lacking = _lacking(source, backend)
        answer = Reject(f"has no {lacking}") if lacking else backend.can_build(target)
        if answer is True:
            return backend
        reasons.append(f"{backend.name}: {answer.reason}")
    pytest.skip(f"no installed backend builds this for {target.arch} ({'; '.join(reasons) or 'none is installed'})")


def _lacking(source: StepSource, backend: Backend) -> str:
    """What ``source`` needs and ``backend`` does not have: its language, device features."""
    languages = () if source.language in backend.languages else (source.language,)
    return ", ".join((*languages, *(f for f in source.features if f not in backend.features)))


def _launcher(language: str, emulated: bool) -> Backend:
    reasons = []
    for backend in _catalog().backends.values():
        if backend.emulated == emulated and language in backend.languages:
            answer = backend.available()
            if answer is True:
                return backend
            reasons.append(f"{backend.name}: {answer.reason}")
    what = f"emulates {language} kernels" if emulated else f"runs {language} kernels on hardware"
    pytest.skip(f"no backend that {what} works here ({'; '.join(reasons) or 'none is installed'})")


def _validators(backend: Backend) -> tuple[str, ...]:
    """The default validators, and the one that has the name of the backend, such as the emulator's own; skips without the first."""
    names = {validator.name for validator in _catalog().validators.values()}
    missing = [name for name in defaults.VALIDATORS if name not in names]
    if missing:
        pytest.skip(f"nothing can judge results: install the validator {missing[0]}")
    return (*defaults.VALIDATORS, *([backend.name] if backend.name in names else []))
