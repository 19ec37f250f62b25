"""Every decision of a run, made again from the records in its folder: what could be chosen, on what evidence, and whether it follows.

The rules of selection stand here a second time, on purpose: an audit that calls the code it audits proves nothing. Nothing is
built, measured or lowered, and no plugin is asked.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve, field, frozen

from ..ir import ranges
from ..ir.baseline import FRAMEWORK
from ..ir.decisions import ChainLog, Decisions, RegionChoices
from ..ir.plan import Cover, Step
from ..ir.record import Measurement, TuningRecord
from ..ir.selection import Basis, SelectedStep, Selection
from ..ir.verdict import Outcome
from . import audit_chain
from .audit_words import advised, between, evidence_of, why_none


@frozen(kw_only=True)
class Decision:
    """One decision made again. ``problems``: why it does not follow from the records; empty: it does."""

    kind: str  # step, region, chain, program or advice
    subject: str
    decision: str
    evidence: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def follows(self) -> bool:
        """Whether the records say the same."""
        return not self.problems


@frozen(kw_only=True)
class _Best:
    """What the records say of one match: its best record, what it costs beside the framework's time, and how it stands."""

    basis: Basis = Basis.FALLBACK
    record: TuningRecord | None = None
    place: int = -1
    baseline: Measurement | None = None
    costs_us: float = 0.0
    framework_us: float = 0.0
    mine: tuple[TuningRecord, ...] = field(default=(), repr=False)


def audit(selections: Iterable[Selection], records: tuple[TuningRecord, ...], decisions: Decisions,
          programs: Mapping[str, Any]) -> tuple[Decision, ...]:
    """Every decision of a run: advice, then regions with their steps, then what the programs run."""
    selections = tuple(selections)
    chosen = ranges.selected_from(selections, 0)
    found = [_advice(one) for one in decisions.advice]
    for region in decisions.regions:
        mine = [(r, p) for r, p in zip(records, decisions.places) if r.signature == region.signature]
        selection = chosen.get(region.signature)
        if selection is None:
            found.append(Decision(kind="region", subject=region.region, decision="none", problems=("the run selected nothing for it",)))
            continue
        best = _by_parts({match: _best(match, mine, decisions, selection.basis) for match, _ in region.matches}, region)
        if decisions.chain is not None:
            alone = _by_parts({match: _best(match, mine, decisions, Basis.CHAIN) for match, _ in region.matches}, region)
            found.append(_chain(region, selection, decisions.chain, alone, decisions))
        found.append(_region(region, selection, best, decisions))
        found += [_step(region, step, best, decisions) for step in selection.steps]
        found += [_refused(region, match, best[match]) for match in _left_out(region, selection)]
        later = [x for s in selections if s.start and s.signature == region.signature for x in s.steps]
        held = {x.step for x in selection.steps}
        found += [_step(region, x, {x.step.match_id: _best(x.step.match_id, mine, decisions, Basis.CHAIN)}, decisions)
                  for x in later if x.step not in held]
    if len(decisions.places) != len(records):
        found.append(Decision(kind="records", subject="records.json", decision=f"{len(records)} records",
                              problems=(f"decisions.json places {len(decisions.places)} of them",)))
    found += [_range(region, selections, log, decisions) for log in decisions.ranges for region in decisions.regions]
    found += [_unasked(s) for s in selections if s.start and s.start not in {log.start for log in decisions.ranges}]
    found += [_missing(selections, start, programs) for start in ranges.starts_of(selections) if start]
    return (*found, *(_program(name, program, ranges.selected_from(selections, getattr(program, "start", 0)))
                      for name, program in sorted(programs.items())))


def _missing(selections: tuple[Selection, ...], start: int, programs: Mapping[str, Any]) -> Decision:
    """Whether a program runs what is selected from a later position on, all of it."""
    wanted = {x.step for s in ranges.selected_from(selections, start).values() for x in s.steps}
    run = [{s.step for s in p.segments if s.step is not None} for p in programs.values() if getattr(p, "start", 0) == start]
    lacking = sorted(str(step) for step in wanted - run[0]) if run else []
    problems = [f"it does not run {step}, which was selected" for step in lacking] if run else ["there is no such program"]
    return Decision(kind="program", subject=f"that from position {start} on", decision=f"{len(wanted)} steps of its selections",
                    problems=tuple(problems))


