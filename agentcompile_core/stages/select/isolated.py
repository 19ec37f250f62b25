"""Selection by isolated timings: the cover and the steps that save most time by evidence.

The time of a match on the framework (its baseline) is measured like a step's, and told by its parts
(``ir.framework_time``), so that the savings of disjoint matches add up and covers can be compared by their sum. Pure: equal records
give equal selections.
"""

import enum
from collections.abc import Mapping

from attrs import evolve, frozen

from ...context import Context
from ...errors import bounded
from ...ir.baseline import FRAMEWORK
from ...ir.candidate import CALLABLE, StepSource
from ...ir.evaluated import Evaluated
from ...ir.framework_time import Nodes, by_parts, levelled, working_nodes
from ...ir.plan import Cover, Fusion, RegionPlan
from ...ir.record import Measurement, TuningRecord
from ...ir.region import Region
from ...ir.selection import Basis, SelectedStep, Selection, fallback
from ...ir.verdict import Outcome
from ...plugin.catalog import Catalog
from ...runtime.sources import version_of

MOST_RUNNERS_UP, MOST_IN_ALL, LEAST_SHARE = 3, 6, 0.05  # a trial of the chain each
NEARLY_US = 4.0  # in one instance: what covers may differ by alone, and be told apart only by what launches cost beside each other


class Taken(enum.Enum):
    """Which of the timed steps are taken."""

    FASTER = "faster"  # those that beat the framework beyond noise and margin
    BEST = "best"  # the best of every match, whatever the framework takes: what the chain starts from


@frozen(kw_only=True)
class _Choice:
    """The best that is known for one match: a record, or the reason why there is none."""

    match_id: str
    record: TuningRecord | None = None
    baseline: Measurement | None = None
    basis: Basis = Basis.FALLBACK
    costs_us: float = 0.0  # of the record; what a margin below 0 lets pass counts as less
    reason: str = ""


def best_alone(plans: tuple[RegionPlan, ...], found: Evaluated, ctx: Context, taken: Taken) -> tuple[Selection, ...]:
    """One selection per region."""
    by_signature: dict[str, list[TuningRecord]] = {}
    for record in found.records:
        by_signature.setdefault(record.signature, []).append(record)
    return tuple(_region(plan, by_signature.get(plan.signature, []), found, ctx, taken) for plan in plans)


def runners_up(plans: tuple[RegionPlan, ...], selections: tuple[Selection, ...], found: Evaluated, ctx: Context) -> tuple[Selection, ...]:
    """Other covers than those of ``selections`` (as ``best_alone`` gave them), of which every match has a step: up to ``MOST_RUNNERS_UP``
    of each region, which save nearly as much by isolated timings, and ``MOST_IN_ALL``; those of regions that take most time first, the
    best of each first. None of a region that takes less than ``LEAST_SHARE`` of it.
    """
    chosen = {s.signature: s for s in selections}
    us = {plan.signature: chosen[plan.signature].region_us * len(plan.region.instances) for plan in plans}
    made: list[Selection] = []
    for plan in sorted(plans, key=lambda plan: -us[plan.signature]):
        best = chosen[plan.signature]
        if best.steps and us[plan.signature] >= LEAST_SHARE * sum(us.values()):
            records = [record for record in found.records if record.signature == plan.signature]
            made += _nearly_as_good(plan, best, records, found, ctx)
    return tuple(made[:MOST_IN_ALL])


def _nearly_as_good(plan: RegionPlan, best: Selection, records: list[TuningRecord], found: Evaluated, ctx: Context) -> list[Selection]:
    region, competes = plan.region, ctx.config.framework_competes
    choices = {match.id: _choose(match.id, records, found, None, competes) for match in region.matches}
    covers = [cover for cover in plan.space.covers if cover.matches]
    worth = _worth(covers, choices, _told_us(records, region) if competes else {}, region)
    held, nodes = next(cover for cover in covers if cover.rank == best.cover.rank), working_nodes(region)
    seen, made = {frozenset(s.step.match_id for s in best.steps)}, list[Selection]()
    for cover in sorted(covers, key=lambda c: (-worth[c][0], c.rank)):
        lost_us = worth[held][0] - worth[cover][0]
        left = not competes and bool(_working(best.cover, nodes) - _working(cover, nodes))
        if frozenset(cover.matches) in seen or lost_us > NEARLY_US or left:
            continue
        steps = [_selected(choices[match], region, found, ctx.catalog) for match in cover.matches]
        whole = tuple(step for step in steps if isinstance(step, SelectedStep) and step.basis is Basis.MEASURED)
        if len(whole) == len(steps):
            seen.add(frozenset(cover.matches))
            made.append(_selection(region, cover, whole, ()))
    return made[:MOST_RUNNERS_UP]


