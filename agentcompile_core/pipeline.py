"""The whole flow, top to bottom. A newcomer starts here: eight stages over immutable values, and one loop of rounds."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import evolve, field, frozen

from .budget import CHAIN_SHARE, EVEN_SHARE, LONG_S, RANGES_LEAST_S, RANGES_SHARE, WINNERS_SHARE
from .context import Context
from .errors import Failure, StageName, UsageError, bounded
from .garbage import uncollected
from .installation.building import built
from .installation.trust import Judge
from .ir import ranges
from .ir.advice import AdviceRecord, OrderedPlan
from .ir.baseline import FRAMEWORK
from .ir.bundle import Bundle
from .ir.candidate import Candidate, Kernel, StepSource
from .ir.decisions import Decisions, choices_of, places_of
from .ir.evaluated import Evaluated
from .ir.graph import Graph, GraphKind, GraphSet, Workload
from .ir.plan import PlanSpace, RegionPlan
from .ir.record import TuningRecord
from .ir.region import Analysis, Region
from .ir.search_log import Seen, Tried, Untried, tried
from .ir.selection import Basis, Selection, fallback
from .plugin.events import StageFinished, StageStarted
from .plugin.interfaces import Frontend, LoadedModel
from .runtime.make_program import make_program
from .runtime.program import Program, framework_program
from .stages import advise, analyze, emit, lower, plan, select, validate
from .stages.emit.evidence import with_evidence
from .stages.select import chain
from .stages.validate import again, final_checks

SELECTIONS = 3  # of one compilation, while validators of winners refuse what was selected

@frozen(kw_only=True)
class Compilation:
    """Everything that one compilation found out, as values."""

    graphs: GraphSet
    analyses: tuple[Analysis, ...]
    spaces: tuple[PlanSpace, ...]
    advice: tuple[AdviceRecord, ...]
    records: tuple[TuningRecord, ...]
    selections: tuple[Selection, ...]
    programs: dict[str, Program]
    kernels: dict[str, Kernel] = field(repr=False)
    failures: tuple[Failure, ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()
    lowered: int = 0
    tried: tuple[Tried, ...] = ()  # per match and implementation: what was evaluated, and why the rest was not
    step_us: tuple[float, float] = (0.0, 0.0)  # the shortened step of the chain: with kernels, on the framework
    decisions: Decisions | None = None  # None: nothing was captured, so that nothing was decided

    @property
    def regions(self) -> tuple[Region, ...]:
        """Merged regions of all analyses."""
        return tuple(region for analysis in self.analyses for region in analysis.regions)

    @property
    def sources(self) -> dict[str, StepSource]:
        """Sources of all programs by digest."""
        return {s.digest: s for program in self.programs.values() for s in program.sources}

    @property
    def provisional(self) -> bool:
        """Whether the kernels were validated but not measured."""
        return any(s.basis is Basis.PROVISIONAL for s in self.selections)


def compile_graphs(graphs: GraphSet, ctx: Context, began: dict[str, float] | None = None) -> Compilation:
    """Analyze, plan, then advise / lower / validate / select in rounds, for graphs that are captured already."""
    clock = _Clock(ctx, began or {})
    if graphs.eager_reason or not graphs.graphs:
        return _eager(graphs, ctx, clock)
    with clock("analyze") as facts, uncollected():
        analyses = analyze.run(graphs, ctx)
        facts |= {"regions": sum(a.instances for a in analyses), "merged_regions": sum(len(a.regions) for a in analyses)}
    regions = tuple(r for a in analyses for r in a.regions)
    with clock("plan") as facts, uncollected():
        plans = plan.run(analyses, ctx)
        facts |= {"covers": sum(len(p.space.covers) for p in plans), "candidates": sum(p.space.candidates for p in plans)}
    step = next((g for g in graphs.graphs if g.kind is not GraphKind.PREFILL), None)
    places = select.ranges.places(step, plans)
    begin_budget(ctx, bool(places))
    rounds = _rounds(plans, places, ctx, clock)
    found, advice, seen = rounds.found, rounds.advice, rounds.seen
    with clock("select") as facts:
        selected, found = _selected(plans, rounds, ctx, step, ranged=bool(places))
        facts |= {"steps": sum(len(s.steps) for s in selected.selections)}
    programs = programs_of(graphs, regions, selected.selections)
    with clock("build") as facts:
        kernels = built(programs, found.kernels, ctx)
        facts |= {"kernels": len(kernels)}
    return Compilation(
        graphs=graphs,
        analyses=analyses,
        spaces=tuple(p.space for p in plans),
        advice=advice,
        records=found.records,
        selections=selected.selections,
        programs=programs,
        kernels=kernels,
        failures=tuple(ctx.failures),
        seconds=clock.seconds,
        lowered=len(seen.lowered),
        tried=tried(plans, found.records, seen),
        step_us=selected.step_us,
        decisions=Decisions(margin=ctx.config.margin, advisor=ctx.config.advisor, validators=ctx.config.validators,
                            competes=ctx.config.framework_competes, regions=choices_of(plans),
                            backend=ctx.backend.name if ctx.backend is not None else "",
                            places=places_of(found), advice=advice, step_us=selected.step_us, chain=selected.chain,
                            ranges=selected.ranges),
    )


@frozen(kw_only=True)
class _Rounds:
    """What the rounds of advice and evaluation left behind; ``ordered`` is what was asked for in each of them."""

    found: Evaluated
    advice: tuple[AdviceRecord, ...]
    seen: Seen
    ordered: tuple[tuple[OrderedPlan, ...], ...]


def _rounds(plans: tuple[RegionPlan, ...], again: frozenset[tuple[str, str]], ctx: Context, clock: "_Clock") -> _Rounds:
    found, seen = Evaluated(), Seen()
    advice: tuple[AdviceRecord, ...] = ()
    asked: tuple[tuple[OrderedPlan, ...], ...] = ()
    for round_number in range(max(1, ctx.config.rounds)):
        with clock("advise"):
            ordered = advise.run(plans, found.records, round_number, ctx)
        advice, asked = advice + tuple(o.record for o in ordered), (*asked, ordered)
        over = validate.over(ordered, ctx.budget.left_s("search"), ctx)
        if over is not None:  # what an earlier round left out keeps its own reason
            new = [(o.signature, s) for o in ordered for s in o.steps if (o.signature, s) not in seen.ordered]
            seen = evolve(seen, untried=tuple(Untried(signature=signature, step=s, reason=over) for signature, s in new))
            break
        with clock("lower") as facts, uncollected():
            candidates = lower.run(ordered, ctx)
            facts |= {"candidates": len(candidates)}
        seen = _noted(seen, ordered, candidates)
        left_s = ctx.budget.left_s("search")
        if not candidates or left_s <= 0:
            break
        with clock("validate") as facts:
            evaluated = validate.run(candidates, ordered, left_s, ctx, found.records, again)
            records = [r for r in evaluated.records if r.step.implementation != FRAMEWORK]
            facts |= {"records": len(records), "passed": sum(1 for r in records if r.passed)}
        found = found.and_then(evaluated)
    seen = evolve(seen, cached=found.cached, untried=(*found.untried, *seen.untried))
    return _Rounds(found=found, advice=advice, seen=seen, ordered=asked)


def _selected(plans: tuple[RegionPlan, ...], rounds: _Rounds, ctx: Context, step: Graph | None, *,
              ranged: bool) -> tuple[select.Selected, Evaluated]:
    """A selection of which every kernel has passed the validators of winners, and the records as they are then.

    What they refuse is closed and the selection made again, three times; then only what has passed them can be selected.
    """
    found = rounds.found
    for _ in range(SELECTIONS):
        _reserve_selecting(ctx, ranged)
        selected = select.run(plans, found, ctx, step)
        ctx.budget.done("chain")
        ctx.budget.done("ranges")
        told, known = validate.confirm(selected.selections, found, rounds.ordered, ctx)
        if known is found:
            return evolve(selected, selections=told), found
        found = known
    found = validate.only_confirmed(found, ctx)
    return select.run(plans, found, ctx, step), found


def _noted(seen: Seen, ordered: tuple[OrderedPlan, ...], candidates: tuple[Candidate, ...]) -> Seen:
    return evolve(seen, ordered=seen.ordered | {(plan.signature, step) for plan in ordered for step in plan.steps},
                  lowered=seen.lowered | {(c.signature, c.step) for c in candidates})


def begin_budget(ctx: Context, ranged: bool = False) -> None:
    """Start the search's clock, and keep the shares of what comes after the candidates; ``ranged``: there are later ranges of positions."""
    _reserve_selecting(ctx, ranged)
    if final_checks.expected(ctx):
        ctx.budget.reserve("winners", WINNERS_SHARE)
    ctx.budget.start()


