"""Mutants that are right: machine code that did not change, or a written proof and 10,000 random cases that agree bit for bit."""

import hashlib
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import evolve

from agentcompile_core.ir import serial

from .differences import differences
from .judging import EQUIVALENT, NO_EFFECT, Cache, Finding, judges_digest
from .planning import Mutant
from .subjects import subjects

PROOFS = Path(__file__).with_name("proofs.toml")
CASES = 10_000


def proofs() -> dict[str, str]:
    """Why a mutant is right, by its id."""
    return {name: str(entry["why"]) for name, entry in tomllib.loads(PROOFS.read_text(encoding="utf-8")).items()}


def proven(findings: Sequence[Finding], mutants: Sequence[Mutant], cached: Cache, cases: int = CASES,
           say: Callable[[str], None] = lambda text: None) -> list[Finding]:
    """The findings, with every mutant of no effect that has a proof and agrees on ``cases`` random cases called equivalent.

    Each is compared on one subject, the smallest of those on which it has no effect; all of a subject share its cases.
    """
    written, by_id = proofs(), {mutant.id: mutant for mutant in mutants}
    waiting: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.no_effect_on and finding.outcome == NO_EFFECT and finding.id in written:
            waiting[min(finding.no_effect_on, key=_size)].append(finding)
    done: dict[str, Finding] = {}
    for name in sorted(waiting, key=_size):
        subject = subjects()[name]
        sources = [by_id[finding.id].source(subject) for finding in waiting[name]]
        key = hashlib.sha256(f"{[serial.dumps(source) for source in sources]} {cases} {judges_digest()}".encode()).hexdigest()
        say(f"{cases} random cases on {name}: {len(sources)} mutants")
        seen = cached.of(key, lambda: {"seen": differences(subject, sources, cases)})["seen"]  # noqa: B023 (called at once)
        for finding, difference in zip(waiting[name], seen, strict=True):
            done[finding.id] = evolve(finding, subject=name, message=difference, outcome=finding.outcome if difference else EQUIVALENT,
                                      proof=written[finding.id], cases=cases)
    return [done.get(finding.id, finding) for finding in findings]


def _size(name: str) -> int:
    """Work of one run: bytes of the operands, and threads."""
    subject = subjects()[name]
    threads = sum(launch.grid[0] * launch.grid[1] * launch.block[0] for launch in subject.source.launches)
    return sum(operand.spec.nbytes for operand in subject.match.operands) + 64 * threads
