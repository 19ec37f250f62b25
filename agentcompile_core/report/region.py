"""One region of a run: its covers, who serves which match with how many schedules at what risk, what was ruled out or refused, and why."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UsageError
from ..ir.decisions import RegionChoices
from ..ir.plan import Cover, RiskLevel
from ..ir.search_log import Tried
from ..stages.emit.evidence import Evidence
from .tables import table

LEVELS = tuple(RiskLevel)


def region_document(name: str, found: Evidence) -> dict[str, Any]:
    """What a run knows of the region called ``name`` (or whose signature begins so), as plain types.

    Raises:
        UsageError: there is no such region; the message names all.
    """
    regions = found.decisions.regions if found.decisions is not None else ()
    named = [r for r in regions if r.region == name] or [r for r in regions if name and r.signature.startswith(name)]
    region = named[0] if named else None
    if region is None:
        known = ", ".join(r.region for r in regions) or "none: the bundle holds no decisions"
        raise UsageError(f"no region {name!r} in this bundle; its regions: {known}")
    mine = [one for one in found.tried if one.signature == region.signature]
    matches = [_match(match, nodes, [one for one in mine if one.match == match]) for match, nodes in region.matches]
    levels = {match["match"]: match["risk"] for match in matches}
    return {"region": region.region, "signature": region.signature, "instances": region.instances,
            "covers": [_cover(cover, levels) for cover in region.covers], "matches": matches, "unserved": _unserved(region, mine)}


def _match(match: str, nodes: Iterable[str], tried: list[Tried]) -> dict[str, Any]:
    served = [one for one in tried if one.space]
    lowest = min((one.risk.level for one in served), key=LEVELS.index, default=None)
    return {"match": match, "nodes": list(nodes), "risk": lowest.value if lowest else "", "served": [_served(one) for one in served],
            "refused": [{"implementation": one.implementation, "reason": one.refused or one.broken} for one in tried if not one.space]}


def _served(one: Tried) -> dict[str, Any]:
    return {"implementation": one.implementation, "version": one.version, "schedules": one.space, "evaluated": one.evaluated,
            "passed": one.passed, "risk": one.risk.level.value, "risk_reason": one.risk.reason, "ruled_out": dict(one.ruled_out),
            "untried": dict(one.untried)}


def _cover(cover: Cover, levels: Mapping[str, str]) -> dict[str, Any]:
    """A cover is as risky as its riskiest match, each by whoever serves it at the lowest risk."""
    found = [RiskLevel(levels[match]) for match in cover.matches if levels.get(match)]
    return {"rank": cover.rank, "fusion": cover.fusion.value, "matches": list(cover.matches),
            "risk": max(found, key=LEVELS.index, default=RiskLevel.LOW).value}


def _unserved(region: RegionChoices, mine: Iterable[Tried]) -> int:
    served = {one.match for one in mine if one.space}
    return sum(match not in served for match, _ in region.matches)


def region_text(document: Mapping[str, Any]) -> str:
    """The document for people: covers as a table, then each match."""
    parts = [f"region {document['region']} ({document['signature'][:12]}), {document['instances']} instances, "
             f"{len(document['matches'])} matches, {document['unserved']} of them served by nobody"]
    rows = [(c["rank"], c["fusion"], len(c["matches"]), c["risk"], ", ".join(c["matches"]) or "-") for c in document["covers"]]
    parts.append(table(rows, ("cover", "fusion", "steps", "risk", "matches")))
    parts += ["\n".join(_lines(match)) for match in document["matches"]]
    return "\n\n".join(parts)


def _lines(match: Mapping[str, Any]) -> list[str]:
    lines = [f"{match['match']} ({', '.join(match['nodes'])})"]
    for one in match["served"]:
        risk = f"{one['risk']} risk" + (f" ({one['risk_reason']})" if one["risk_reason"] else "")
        lines.append(f"  {one['implementation']}: {one['schedules']} schedules, {one['evaluated']} evaluated, {one['passed']} passed; "
                     f"best guess: {risk}")
        lines += [f"    ruled out: {count}: {reason}" for reason, count in one["ruled_out"].items()]
        lines += [f"    not tried: {count}: {reason}" for reason, count in one["untried"].items()]
    kind = match["match"].partition(":")[0]
    others = [one for one in match["refused"] if one["reason"].endswith(f"not {kind}")]  # as families say that they serve another kind
    lines += [f"  {one['implementation']} refused it: {one['reason']}" for one in match["refused"] if one not in others]
    return [*lines, f"  {len(others)} others serve other kinds"] if others else lines
