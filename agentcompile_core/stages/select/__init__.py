"""Stage select: the cover and the steps that save most time by evidence; what nothing beats stays on the framework.

The time of a match on the framework (its baseline) is measured like a step's, so that the savings of disjoint matches
add up and covers can be compared by their sum. Pure: equal records give equal selections.
"""

from collections.abc import Mapping

from attrs import evolve, frozen

from ...context import Context
from ...errors import bounded
from ...ir.baseline import FRAMEWORK
from ...ir.candidate import CALLABLE
from ...ir.plan import Cover, Fusion, PlanSpace, Step
from ...ir.record import Measurement, TuningRecord
from ...ir.region import Region
from ...ir.selection import Basis, SelectedStep, Selection, fallback
from ...ir.verdict import Outcome
from ...plugin.events import RegionSelected
from ...runtime.sources import source_of, version_of

Chain = Mapping[tuple[str, Step], float]  # (signature, step) -> us that the step saves inside the captured chain


@frozen(kw_only=True)
class _Choice:
    """The best that is known for one match: a record, or the reason why there is none."""

    match_id: str
    record: TuningRecord | None = None
    baseline: Measurement | None = None
    basis: Basis = Basis.FALLBACK
    saves_us: float = 0.0
    reason: str = ""


def run(regions: tuple[Region, ...], spaces: tuple[PlanSpace, ...], records: tuple[TuningRecord, ...], ctx: Context,
        chain: Chain | None = None) -> tuple[Selection, ...]:
    """Select a cover and its steps for every space (one per merged region).

    A measured step is taken if it beats its baseline by ``config.margin`` beyond both spreads. Where nothing could be
    timed, the first validated step in planner order is taken, as provisional. ``chain`` overrules isolated timings for
    the steps that it holds.
    """
    found = []
    by_signature: dict[str, list[TuningRecord]] = {}
    for record in records:
        by_signature.setdefault(record.signature, []).append(record)
    by_space = {region.signature: region for region in reversed(regions)}
    for space in spaces:
        region = by_space[space.signature]
        selection = _region(region, space, by_signature.get(region.signature, []), ctx, chain or {})
        ctx.emit(RegionSelected(region=region.name, signature=region.signature, basis=selection.basis.value,
                                steps=tuple(str(s.step) for s in selection.steps), us=selection.region_us,
                                baseline_us=selection.baseline_us))
        found.append(selection)
    return tuple(found)


def _region(region: Region, space: PlanSpace, records: list[TuningRecord], ctx: Context, chain: Chain) -> Selection:
    choices = {match.id: _choose(match.id, region.signature, records, ctx.config.margin, chain) for match in region.matches}
    wanted = [cover for cover in space.covers if cover.matches]
    if not wanted:
        return fallback(region.signature, region.name, "the planner found no cover with a kernel")
    cover = max(wanted, key=lambda c: (_worth(c, choices, region), -c.rank))
    steps, reasons = [], []
    for match_id in cover.matches:
        choice = choices[match_id]
        step = _selected(choice, region, ctx)
        if isinstance(step, str):
            reasons.append((match_id, step))
        else:
            steps.append(step)
    if not steps:
        return evolve(fallback(region.signature, region.name, "no kernel was validated and faster"), fallback_reasons=tuple(reasons))
    return _selection(region, cover, tuple(steps), tuple(reasons))


def _worth(cover: Cover, choices: Mapping[str, _Choice], region: Region) -> tuple[float, int]:
    """Microseconds saved; then nodes covered by validated steps, which decides where nothing was timed."""
    taken = [choices[m] for m in cover.matches if choices[m].record is not None]
    return sum(c.saves_us for c in taken), sum(len(region.match_by_id[c.match_id].nodes) for c in taken)


def _choose(match_id: str, signature: str, records: list[TuningRecord], margin: float, chain: Chain) -> _Choice:
    mine = [r for r in records if r.step.match_id == match_id and r.step.implementation != FRAMEWORK]
    baseline = next((r.measurement for r in records if r.step.match_id == match_id and r.step.implementation == FRAMEWORK), None)
    if not mine:
        return _Choice(match_id=match_id, reason="no candidate was evaluated (out of budget, or nothing could judge it)")
    judged = [r for r in mine if (signature, r.step) in chain and r.verdict is not None and r.verdict.passed]
    if judged:
        return _by_chain(match_id, signature, judged, baseline, chain)
    timed = sorted((r for r in mine if r.usable), key=lambda r: (r.measurement.us, r.order))  # type: ignore[union-attr]
    if timed:
        return _by_time(match_id, timed[0], baseline, margin)
    passed = [r for r in mine if r.verdict is not None and r.verdict.outcome is Outcome.PROVISIONAL and r.failure is None]
    if passed:
        first = min(passed, key=lambda r: r.order)
        return _Choice(match_id=match_id, record=first, basis=Basis.PROVISIONAL,
                       reason=f"validated but not measured ({first.message or 'no clock'}); never used on a GPU before it is")
    return _Choice(match_id=match_id, reason=_why_all_failed(mine))


