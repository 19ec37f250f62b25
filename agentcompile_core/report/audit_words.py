"""What an audit says: the evidence for a decision in words, and the whole audit as a document and as text."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..errors import bounded
from ..ir.advice import AdviceRecord
from ..ir.record import Measurement, TuningRecord

SHOWN = 4  # rivals of a step that are listed one by one


def between(saves_us: float, nodes: int) -> str:
    """What a cover is worth."""
    return f"saves {saves_us:.2f} us, {nodes} nodes by validated steps" if saves_us else f"{nodes} nodes by validated steps"


def verdict_of(record: TuningRecord) -> str:
    """What became of one candidate."""
    if record.failure is not None:
        return f"refused, {record.failure.value}: {bounded(record.message, 200)}" if record.message else f"refused, {record.failure.value}"
    if record.verdict is None:
        return "not validated"
    if record.measurement is None:
        return f"{record.verdict.outcome.value} by {record.verdict.validator}, not measured"
    return f"{record.verdict.outcome.value} by {record.verdict.validator}, {record.measurement.us:.2f} us"


def evidence_of(mine: Iterable[TuningRecord], chosen: TuningRecord | None, baseline: Measurement | None) -> tuple[str, ...]:
    """The candidates of a match: the chosen one with its checks, the nearest rivals, the others by what became of them."""
    lines = [] if baseline is None else [f"framework: {baseline.us:.2f} us"]
    if chosen is not None:
        checks = chosen.verdict.checks if chosen.verdict else ()
        worst = max((c.budget_use for c in checks), default=0.0)
        lines.append(f"chosen: {chosen.step}: {verdict_of(chosen)}; {len(checks)} checks, at most {worst:.0%} of the error budget")
    rivals = sorted((r for r in mine if r is not chosen), key=lambda r: (r.measurement.us if r.measurement else float("inf"), r.order))
    lines += [f"{r.step}: {verdict_of(r)}" for r in rivals[:SHOWN]]
    rest = Counter(r.failure.value if r.failure else "passed" for r in rivals[SHOWN:])
    lines += [f"and {count} more {what}" for what, count in sorted(rest.items())]
    return tuple(lines)


def why_none(mine: tuple[TuningRecord, ...], baseline: Measurement | None) -> str:
    """Why no candidate of a match was taken, by the records."""
    if not mine:
        return "no candidate was evaluated"
    timed = [r.measurement.us for r in mine if r.usable and r.measurement is not None]
    if timed and baseline is None:
        return "the framework could not be timed"
    if timed and baseline is not None:
        return f"the best of its candidates takes {min(timed):.2f} us, the framework {baseline.us:.2f} us"
    failed = Counter(r.failure.value for r in mine if r.failure)
    return f"none of its {len(mine)} candidates passed ({', '.join(f'{n} {what}' for what, n in sorted(failed.items())) or 'unmeasured'})"


def advised(one: AdviceRecord) -> tuple[str, tuple[str, ...]]:
    """What an advisor's answer did, and every item of it that was refused."""
    if one.error:
        return f"{one.advisor}: no answer, the order is the planner's: {one.error}", ()
    accepted = one.accepted
    counts = {"label": int(accepted.label is not None), "implementations in order": len(accepted.order), "covers in order":
              len(accepted.cover_order), "hints": len(accepted.hints), "risks": len(accepted.risks), "diagnoses": len(accepted.diagnoses)}
    taken = ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "nothing"
    refused = tuple(f"refused by rule {item.rule}: {item.item}" for item in one.rejected)
    return f"{one.advisor}: accepted {taken}; refused {len(refused)} items", refused


def document(decisions: Iterable[Any]) -> dict[str, Any]:
    """An audit as plain types."""
    rows = [{"kind": d.kind, "subject": d.subject, "decision": d.decision, "evidence": list(d.evidence), "follows": d.follows,
             "problems": list(d.problems)} for d in decisions]
    return {"decisions": rows, "follow": sum(1 for row in rows if row["follows"]), "do_not_follow": sum(not row["follows"] for row in rows)}


def text(decisions: Iterable[Any]) -> str:
    """An audit for people: each decision, its evidence below it, and at the end how many follow."""
    lines = []
    for one in decisions:
        lines.append(f"{one.kind} {one.subject}: {one.decision}")
        lines += [f"    {line}" for line in one.evidence]
        lines += [f"    DOES NOT FOLLOW: {problem}" for problem in one.problems]
    found = document(decisions)
    total, bad = len(found["decisions"]), found["do_not_follow"]
    end = "each follows from the records" if not bad else f"{bad} do not follow from the records"
    return "\n".join([*lines, f"{total} decision{'s' * (total != 1)}, {end}"])