def _reserve_selecting(ctx: Context, ranged: bool) -> None:
    if chain.possible(ctx):
        even = ranged and ctx.budget.total_s >= LONG_S
        ctx.budget.reserve("chain", EVEN_SHARE if even else CHAIN_SHARE)
        if ranged:
            ctx.budget.reserve("ranges", EVEN_SHARE if even else RANGES_SHARE, RANGES_LEAST_S)


def programs_of(graphs: GraphSet, regions: tuple[Region, ...], selections: tuple[Selection, ...]) -> dict[str, Program]:
    """The programs of every graph by name: steps where regions were selected (decode, forward), the framework elsewhere.

    A decode graph has a program for each range of positions in which something else is selected.
    """
    found = []
    for graph in graphs.graphs:
        starts = ranges.starts_of(selections) if graph.kind is GraphKind.DECODE else (0,)
        found += [framework_program(graph)] if graph.kind is GraphKind.PREFILL else [
            make_program(graph, regions, ranges.selected_from(selections, start), start) for start in starts]
    return {program.name: program for program in found}


def _eager(graphs: GraphSet, ctx: Context, clock: "_Clock") -> Compilation:
    reason = graphs.eager_reason or "nothing was captured"
    return Compilation(
        graphs=graphs,
        analyses=(),
        spaces=(),
        advice=(),
        records=(),
        selections=(fallback("", graphs.model.name, reason),),
        programs={},
        kernels={},
        failures=tuple(ctx.failures),
        seconds=clock.seconds,
    )