def _range(region: RegionChoices, selections: tuple[Selection, ...], log: ChainLog, decisions: Decisions) -> Decision:
    """What the captured chain made of one region at later positions: it began with what holds before them, and its trials do the rest."""
    own = _of_region(log, region.signature)
    replay = audit_chain.replayed(own, decisions.margin)
    before, after = (_held(selections, region.signature, position) for position in (log.start - 1, log.start))
    began = {step.match_id: step for _, step in own.started}
    covers = [set(cover.matches) for cover in region.covers]
    problems = [*([] if any(set(after) <= cover for cover in covers) else ["its steps are in no cover of the region"]),
                *audit_chain.differences(before, began, f"from position {log.start} on the chain began with another step for"),
                *replay.problems, *audit_chain.differences(replay.held.get(region.signature, {}), after, "selected for"),
                *audit_chain.misplaced(log)]
    return Decision(kind="chain", subject=f"{region.region} from position {log.start} on", decision=f"{len(after)} steps",
                    evidence=audit_chain.evidence_of(own), problems=tuple(problems))


def _held(selections: tuple[Selection, ...], signature: str, position: int) -> dict[str, Step]:
    selection = ranges.selected_from(selections, position).get(signature)
    return {} if selection is None else {x.step.match_id: x.step for x in selection.steps}


def _unasked(selection: Selection) -> Decision:
    subject = f"{selection.region} from position {selection.start} on"
    return Decision(kind="chain", subject=subject, decision=f"{len(selection.steps)} steps",
                    problems=("there is no log of a chain at these positions",))


def _of_region(log: ChainLog, signature: str) -> ChainLog:
    return evolve(log, started=tuple(s for s in log.started if s[0] == signature),
                  trials=tuple(t for t in log.trials if signature in t.signatures))


def _chain(region: RegionChoices, selection: Selection, log: ChainLog, alone: dict[str, _Best], decisions: Decisions) -> Decision:
    """What the captured chain made of one region: what it began with follows from the records, what it ended with from its trials."""
    def mine(steps: Iterable[tuple[str, Step]]) -> dict[str, Step]:
        return {step.match_id: step for signature, step in steps if signature == region.signature}

    own = _of_region(log, region.signature)
    replay = audit_chain.replayed(own, decisions.margin)
    covers, wanted = [c for c in region.covers if c.matches], {}
    if covers:
        cover = _best_cover(covers, alone, region, decisions)
        wanted = {m: record.step for m in cover.matches if (record := alone[m].record) is not None and alone[m].place >= 0}
    problems = [*audit_chain.differences(wanted, mine(log.started), "the chain began with another step for"), *replay.problems]
    steps = {s.step.match_id: s.step for s in selection.steps}
    if steps or not _was_slower(decisions):
        problems += audit_chain.differences(replay.held.get(region.signature, {}), steps, "selected for")
    return Decision(kind="chain", subject=region.region, decision=f"{len(steps)} steps", evidence=audit_chain.evidence_of(own),
                    problems=tuple(problems))


def _was_slower(decisions: Decisions) -> bool:
    """Whether the whole step was not faster with kernels, so that everything fell back."""
    ours, framework = decisions.step_us
    return bool(framework) and decisions.competes and ours * (1 + decisions.margin) >= framework


def _best_cover(covers: list[Cover], best: dict[str, _Best], region: RegionChoices, decisions: Decisions) -> Cover:
    turn = 1 if decisions.competes else -1  # where the framework does not compete, nodes count before microseconds
    return max(covers, key=lambda c: (*_worth(c, best, region, decisions.competes)[::turn], -c.rank))


def _by_parts(best: Mapping[str, _Best], region: RegionChoices) -> dict[str, _Best]:
    """The same with the framework's time of a match, added up from that of the smallest matches it is made of where some make it up.

    Views are nobody's work.
    """
    timed = {match: one.baseline.us for match, one in best.items() if one.baseline is not None}
    nodes = {match: set(names) - set(region.views) for match, names in region.matches if match in timed}
    parts: list[str] = []
    for match in sorted(nodes, key=lambda one: (len(nodes[one]), one)):
        if nodes[match] and not any(nodes[match] & nodes[part] for part in parts):
            parts.append(match)
    told = dict(best)
    for match, names in nodes.items():
        inside = [part for part in parts if nodes[part] <= names]
        made_up = bool(names) and set().union(*(nodes[part] for part in inside)) == names
        us = sum(timed[part] for part in inside) if made_up else timed[match]
        told[match] = evolve(best[match], framework_us=us if names else 0.0)
    return told


