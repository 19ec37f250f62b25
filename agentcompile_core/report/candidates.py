"""What became of candidates, for explain: how many were evaluated and passed, who refused the others and why, what was selected instead,
and what was not tried."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import one_line
from ..ir.plan import Origin
from ..ir.record import TuningRecord
from ..ir.search_log import Tried
from ..ir.selection import SelectedStep, Selection
from .tables import table

SAID = 160  # characters of a reason that are shown


def candidates_document(records: Iterable[TuningRecord], selections: Iterable[Selection] = ()) -> list[dict[str, Any]]:
    """What was evaluated per region, match and implementation: how many, how many passed, the fastest, the failures by class, by whom and
    why they were refused (the first of each), and what became of the implementation there."""
    groups: dict[tuple[str, str, str], list[TuningRecord]] = {}
    for record in (r for r in records if r.step.origin is not Origin.FRAMEWORK):
        groups.setdefault((record.signature, record.step.match_id, record.step.implementation), []).append(record)
    chosen = _chosen(selections)
    found = []
    for (signature, match_id, implementation), group in groups.items():
        times = [r.measurement.us for r in group if r.usable and r.measurement]
        failures = Counter(r.failure.value for r in group if r.failure)
        passed = sum(1 for r in group if r.passed)
        found.append({"signature": signature, "match": match_id, "implementation": implementation, "evaluated": len(group),
                      "passed": passed, "best_us": min(times) if times else None, "failures": dict(failures), "refused": _refused(group),
                      "outcome": _outcome(implementation, passed, chosen.get((signature, match_id), ()))})
    return found


def _chosen(selections: Iterable[Selection]) -> Mapping[tuple[str, str], Sequence[SelectedStep]]:
    """Selected steps by region and match, those of the first positions first."""
    found: dict[tuple[str, str], list[SelectedStep]] = {}
    for selection in sorted(selections, key=lambda s: s.start):
        for step in selection.steps:
            found.setdefault((selection.signature, step.step.match_id), []).append(step)
    return found


def _outcome(implementation: str, passed: int, chosen: Sequence[SelectedStep]) -> str:
    if any(step.step.implementation == implementation for step in chosen):
        return "selected"
    if not passed:
        return "none passed"
    if not chosen:
        return "its match is in no cover that was selected"
    first = chosen[0]
    took = f", {first.measurement.us:.2f} us" if first.measurement else ""
    return f"{first.step.implementation} was selected{took}"


def _refused(group: Iterable[TuningRecord]) -> list[dict[str, Any]]:
    """By validator (or what else refused it) and class of failure: how many, and what was said of the first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record in (r for r in group if r.failure):
        judge = record.verdict.validator if record.verdict is not None and not record.verdict.passed else ""
        assert record.failure is not None
        key = (judge, record.failure.value)
        found.setdefault(key, {"by": judge, "cause": record.failure.value, "count": 0, "message": one_line(record.message, SAID)})
        found[key]["count"] += 1
    return list(found.values())


def candidates_text(records: Iterable[TuningRecord], selections: Iterable[Selection] = ()) -> str:
    """The table behind candidates_document, and below it why candidates were refused."""
    found = candidates_document(records, selections)
    if not found:
        return "no candidates were evaluated"
    rows = [(c["match"], c["implementation"], c["evaluated"], c["passed"], f"{c['best_us']:.2f}" if c["best_us"] else "-",
             ", ".join(f"{n} {k}" for k, n in c["failures"].items()), c["outcome"]) for c in found]
    lines = [f"  {c['implementation']} on {c['match']}: {r['count']} refused{' by ' + r['by'] if r['by'] else ''}, {r['cause']}"
             + (f": {r['message']}" if r["message"] else "") for c in found for r in c["refused"]]
    return "\n".join([table(rows, ("match", "implementation", "evaluated", "passed", "best us", "failures", "outcome")), *lines])


def untried_text(tried: Iterable[Tried]) -> str:
    """What was not tried and why: schedules per implementation and reason, then who refused matches, then whose plugin failed. Who serves
    another kind is counted, not listed."""
    schedules: dict[tuple[str, str], list[int]] = {}
    refused: Counter[tuple[str, str]] = Counter()
    others: set[str] = set()
    for one in tried:
        for reason, count in one.untried:
            schedules.setdefault((one.implementation, reason), []).append(count)
        if one.refused.endswith(f"not {one.match.partition(':')[0]}"):  # as families say that they serve another kind
            others.add(one.implementation)
        elif one.refused:
            refused[one.implementation, "it refused them: " + one.refused] += 1
        if one.broken:
            refused[one.implementation, "its plugin failed: " + one.broken] += 1
    lines = [f"  {name}: {sum(counts)} schedules of {len(counts)} matches: {reason}"
             for (name, reason), counts in sorted(schedules.items())]
    lines += [f"  {name}: {count} matches: {reason}" for (name, reason), count in sorted(refused.items())]
    if not lines:
        lines.append("  everything in the space was tried")
    return "\n".join([*lines, *([f"  {len(others)} implementations serve other kinds than some matches are of"] if others else [])])
