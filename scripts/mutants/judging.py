"""Judges mutants as candidates are judged: in worker processes, by every validator, each with a deadline of its own."""

import hashlib
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from agentcompile_core.ir import serial
from agentcompile_core.plugin_api import BuildError, Cause, Kernel, StepSource
from agentcompile_core.worker import Job, Worker

from .differences import beyond_budget, differences
from .machine_code import MachineCode
from .planning import Mutant, order_of
from .subjects import BACKEND, Subject, load

ROOT = Path(__file__).resolve().parents[2]
JUDGES = ("agentcompile_core", "plugins/validators", "plugins/rules", "plugins/templates_cuda/kit")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # of a worker: as many workers run as there are processors
DEADLINES_S = {"build": 150.0, "check": 60.0}  # a check of an unmutated kernel takes 2 to 10 s
KILLED, NOT_COMPILING, ELIGIBLE = "killed", "not compiling", "eligible"
SAME_CODE, EQUIVALENT = "identical machine code", "equivalent"
WITHIN = "within the budget"  # rounds otherwise: other bits, and no error that the contract does not allow
NO_EFFECT = "no effect"  # on any subject, and no proof yet: as good as eligible
OTHER_BITS = "other bits"  # but within the budget, and no proof yet: as good as eligible
VALIDATORS = ("numerics", "emulation")  # a winner has passed both
SPOT_CASES = 40
MESSAGE = 240  # characters kept
_FOLDER = re.compile(r"/\S*/agentcompile-private-\w+/")  # where it was compiled


@frozen(kw_only=True)
class Finding:
    """What became of a mutant: by whom it was refused on which subject, and why."""

    id: str
    file: str
    line: int
    operator: str
    group: str
    before: str
    after: str
    subject: str = ""  # empty: none was tried
    outcome: str = ""
    by: str = ""  # the validator that refused it; "execution": it ended before one could
    cause: str = ""
    message: str = ""
    same_code_on: tuple[str, ...] = ()  # subjects whose machine code it leaves as it is
    no_effect_on: tuple[str, ...] = ()  # subjects whose results it leaves as they are, bit for bit
    other_bits_on: tuple[str, ...] = ()  # subjects whose results it leaves within the error budget, with other bits
    proof: str = ""  # why it is right everywhere
    cases: int = 0  # random cases that agreed bit for bit, or stayed within the budget