def _best(match: str, mine: list[tuple[TuningRecord, int]], decisions: Decisions, basis: Basis) -> _Best:
    of_match = [(r, p) for r, p in mine if r.step.match_id == match]
    tried = [(r, p) for r, p in of_match if r.step.implementation != FRAMEWORK]
    baseline = next((r.measurement for r, _ in of_match if r.step.implementation == FRAMEWORK), None)
    known = {"baseline": baseline, "mine": tuple(r for r, _ in tried)}
    timed = [(r.measurement.us, r.order, i) for i, (r, _) in enumerate(tried) if r.usable and r.measurement is not None]
    if timed:
        record, place = tried[min(timed)[2]]
        barred = baseline is None or not (basis is Basis.CHAIN or _is_faster(record, baseline, decisions.margin))
        if barred and decisions.competes:
            return _Best(**known)  # type: ignore[arg-type]
        assert record.measurement is not None
        weight = 1.0 + (min(decisions.margin, 0.0) if basis is not Basis.CHAIN and decisions.competes else 0.0)
        return _Best(basis=Basis.MEASURED, record=record, place=place, costs_us=record.measurement.us * weight, **known)  # type: ignore[arg-type]
    passed = [(p if p >= 0 else len(decisions.places), i) for i, (r, p) in enumerate(tried)
              if r.failure is None and r.verdict is not None and r.verdict.outcome is Outcome.PROVISIONAL]
    if passed:
        record, place = tried[min(passed)[1]]
        return _Best(basis=Basis.PROVISIONAL, record=record, place=place, **known)  # type: ignore[arg-type]
    return _Best(**known)  # type: ignore[arg-type]


def _is_faster(record: TuningRecord, baseline: Measurement, margin: float) -> bool:
    assert record.measurement is not None
    return (record.measurement.us + record.measurement.spread_us) * (1.0 + margin) < baseline.us - baseline.spread_us


def _region(region: RegionChoices, selection: Selection, best: dict[str, _Best], decisions: Decisions) -> Decision:
    steps = {step.step.match_id for step in selection.steps}
    taken = ", ".join(sorted(steps)) or "the framework's operators"
    count = sum(len(b.mine) for b in best.values())
    evidence = [f"{len(region.covers)} covers, {len(region.matches)} matches, {count} candidates evaluated"]
    evidence += [f"cover {c.rank} ({c.fusion.value}): {between(*_worth(c, best, region))}" for c in region.covers[:3]]
    ours, framework = decisions.step_us
    if ours:
        evidence.append(f"the whole step takes {ours:.1f} us with kernels and {framework:.1f} us on the framework")
    decision = f"{selection.cover.fusion.value} fusion, {selection.basis.value}: {taken}"
    return Decision(kind="region", subject=region.region, decision=decision, evidence=tuple(evidence),
                    problems=tuple(_cover_problems(region, selection, best, decisions)))


def _cover_problems(region: RegionChoices, selection: Selection, best: dict[str, _Best], decisions: Decisions) -> list[str]:
    steps = {step.step.match_id for step in selection.steps}
    covers = [c for c in region.covers if c.matches]
    ours, slower = decisions.step_us[0], _was_slower(decisions)
    if not steps and ours and slower:
        return []  # the whole step was slower
    if selection.basis is Basis.CHAIN:
        found = [] if any(steps <= set(c.matches) for c in covers) else ["its steps are in no cover of the region"]
        found += ["it is said to be the chain's, of which there is no log"] if decisions.chain is None else []
        return found + (["the whole step was not faster with it"] if slower else [])
    if not covers:
        return ["steps were selected where the planner found no cover"] if steps else []
    cover = _best_cover(covers, best, region, decisions)
    wanted = {m for m in cover.matches if best[m].record is not None and best[m].place >= 0}
    if steps == wanted or (not steps and ours):
        return []
    return [f"by the records cover {cover.rank} is best, with {', '.join(sorted(wanted)) or 'no step'}"]