class _Clock:
    """Times stages, reports them and sends the event; times of one stage in several rounds add up."""

    def __init__(self, ctx: Context, began: dict[str, float]) -> None:
        self._ctx, self._seconds, self._name, self._start = ctx, dict(began), "", 0.0
        self._facts: dict[str, int] = {}

    def __call__(self, name: str) -> "_Clock":
        self._name = name
        return self

    def __enter__(self) -> dict[str, int]:
        """Begin; the dictionary takes the counts of the stage."""
        self._facts = {}
        self._ctx.emit(StageStarted(stage=self._name))
        self._start = time.monotonic()
        return self._facts

    def __exit__(self, *exc: object) -> None:
        took = time.monotonic() - self._start
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + took
        self._ctx.emit(StageFinished(stage=self._name, seconds=took, facts=dict(self._facts)))

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._seconds.items())


def judge_of(selections: tuple[Selection, ...]) -> Judge:
    """Who judges kernels of a bundle with these selections that were made again here: stage validate, as it judges candidates."""
    return partial(again.judged, signatures={step.step: s.signature for s in selections for step in s.steps})


def frontend_for(what: object, ctx: Context) -> Frontend:
    """The frontend that understands ``what``.

    Raises:
        UsageError: none does.
    """
    for _, frontend in sorted(ctx.catalog.frontends.items()):
        subject = bounded(str(what), 200)
        if ctx.catalog.guard(lambda f=frontend: f.accepts(what), stage=StageName.CAPTURE, plugin=frontend.name, subject=subject):  # type: ignore[misc]
            return frontend
    raise UsageError(
        f"cannot tell what {bounded(str(what), 200)!r} is; give a model folder, a model identifier, a .py file with Model, or a live module"
    )


def captured(loaded: LoadedModel, frontend: Frontend, workload: Workload, ctx: Context, versions: tuple[str, ...] | None, *,
             worker: bool = True) -> GraphSet:
    """Graphs from the store, or captured now and stored; compared with the model in both cases. See stages.capture.

    ``versions``: None leaves the store alone. ``worker``: one will be needed behind.
    """
    from .stages import capture

    return capture.run(loaded, workload, ctx, frontend, versions, worker=worker)


def emitted(compilation: Compilation, ctx: Context) -> Bundle:
    """The bundle of a compilation."""
    return emission(compilation, ctx)()


def emission(compilation: Compilation, ctx: Context) -> Callable[[], Bundle]:
    """What makes the bundle of a compilation: plugins are asked for their parts now, and values are written then."""
    made = emit.prepared(compilation.graphs, compilation.programs, compilation.selections, compilation.kernels, compilation.records, ctx)
    return lambda: with_evidence(made(), compilation.tried, compilation.failures, compilation.decisions)


def statistics(compilation: Compilation, bundle: Bundle | None = None) -> dict[str, Any]:
    """The pipeline's counts, as evaluation.md names them."""
    graph = next((g for g in compilation.graphs.graphs if g.kind is not GraphKind.PREFILL), None)
    steps = [s for selection in compilation.selections if not selection.start for s in selection.steps]
    times = [s.measurement.us for s in steps if s.measurement]
    evaluated = [r for r in compilation.records if r.step.implementation != FRAMEWORK]
    return {
        "nodes": len(graph.nodes) if graph else 0,
        "regions": sum(a.instances for a in compilation.analyses),
        "merged_regions": len(compilation.regions),
        "plans": sum(len(s.covers) for s in compilation.spaces),
        "candidates": sum(s.candidates for s in compilation.spaces),
        "lowered": compilation.lowered,
        "evaluated": len(evaluated),
        "built": sum(1 for r in evaluated if r.built),
        "validated": sum(1 for r in evaluated if r.passed),
        "advised": sum(1 for a in compilation.advice if a.accepted.order or a.accepted.hints or a.accepted.label),
        "selected": len(steps),
        "ranges": len(ranges.starts_of(compilation.selections)),
        "selected_us": [min(times), max(times)] if times else [],
        "max_abs": max((s.max_abs for s in steps), default=0.0),
        "max_rel": max((s.max_rel for s in steps), default=0.0),
        "files": len(bundle.files) + 1 if bundle else 0,
        "signatures": sum(len(s.launches) for s in {s.key: s for p in compilation.programs.values() for s in p.sources}.values()),
        "untried": sum(count for t in compilation.tried for _, count in t.untried),
        "failures": len(compilation.failures),
        "seconds": dict(compilation.seconds),
    }