def _working(cover: Cover, nodes: Nodes) -> frozenset[str]:
    return frozenset[str]().union(*(nodes[match] for match in cover.matches))


def _region(plan: RegionPlan, records: list[TuningRecord], found: Evaluated, ctx: Context, taken: Taken) -> Selection:
    region = plan.region
    competes = ctx.config.framework_competes
    margin = ctx.config.margin if taken is Taken.FASTER and competes else None
    choices = {match.id: _choose(match.id, records, found, margin, competes) for match in region.matches}
    wanted = [cover for cover in plan.space.covers if cover.matches]
    if not wanted:
        return fallback(region.signature, region.name, "the planner found no cover with a kernel")
    worth = _worth(wanted, choices, _told_us(records, region) if competes else {}, region)
    cover = max(wanted, key=lambda c: (worth[c] if competes else worth[c][::-1], -c.rank))
    steps, reasons = [], []
    for match_id in cover.matches:
        choice = choices[match_id]
        step = _selected(choice, region, found, ctx.catalog)
        if isinstance(step, str):
            reasons.append((match_id, step))
        else:
            steps.append(step)
    if not steps:
        return evolve(fallback(region.signature, region.name, "no kernel was validated and faster"), fallback_reasons=tuple(reasons))
    return _selection(region, cover, tuple(steps), tuple(reasons))


def _told_us(records: list[TuningRecord], region: Region) -> dict[str, float]:
    """The framework's time of every match that was measured, chosen or not, as its parts tell it."""
    measured_us: dict[str, float] = {}
    for record in records:
        match = record.step.match_id
        if record.step.implementation == FRAMEWORK and record.measurement is not None and match in region.match_by_id:
            measured_us.setdefault(match, record.measurement.us)
    return by_parts(measured_us, working_nodes(region))


def _worth(covers: list[Cover], choices: Mapping[str, _Choice], told_us: Mapping[str, float],
           region: Region) -> dict[Cover, tuple[float, float]]:
    """Of every cover the microseconds saved, then nodes covered by validated steps, which decides where nothing was timed.

    Where the framework does not compete nothing is told of its time, and it is read the other way round: the framework then takes only
    what nothing else can.
    """
    taken = {match: choice for match, choice in choices.items() if choice.record is not None}
    told_us = {match: us for match, us in told_us.items() if match in taken and taken[match].baseline is not None}
    framework_us = levelled([cover.matches for cover in covers], told_us, working_nodes(region))
    worth = {}
    for cover, us in zip(covers, framework_us, strict=True):
        mine = [taken[match] for match in cover.matches if match in taken]
        nodes = float(sum(len(region.match_by_id[choice.match_id].nodes) for choice in mine))
        worth[cover] = us - sum(choice.costs_us for choice in mine), nodes
    return worth


def _choose(match_id: str, records: list[TuningRecord], found: Evaluated, margin: float | None, competes: bool) -> _Choice:
    mine = [r for r in records if r.step.match_id == match_id and r.step.implementation != FRAMEWORK]
    baseline = next((r.measurement for r in records if r.step.match_id == match_id and r.step.implementation == FRAMEWORK), None)
    if not mine:
        return _Choice(match_id=match_id, reason="no candidate was evaluated (out of budget, or nothing could judge it)")
    timed = sorted((r for r in mine if r.usable), key=lambda r: (r.measurement.us, r.order))  # type: ignore[union-attr]
    if timed:
        return _by_time(match_id, timed[0], baseline, margin) if competes else _without_rival(match_id, timed[0], baseline)
    passed = [r for r in mine if r.verdict is not None and r.verdict.outcome is Outcome.PROVISIONAL and r.failure is None]
    if passed:
        first = min(passed, key=found.place)  # as on an empty cache, where nothing behind the first that passes is tried
        return _Choice(match_id=match_id, record=first, basis=Basis.PROVISIONAL,
                       reason=f"validated but not measured ({first.message or 'no clock'}); never used on a GPU before it is")
    return _Choice(match_id=match_id, reason=_why_all_failed(mine))


