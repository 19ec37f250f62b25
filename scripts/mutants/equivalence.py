"""Mutants that are right: machine code that did not change, or a written proof and 10,000 random cases that agree bit for bit."""

import hashlib
import multiprocessing
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
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
    say of it. If nothing refuses it, it is right where it has a proof. One that seemed to have no effect and writes other bits in
    some cases is one that rounds otherwise; the cases around these are tried again. All mutants of a subject share its cases.
    """
    by_id, written = {mutant.id: mutant for mutant in mutants}, proofs()
    done = {finding.id: finding for finding in findings}

    def try_all(waiting: dict[tuple[str, bool], list[Finding]], numbers: Callable[[str], list[range]]) -> dict[Part, list[str]]:
        parts = [Part(name, bits, tuple(by_id[one.id].source(subjects()[name]) for one in own), some)
                 for (name, bits), own in waiting.items() for some in numbers(name)]
        seen = _seen(parts, cached, asked.processes, say)
        for (name, bits), own in waiting.items():
            for index, one in enumerate(own):
                shown = (found[index] for part, found in seen.items() if (part.subject, part.bits) == (name, bits))
                first = next(filter(None, shown), "")
                done[one.id] = _concluded(one, name, first, written.get(one.id, ""), cases)
        return seen

    seen = try_all(_waiting(findings, written.keys()), lambda name: _parts(cases))
    doubtful = [evolve(one, outcome=OTHER_BITS, other_bits_on=(one.subject,), message="")
                for one in done.values() if one.outcome == NO_EFFECT and one.message]
    where = {(part.subject, part.numbers) for part, found in seen.items() if part.bits and any(found)}
    try_all(_waiting(doubtful, written.keys()), lambda name: [some for some in _parts(cases) if (name, some) in where])
    return [done[finding.id] for finding in findings]


def _waiting(findings: Iterable[Finding], having_proofs: Collection[str]) -> dict[tuple[str, bool], list[Finding]]:
    """What random cases are to be run, by subject and whether bits must agree."""
    waiting: dict[tuple[str, bool], list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.other_bits_on and finding.outcome in (OTHER_BITS, KILLED):
            waiting[min(finding.other_bits_on, key=_size), False].append(finding)
        elif finding.outcome == NO_EFFECT and finding.id in having_proofs:
            waiting[min(finding.no_effect_on, key=_size), True].append(finding)
    return waiting


def _concluded(finding: Finding, subject: str, seen: str, proof: str, cases: int) -> Finding:
    if seen:
        return evolve(finding, subject=subject, message=seen, outcome=ELIGIBLE if finding.other_bits_on else NO_EFFECT)
    if finding.outcome == KILLED or not proof:
        return evolve(finding, cases=cases)
    return evolve(finding, subject=subject, proof=proof, cases=cases, outcome=WITHIN if finding.other_bits_on else EQUIVALENT)


def _seen(parts: Sequence[Part], cached: Cache, processes: int, say: Callable[[str], None]) -> dict[Part, list[str]]:
    """What was first seen of every source in each part; in processes of one thread each."""
    found: dict[Part, list[str]] = {}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[str, Future[dict[str, list[str]]]] = {
            part.key: pool.submit(part.seen) for part in parts if cached.get(part.key) is None}
        for part in parts:
            found[part] = cached.of(part.key, lambda: running[part.key].result())["seen"]  # noqa: B023 (called at once)
            say(f"random cases {part.numbers.start} to {part.numbers.stop - 1} on {part.subject}: {len(found[part])} mutants, "
                f"{sum(map(bool, found[part]))} differ")
    return found


def _parts(cases: int) -> list[range]:
    return [range(start, min(start + PART, cases)) for start in range(0, cases, PART)]


def _size(name: str) -> int:
    """Work of one run: bytes of the operands, and threads."""
    subject = subjects()[name]
    threads = sum(launch.grid[0] * launch.grid[1] * launch.block[0] for launch in subject.source.launches)
    return sum(operand.spec.nbytes for operand in subject.match.operands) + 64 * threads
