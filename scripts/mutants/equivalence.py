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

from .differences import beyond_budget, differences
from .judging import ELIGIBLE, EQUIVALENT, KILLED, NO_EFFECT, OTHER_BITS, WITHIN, Asked, Cache, Finding, judges_digest
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
    """Some random cases of one subject, on which all of its mutants run. ``bits``: they must agree with the original, bit for
    bit; else they must stay within the error budget."""

    subject: str
    bits: bool
    sources: tuple[StepSource, ...]
    numbers: range

    @property
    def key(self) -> str:
        """Digest of what the answer depends on."""
        text = f"{[serial.dumps(source) for source in self.sources]} {self.subject} {self.bits} {self.numbers} {judges_digest()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def seen(self) -> dict[str, list[str]]:
        """What the first case shows that speaks against each source; empty where none does."""
        look = differences if self.bits else beyond_budget
        return {"seen": look(subjects()[self.subject], self.sources, self.numbers)}


def proven(findings: Sequence[Finding], mutants: Sequence[Mutant], cached: Cache, asked: Asked, cases: int = CASES,
           say: Callable[[str], None] = lambda text: None) -> list[Finding]:
    """The findings after ``cases`` random cases of every mutant that may be right.

    One of no effect that has a proof is equivalent if every bit agrees, on the smallest subject on which it has none. One that
    rounds otherwise on a subject must stay within the error budget there: else it is eligible and wrong, whatever other subjects
    say of it. If nothing refuses it, it is right where it has a proof. All mutants of a subject share its cases.
    """
    written, by_id = proofs(), {mutant.id: mutant for mutant in mutants}
    waiting: dict[tuple[str, bool], list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.other_bits_on and finding.outcome in (OTHER_BITS, KILLED):
            waiting[min(finding.other_bits_on, key=_size), False].append(finding)
        elif finding.outcome == NO_EFFECT and finding.id in written:
            waiting[min(finding.no_effect_on, key=_size), True].append(finding)
    parts = [Part(name, bits, tuple(by_id[finding.id].source(subjects()[name]) for finding in own), numbers)
             for (name, bits), own in waiting.items() for numbers in _parts(cases)]
    first = _first_seen(parts, cached, asked.processes, say)
    done = {finding.id: _concluded(finding, name, seen, written.get(finding.id, ""), cases)
            for (name, bits), own in waiting.items() for finding, seen in zip(own, first[name, bits], strict=True)}
    return [done.get(finding.id, finding) for finding in findings]


def _concluded(finding: Finding, subject: str, seen: str, proof: str, cases: int) -> Finding:
    if seen:
        return evolve(finding, subject=subject, message=seen, outcome=ELIGIBLE if finding.other_bits_on else NO_EFFECT)
    if finding.outcome == KILLED or not proof:
        return evolve(finding, cases=cases)
    return evolve(finding, subject=subject, proof=proof, cases=cases, outcome=WITHIN if finding.other_bits_on else EQUIVALENT)


def _first_seen(parts: Sequence[Part], cached: Cache, processes: int, say: Callable[[str], None]) -> dict[tuple[str, bool], list[str]]:
    """What was first seen of every source, by subject and way to look, over all of its parts; in processes of one thread each."""
    found: dict[tuple[str, bool], list[str]] = {}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[str, Future[dict[str, list[str]]]] = {
            part.key: pool.submit(part.seen) for part in parts if cached.get(part.key) is None}
        for part in parts:
            seen = cached.of(part.key, lambda: running[part.key].result())["seen"]  # noqa: B023 (called at once)
            before = found.setdefault((part.subject, part.bits), [""] * len(seen))
            found[part.subject, part.bits] = [one or other for one, other in zip(before, seen, strict=True)]
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