class Cache:
    """Evaluations by everything that they depend on, one small file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> dict[str, Any] | None:
        """What was stored under ``key``; None if nothing was, or nothing that can be read."""
        try:
            return json.loads((self._folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def of(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was stored under ``key``, made and stored if there is nothing."""
        known = self.get(key)
        if known is None:
            known = make()
            self.put(key, known)
        return known

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Store ``value``."""
        path = self._folder / f"{key}.json"
        made = path.with_suffix(f".{threading.get_ident()}")
        made.write_text(json.dumps(value), encoding="utf-8")
        made.replace(path)


@cache
def judges_digest() -> str:
    """SHA-256 over the Python and C++ text of everything that takes part in judging."""
    digest = hashlib.sha256()
    for folder in JUDGES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp") and "tests" not in path.parts:
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@frozen(kw_only=True)
class Asked:
    """How mutants are judged. ``trust_kills``: what an earlier version of the checks refused is not judged again."""

    seed: int = 1
    processes: int = 2
    trust_kills: bool = False


def judged(mutants: Sequence[Mutant], asked: Asked, cached: Cache,
           report: Callable[[Finding], None] = lambda finding: None) -> list[Finding]:
    """Judge every mutant; findings come in the order of ``mutants``."""
    waiting: queue.SimpleQueue[tuple[int, Mutant] | None] = queue.SimpleQueue()
    for entry in (*enumerate(mutants), *[None] * asked.processes):
        waiting.put(entry)
    found: dict[int, Finding] = {}
    os.environ.update(ONE_THREAD)
    code = MachineCode()

    def serve() -> None:
        with Worker(deadlines_s=DEADLINES_S, builders=1, environment=tuple(ONE_THREAD)) as worker:
            judge = Judge(worker, cached, code, asked)
            while (entry := waiting.get()) is not None:
                found[entry[0]] = judge.finding(entry[1])
                report(found[entry[0]])

    with ThreadPoolExecutor(asked.processes) as pool:
        for done in [pool.submit(serve) for _ in range(asked.processes)]:
            done.result()
    return [found[number] for number in sorted(found)]


class Judge:
    """Judges one mutant after the other with a worker of its own."""

    def __init__(self, worker: Worker, cached: Cache, code: MachineCode, asked: "Asked") -> None:
        self._worker, self._cached, self._code = worker, cached, code
        self._seed, self._trust_kills = asked.seed, asked.trust_kills
        self._backend = load().find("agentcompile_backends", BACKEND)
        self._binaries: dict[str, str] = {}

    def finding(self, mutant: Mutant) -> Finding:
        """Judge ``mutant`` on one subject after the other until it is refused, or shown to be wrong and eligible.

        Where a subject's launch never runs into the mistake, the mutant is right there: its machine code is the same, or every
        bit that it writes. Where it rounds otherwise, it is right as long as it stays within the error budget. Such subjects are
        named, and the next one is tried.
        """
        finding = Finding(**{name: getattr(mutant, name) for name in ("id", "file", "line", "operator", "group", "before", "after")})
        order = order_of(mutant, self._seed)
        for subject in order:
            finding = self._on(subject, mutant.source(subject), evolve(finding, subject=subject.name))
            if finding.outcome:
                return finding
        outcome = OTHER_BITS if finding.other_bits_on else NO_EFFECT if finding.no_effect_on else SAME_CODE
        return evolve(finding, subject="", outcome=outcome)

    def _on(self, subject: Subject, source: StepSource, finding: Finding) -> Finding:
        """Judge on one subject; without an outcome where the mutant is right there."""
        original = self._original(subject)
        try:
            kernel = self._backend.build(source, subject.target)
        except BuildError as exc:
            return evolve(finding, outcome=NOT_COMPILING, message=_FOLDER.sub("", str(exc))[:MESSAGE])
        for name in VALIDATORS if kernel.sha256 != original else ():
            verdict = self._verdict(subject.job(source, (name,)), kernel, self._trust_kills)
            if verdict["cause"]:
                outcome = NOT_COMPILING if verdict["cause"] == "compile" else KILLED
                return evolve(finding, outcome=outcome, by=verdict["by"] or name, cause=verdict["cause"], message=verdict["message"])
        if self._machine_code(source, subject) is None:
            return evolve(finding, outcome=NOT_COMPILING)
        if self._same_code(source, subject):
            return evolve(finding, same_code_on=(*finding.same_code_on, subject.name))
        if kernel.sha256 == original or not self._spotted(differences, subject, source):
            return evolve(finding, no_effect_on=(*finding.no_effect_on, subject.name))
        seen = self._spotted(beyond_budget, subject, source)
        if seen:
            return evolve(finding, outcome=ELIGIBLE, message=seen)
        return evolve(finding, other_bits_on=(*finding.other_bits_on, subject.name))

    def _original(self, subject: Subject) -> str:
        """The binary's digest of the subject's own kernel.

        Raises:
            RuntimeError: the checks refuse even that, so what they say of its mutants means nothing.
        """
        if subject.name not in self._binaries:
            kernel = self._backend.build(subject.source, subject.target)
            asked = [subject.job(subject.source, (name,)) for name in VALIDATORS]
            refused = [found for job in asked if (found := self._verdict(job, kernel, trust_kills=False))["cause"]]
            if refused:
                raise RuntimeError(f"the unmutated kernel of {subject.name} is refused: {refused[0]['message']}")
            self._binaries[subject.name] = kernel.sha256
        return self._binaries[subject.name]

    def _verdict(self, job: Job, kernel: Kernel, trust_kills: bool) -> dict[str, Any]:
        text = serial.dumps(job)
        key = hashlib.sha256(f"{text} {judges_digest()}".encode()).hexdigest()
        kill = hashlib.sha256(f"{serial.dumps(evolve(job.trial, cases=()))} {job.validators}".encode()).hexdigest()
        earlier = self._cached.get(f"kill-{kill}") if trust_kills else None
        if earlier is not None:
            return earlier

        def ask() -> dict[str, Any]:
            ((_, evaluation),) = self._worker.evaluate([evolve(job, kernel=kernel)])
            by = next((v.validator for v in evaluation.verdicts if not v.passed), "" if evaluation.failure is None else "execution")
            cause = evaluation.failure.value if evaluation.failure else ""
            if evaluation.failure is Cause.UNAVAILABLE:  # of the worker, or of a validator that fails its own controls: no verdict
                raise RuntimeError(f"{job.trial.source.digest} was not judged: {evaluation.message}")
            return {"cause": cause, "by": by, "message": evaluation.message[:MESSAGE] if cause else ""}

        found = self._cached.of(key, ask)
        if found["cause"]:
            self._cached.put(f"kill-{kill}", found)
        return found

    def _same_code(self, source: StepSource, subject: Subject) -> bool:
        return self._machine_code(source, subject) == self._code.original(subject.name, subject.source, subject.target)

    def _machine_code(self, source: StepSource, subject: Subject) -> dict[str, Any] | None:
        key = hashlib.sha256(f"{serial.dumps(source)} {self._code.library}".encode()).hexdigest()
        return self._cached.of(key, lambda: {"code": self._code.of(source, subject.target)})["code"]

    def _spotted(self, look: Callable[[Subject, list[StepSource], range], list[str]], subject: Subject, source: StepSource) -> str:
        key = hashlib.sha256(f"{look.__name__} {serial.dumps(subject.job(source))} {SPOT_CASES} {judges_digest()}".encode()).hexdigest()
        return self._cached.of(key, lambda: {"seen": look(subject, [source], range(SPOT_CASES))[0]})["seen"]