def _by_chain(match_id: str, signature: str, judged: list[TuningRecord], baseline: Measurement | None, chain: Chain) -> _Choice:
    best = max(judged, key=lambda r: (chain[signature, r.step], -r.order))
    saves = chain[signature, best.step]
    if saves <= 0.0:
        return _Choice(match_id=match_id, baseline=baseline,
                       reason=f"inside the chain its best kernel loses {-saves:.2f} us against the framework")
    return _Choice(match_id=match_id, record=best, baseline=baseline, basis=Basis.CHAIN, saves_us=saves,
                   reason=f"saves {saves:.2f} us inside the captured chain; best of {len(judged)}")


def _by_time(match_id: str, best: TuningRecord, baseline: Measurement | None, margin: float) -> _Choice:
    assert best.measurement is not None
    us = best.measurement.us
    if baseline is None:
        return _Choice(match_id=match_id, reason=f"the framework could not be timed, so {us:.2f} us cannot be called faster")
    low = baseline.us - baseline.spread_us
    high = (us + best.measurement.spread_us) * (1.0 + margin)
    if high >= low:
        return _Choice(match_id=match_id, baseline=baseline,
                       reason=f"its best kernel takes {us:.2f} us, the framework {baseline.us:.2f} us: not faster beyond noise and margin")
    share = f"{best.measurement.share_of_floor:.0%} of the memory roofline"
    return _Choice(match_id=match_id, record=best, baseline=baseline, basis=Basis.MEASURED, saves_us=baseline.us - us,
                   reason=f"{us:.2f} us against {baseline.us:.2f} us of the framework, {share}")


def _why_all_failed(records: list[TuningRecord]) -> str:
    causes: dict[str, int] = {}
    for record in records:
        name = record.failure.value if record.failure else "unmeasured"
        causes[name] = causes.get(name, 0) + 1
    counted = ", ".join(f"{count} {name}" for name, count in sorted(causes.items()))
    example = next((r.message for r in records if r.message), "")
    return f"all {len(records)} candidates failed ({counted}); for example: {bounded(example)}"


def _selected(choice: _Choice, region: Region, ctx: Context) -> SelectedStep | str:
    """The selected step of a choice, or why there is none."""
    record = choice.record
    if record is None:
        return choice.reason
    match = region.match_by_id[choice.match_id]
    try:
        source = source_of(record.step, match, ctx.catalog, ctx.target)
    except Exception as exc:
        return f"its best kernel could not be lowered again: {exc}"
    if source.digest != record.source_digest:
        return f"its best kernel lowers to another source now ({source.digest}, evaluated: {record.source_digest})"
    checks = record.verdict.checks if record.verdict else ()
    return SelectedStep(
        step=record.step, label=match.label, nodes=match.nodes, source=None if source.language == CALLABLE else source,
        version=version_of(record.step, ctx.catalog), basis=choice.basis,
        measurement=record.measurement, baseline=choice.baseline, reason=choice.reason,
        max_abs=max((c.max_abs for c in checks), default=0.0), max_rel=max((c.max_rel for c in checks), default=0.0))


def _selection(region: Region, cover: Cover, steps: tuple[SelectedStep, ...], reasons: tuple[tuple[str, str], ...]) -> Selection:
    kept = {step.step.match_id for step in steps}
    inside = {node for step in steps for node in step.nodes}
    outside = [node.name for node in region.graph.nodes if node.name not in inside]
    fusion = cover.fusion if len(kept) == len(cover.matches) else Fusion.PARTIAL
    matches = tuple(m for m in cover.matches if m in kept)
    bases = {step.basis for step in steps}
    basis = next(b for b in (Basis.PROVISIONAL, Basis.MEASURED, Basis.CHAIN) if b in bases)
    if outside:
        names = ", ".join(outside[:6]) + (", ..." if len(outside) > 6 else "")
        reasons = (*reasons, (f"{len(outside)} nodes", f"on the framework: {names}"))
    return Selection(
        signature=region.signature, region=region.name, cover=evolve(cover, matches=matches, fusion=fusion), steps=steps,
        fallback_reasons=reasons, basis=basis,
        region_us=sum((s.measurement.us for s in steps if s.measurement), 0.0),
        baseline_us=sum((s.baseline.us for s in steps if s.baseline), 0.0))

