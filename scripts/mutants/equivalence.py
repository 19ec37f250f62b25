"""Mutants that are right: machine code that did not change, or a written proof and 10,000 random cases that agree bit for bit."""

import hashlib
import multiprocessing
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from attrs import evolve, frozen

from agentcompile_core.ir import serial
from agentcompile_core.plugin_api import StepSource

from .differences import differences
from .judging import EQUIVALENT, NO_EFFECT, Asked, Cache, Finding, judges_digest
from .planning import Mutant
from .subjects import subjects

PROOFS = Path(__file__).with_name("proofs.toml")
CASES = 10_000
PART = 1000  # cases between two looks at the cache: what an interrupted run loses


def proofs() -> dict[str, str]:
    """Why a mutant is right, by its id."""
    return {name: str(entry["why"]) for name, entry in tomllib.loads(PROOFS.read_text(encoding="utf-8")).items()}


@frozen
class Part:
    """Some random cases of one subject, on which all of its mutants run behind the original."""

    subject: str
    sources: tuple[StepSource, ...]
    numbers: range

    @property
    def key(self) -> str:
        """Digest of what the answer depends on."""
        text = f"{[serial.dumps(source) for source in self.sources]} {self.subject} {self.numbers} {judges_digest()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def seen(self) -> dict[str, list[str]]:
        """The first difference of each source; empty where there is none."""
        return {"seen": differences(subjects()[self.subject], self.sources, self.numbers)}


def proven(findings: Sequence[Finding], mutants: Sequence[Mutant], cached: Cache, asked: Asked, cases: int = CASES,
           say: Callable[[str], None] = lambda text: None) -> list[Finding]:
    """The findings, with every mutant of no effect that has a proof and agrees on ``cases`` random cases called equivalent.

    Each is compared on one subject, the smallest of those on which it has no effect; all of a subject share its cases.
    """
    written = proofs()
    waiting: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.outcome == NO_EFFECT and finding.id in written:
            waiting[min(finding.no_effect_on, key=_size)].append(finding)
    by_id = {mutant.id: mutant for mutant in mutants}
    parts = [Part(name, tuple(by_id[finding.id].source(subjects()[name]) for finding in waiting[name]), numbers)
             for name in sorted(waiting, key=_size, reverse=True) for numbers in _parts(cases)]
    first = _first_differences(parts, cached, asked.processes, say)
    done = {finding.id: evolve(finding, subject=name, message=seen, outcome=finding.outcome if seen else EQUIVALENT,
                               proof=written[finding.id], cases=cases)
            for name, own in waiting.items() for finding, seen in zip(own, first[name], strict=True)}
    return [done.get(finding.id, finding) for finding in findings]


def _first_differences(parts: Sequence[Part], cached: Cache, processes: int, say: Callable[[str], None]) -> dict[str, list[str]]:
    """The first difference of every source, by subject, over all of its parts; in processes of one thread each."""
    found: dict[str, list[str]] = {}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[str, Future[dict[str, list[str]]]] = {
            part.key: pool.submit(part.seen) for part in parts if cached.get(part.key) is None}
        for part in parts:
            seen = cached.of(part.key, lambda: running[part.key].result())["seen"]  # noqa: B023 (called at once)
            before = found.setdefault(part.subject, [""] * len(seen))
            found[part.subject] = [one or other for one, other in zip(before, seen, strict=True)]
            say(f"random cases {part.numbers.start} to {part.numbers.stop - 1} on {part.subject}: {len(seen)} mutants, "
                f"{sum(map(bool, seen))} differ")
    return found


def _parts(cases: int) -> Iterator[range]:
    return (range(start, min(start + PART, cases)) for start in range(0, cases, PART))


def _size(name: str) -> int:
    """Work of one run: bytes of the operands, and threads."""
    subject = subjects()[name]
    threads = sum(launch.grid[0] * launch.grid[1] * launch.block[0] for launch in subject.source.launches)
    return sum(operand.spec.nbytes for operand in subject.match.operands) + 64 * threads