def _worth(cover: Cover, best: dict[str, _Best], region: RegionChoices, competes: bool = True) -> tuple[float, int]:
    """What a cover saves of the framework's time, which is the least that covers of the same nodes are told, and how many nodes it has.

    Where the framework does not ``compete`` its time is not counted.
    """
    nodes = dict(region.matches)

    def framework(one: Cover) -> tuple[set[str], float]:
        timed = [m for m in one.matches if m in best and best[m].basis is Basis.MEASURED and best[m].baseline is not None]
        return {name for m in timed for name in nodes[m]} - set(region.views), sum(best[m].framework_us for m in timed)

    covered = framework(cover)[0]
    us = min(us for names, us in map(framework, region.covers) if names == covered) if competes else 0.0
    taken = [m for m in cover.matches if m in best and best[m].record is not None]
    return us - sum(best[m].costs_us for m in taken), sum(len(nodes[m]) for m in taken)


def _step(region: RegionChoices, step: SelectedStep, best: dict[str, _Best], decisions: Decisions) -> Decision:
    known = best.get(step.step.match_id, _Best())
    record = next((r for r in known.mine if r.step == step.step), None)
    return Decision(kind="step", subject=f"{step.step.match_id} of {region.region}",
                    decision=f"{step.step}, {step.basis.value}: {step.reason}", evidence=evidence_of(known.mine, record, known.baseline),
                    problems=tuple(_step_problems(step, record, known, decisions)))


def _step_problems(step: SelectedStep, record: TuningRecord | None, known: _Best, decisions: Decisions) -> list[str]:
    if record is None:
        return ["no record of the run judged it"]
    problems = []
    if record.failure is not None or record.verdict is None or not record.verdict.passed:
        problems.append(f"its record says that it failed ({record.failure.value if record.failure else 'not validated'})")
    if step.source is not None and step.source.digest != record.source_digest:
        problems.append(f"its source {step.source.digest} is not the one that was judged, {record.source_digest}")
    if (step.measurement, step.baseline) != (record.measurement, known.baseline):
        problems.append("its times are not those of the records")
    provisional = record.verdict is not None and record.verdict.outcome is Outcome.PROVISIONAL
    if step.basis is not Basis.PROVISIONAL and (provisional or record.measurement is None):
        problems.append("it was never measured")
    if step.basis is Basis.PROVISIONAL and not provisional:
        problems.append("its verdict is not a provisional one")
    if step.basis is not Basis.CHAIN and known.record is not None and known.record.step != step.step:
        problems.append(f"by the records {known.record.step} is better")
    if step.basis is Basis.MEASURED and (known.record is None or (known.baseline is None and decisions.competes)):
        problems.append("by the records no candidate is faster than the framework beyond noise and margin")
    return problems


def _left_out(region: RegionChoices, selection: Selection) -> list[str]:
    """The matches that were asked about and not selected: those of the selected cover, or of the favourite where there is none."""
    steps = {step.step.match_id for step in selection.steps}
    named = [what for what, _ in selection.fallback_reasons if what in dict(region.matches)]
    return [match for match in named if match not in steps]


def _refused(region: RegionChoices, match: str, known: _Best) -> Decision:
    return Decision(kind="step", subject=f"{match} of {region.region}", decision=f"the framework: {why_none(known.mine, known.baseline)}",
                    evidence=evidence_of(known.mine, None, known.baseline))


def _advice(one: Any) -> Decision:
    decision, evidence = advised(one)
    return Decision(kind="advice", subject=f"round {one.round}, region {one.signature[:12]}", decision=decision, evidence=evidence)


def _program(name: str, program: Any, chosen: Mapping[str, Selection]) -> Decision:
    """A program runs the steps that were selected, and nothing else."""
    selected = {step.step for selection in chosen.values() for step in selection.steps}
    sources = {s.source.key for selection in chosen.values() for s in selection.steps if s.source is not None}
    segments = [s for s in program.segments if s.step is not None]
    problems = [f"it runs {s.step}, which was not selected" for s in segments if s.step not in selected]
    problems += [f"it launches the source {s.source}, which no selected step has" for s in segments if s.source and s.source not in sources]
    rest = len(program.segments) - len(segments)
    decision = f"{len(segments)} steps of {len({str(s.step) for s in segments})} kinds, {rest} segments of the framework"
    return Decision(kind="program", subject=name, decision=decision, problems=tuple(dict.fromkeys(problems)))