def _by_time(match_id: str, best: TuningRecord, baseline: Measurement | None, margin: float | None) -> _Choice:
    # Without a margin the framework is no bar: what lost to it alone is taken all the same.
    assert best.measurement is not None
    us = best.measurement.us
    if baseline is None:
        return _Choice(match_id=match_id, reason=f"the framework could not be timed, so {us:.2f} us cannot be called faster")
    low = baseline.us - baseline.spread_us
    barred = margin is not None and margin > -1.0  # -1 takes everything, also where the noise is larger than the framework's time
    if barred and (us + best.measurement.spread_us) * (1.0 + (margin or 0.0)) >= low:
        return _Choice(match_id=match_id, baseline=baseline,
                       reason=f"its best kernel takes {us:.2f} us, the framework {baseline.us:.2f} us: not faster beyond noise and margin")
    costs_us = us * (1.0 + min(margin or 0.0, 0.0))  # what a margin below 0 lets pass costs its cover nothing
    share = f"{best.measurement.share_of_floor:.0%} of the memory roofline{_outside_registers(best)}"
    return _Choice(match_id=match_id, record=best, baseline=baseline, basis=Basis.MEASURED, costs_us=costs_us,
                   reason=f"{us:.2f} us against {baseline.us:.2f} us of the framework, {share}")


def _without_rival(match_id: str, best: TuningRecord, baseline: Measurement | None) -> _Choice:
    """The fastest that is allowed, where the framework's operators are not."""
    assert best.measurement is not None
    us = best.measurement.us
    against = f", the framework {baseline.us:.2f} us" if baseline is not None else ""
    return _Choice(match_id=match_id, record=best, baseline=baseline, basis=Basis.MEASURED,
                   costs_us=us,
                   reason=f"{us:.2f} us{against}, which is not among the allowed origins")


def _outside_registers(record: TuningRecord) -> str:
    used = record.resources
    spilled = f", {used.spill_bytes} bytes spilled per thread" if used.spill_bytes else ""
    return f"{spilled}, {used.local_bytes} bytes of local memory per thread" if used.local_bytes else spilled


def _why_all_failed(records: list[TuningRecord]) -> str:
    causes: dict[str, int] = {}
    for record in records:
        name = record.failure.value if record.failure else "unmeasured"
        causes[name] = causes.get(name, 0) + 1
    counted = ", ".join(f"{count} {name}" for name, count in sorted(causes.items()))
    example = next((r.message for r in records if r.message), "")
    return f"all {len(records)} candidates failed ({counted}); for example: {bounded(example)}"


def _selected(choice: _Choice, region: Region, found: Evaluated, catalog: Catalog) -> SelectedStep | str:
    """The selected step of a choice, or why there is none."""
    if choice.record is None:
        return choice.reason
    source = found.source(choice.record)
    if source is None:
        return f"the source that was evaluated ({choice.record.source_digest}) is not what its best kernel lowers to in this run"
    step = step_of(choice.record, region, source, choice.baseline, catalog)
    return evolve(step, basis=choice.basis, reason=choice.reason)


def step_of(record: TuningRecord, region: Region, source: StepSource, baseline: Measurement | None, catalog: Catalog) -> SelectedStep:
    """A step with the evidence of its record, as one that the chain may judge."""
    match = region.match_by_id[record.step.match_id]
    checks = record.verdict.checks if record.verdict else ()
    return SelectedStep(
        step=record.step, label=match.label, nodes=match.nodes, source=None if source.language == CALLABLE else source,
        version=version_of(record.step, catalog), basis=Basis.CHAIN, measurement=record.measurement, baseline=baseline,
        max_abs=max((c.max_abs for c in checks), default=0.0), max_rel=max((c.max_rel for c in checks), default=0.0))


def _selection(region: Region, cover: Cover, steps: tuple[SelectedStep, ...], reasons: tuple[tuple[str, str], ...]) -> Selection:
    kept = {step.step.match_id for step in steps}
    inside = {node for step in steps for node in step.nodes}
    fusion = cover.fusion if len(kept) == len(cover.matches) else Fusion.PARTIAL
    matches = tuple(m for m in cover.matches if m in kept)
    bases = {step.basis for step in steps}
    basis = next(b for b in (Basis.PROVISIONAL, Basis.MEASURED, Basis.CHAIN) if b in bases)
    return Selection(
        signature=region.signature, region=region.name, cover=evolve(cover, matches=matches, fusion=fusion), steps=steps,
        fallback_reasons=(*reasons, *_outside(region, inside)), basis=basis,
        region_us=sum((s.measurement.us for s in steps if s.measurement), 0.0),
        baseline_us=sum((s.baseline.us for s in steps if s.baseline), 0.0))



def _outside(region: Region, inside: set[str]) -> tuple[tuple[str, str], ...]:
    """The nodes that no step has, in words, as a reason of a selection."""
    outside = [node.name for node in region.graph.nodes if node.name not in inside]
    if not outside:
        return ()
    names = ", ".join(outside[:6]) + (", ..." if len(outside) > 6 else "")
    return ((f"{len(outside)} nodes", f"on the framework: {names}"),)
