"""The chain has the last word: steps that won alone are judged inside captured whole layers, all others held at their best."""

from attrs import evolve

from ....context import Context
from ....errors import Cause, Failure, StageName, UsageError
from ....ir import serial
from ....ir.baseline import FRAMEWORK
from ....ir.candidate import Kernel
from ....ir.decisions import chain_margin
from ....ir.evaluated import Evaluated
from ....ir.graph import Graph
from ....ir.plan import RegionPlan
from ....ir.record import Measurement, TuningRecord
from ....ir.region import Region
from ....ir.selection import SelectedStep, Selection
from ....plugin.events import ChainProgress, StoreMiss
from ....store import keys
from ....worker.chain_question import Alternative, ChainAnswer, ChainQuestion
from ....worker.client import WorkerLost
from ..cut import cut, layers_needed
from ..isolated import runners_up, step_of
from .annotated import annotated

MOST_PER_STEP = 12
MOST_LATER = 12  # further ones per step, tried where time is left
POSITION = 256
CALL_DEADLINE_S = 60.0


def possible(ctx: Context) -> bool:
    """Whether there is a device on which a chain can be timed."""
    return ctx.backend is not None and ctx.backend.captures


def run(
    graph: Graph, plans: tuple[RegionPlan, ...], selections: tuple[Selection, ...], found: Evaluated, ctx: Context
) -> tuple[tuple[Selection, ...], ChainAnswer | None]:
    """Judge the selected steps and their alternatives in the captured chain; an answer in the store is used again.

    Returns the selections that won and what was measured; None and the selections as they are if the worker failed.
    """
    regions = tuple(plan.region for plan in plans)
    capacity = capacity_of(graph) or POSITION * 4
    covers = runners_up(plans, selections, found, ctx)
    alternatives = alternatives_of(regions, selections, found, ctx, covers)
    question = question_of(graph, regions, selections, alternatives, min(POSITION, capacity // 4), ctx.budget.left_s("chain"), ctx)
    return ask(evolve(question, covers=covers), selections, found, ctx)


def capacity_of(graph: Graph) -> int:
    """Positions of the KV cache; 0 where a graph has none."""
    return min((v.spec.shape[1] for v in graph.values if v.source.startswith("kv.")), default=0)


def question_of(graph: Graph, regions: tuple[Region, ...], selections: tuple[Selection, ...], alternatives: tuple[Alternative, ...],
                position: int, budget_s: float, ctx: Context) -> ChainQuestion:
    """The question for one position, of as many layers as the chain keeps."""
    assert ctx.backend is not None
    layers = layers_needed(graph, ctx.target)
    short, short_regions = cut(graph, regions, layers) if layers else (graph, regions)
    return ChainQuestion(graph=short, regions=short_regions, selections=selections, alternatives=alternatives, target=ctx.target,
                         backend=ctx.backend.name, position=position, margin=chain_margin(ctx.config.margin), budget_s=budget_s)


def ask(question: ChainQuestion, selections: tuple[Selection, ...], found: Evaluated,
        ctx: Context) -> tuple[tuple[Selection, ...], ChainAnswer | None]:
    """The selections that win in place of ``selections``, with the reason at every step; see ``run``."""
    answer = _stored(question, found, ctx)
    if answer is None:
        return selections, None
    _tell_refused(answer, question, ctx)
    return tuple(annotated(s, old, answer, question) for s, old in zip(answer.selections, selections, strict=True)), answer


def _tell_refused(answer: ChainAnswer, question: ChainQuestion, ctx: Context) -> None:
    held = (*question.selections, *question.covers)
    steps = (*(x for s in held for x in s.steps), *(a.selected for a in question.alternatives if a.selected is not None))
    owners = {str(s.step): s.step.implementation for s in steps}
    for _, _, step, why in answer.refused:
        ctx.fail(Failure(stage=StageName.SELECT, cause=Cause.TOLERANCE, plugin=owners.get(step, "core"), subject=step, message=why))


def _stored(question: ChainQuestion, found: Evaluated, ctx: Context) -> ChainAnswer | None:
    # Neither the budget nor the kernels are part of the key: an answer that took longer is as good, and the sources name the kernels.
    assert ctx.backend is not None
    key = keys.chain_key(timeless(question), keys.environment(ctx.backend))
    text = ctx.store.text("chain", key)
    if text is not None:
        try:
            return serial.loads(text, ChainAnswer)
        except UsageError:
            ctx.emit(StoreMiss(key=key))
    asked = evolve(question, kernels=kernels_of((*question.selections, *question.covers), question.alternatives, found, ctx))
    try:
        raw = ctx.running_worker().call(
            "agentcompile_core.worker.judge:judge",
            serial.unstructure(asked),
            deadline_s=CALL_DEADLINE_S,
            progress=lambda what: ctx.emit(ChainProgress(what=what)),
        )
    except WorkerLost as exc:
        ctx.fail(Failure(stage=StageName.SELECT, cause=Cause(exc.cause), plugin="core", subject="chain", message=str(exc)))
        return None
    answer = serial.structure(raw, ChainAnswer)
    ctx.store.put_text("chain", key, serial.dumps(answer))
    return answer


def timeless(question: ChainQuestion) -> ChainQuestion:
    """The question without kernels and without the microseconds that differ from run to run, for its key."""

    def plain(step: SelectedStep) -> SelectedStep:
        return evolve(step, measurement=None, baseline=None, reason="", max_abs=0.0, max_rel=0.0)

    def bare(selections: tuple[Selection, ...]) -> tuple[Selection, ...]:
        return tuple(evolve(s, steps=tuple(plain(x) for x in s.steps), region_us=0.0, baseline_us=0.0, fallback_reasons=())
                     for s in selections)

    alternatives = tuple(evolve(a, selected=plain(a.selected) if a.selected else None) for a in question.alternatives)
    return evolve(question, selections=bare(question.selections), covers=bare(question.covers), alternatives=alternatives, kernels=(),
                  budget_s=0.0)


def alternatives_of(
    regions: tuple[Region, ...], selections: tuple[Selection, ...], found: Evaluated, ctx: Context, covers: tuple[Selection, ...] = ()
) -> tuple[Alternative, ...]:
    """For every selected step, and for those that only other ``covers`` have, up to twelve others that passed and were measured, and its
    removal if it lost alone to a framework that may take part; behind those of all steps up to twelve further ones each, tried later.

    At least one per class (shared memory, registers, bytes in flight) is among them: the chain's winner is rarely the
    fastest alone. The steps with the largest share of the time come first.
    """
    groups: list[tuple[float, list[Alternative], list[Alternative]]] = []
    for region in regions:
        steps = dict[str, SelectedStep]()
        for step in (x for s in (*selections, *covers) if s.signature == region.signature for x in s.steps):
            steps.setdefault(step.step.match_id, step)
        for step in steps.values():
            mine = rivals(step, region, found)
            share = (step.measurement.us if step.measurement else 0.0) * len(region.instances)
            made = [(alternative(r, region, step.baseline, found, ctx), n < MOST_PER_STEP) for n, r in enumerate(_diverse(mine))]
            group = [a for a, first in made if a is not None and first]
            further = [evolve(a, later=True) for a, first in made if a is not None and not first]
            lost = step.baseline is None or bool(step.measurement and step.measurement.us > step.baseline.us)
            if lost and ctx.config.framework_competes:
                group.append(Alternative(signature=region.signature, match_id=step.step.match_id, selected=None))
            groups.append((-share, group, further))
    groups.sort(key=lambda item: item[0])
    return (*(a for _, group, _ in groups for a in group), *(a for _, _, further in groups for a in further))


def rivals(step: SelectedStep, region: Region, found: Evaluated) -> list[TuningRecord]:
    """What could be selected for the match of a step, itself included, by its time alone."""
    mine = [r for r in found.records if r.signature == region.signature and r.step.match_id == step.step.match_id and r.usable
            and r.step.implementation != FRAMEWORK]
    # The step's text breaks ties: records come in another order from the store than from the worker.
    return sorted(mine, key=lambda r: (r.measurement.us if r.measurement else 0.0, str(r.step)))


def alternative(
    record: TuningRecord, region: Region, baseline: Measurement | None, found: Evaluated, ctx: Context
) -> Alternative | None:
    """What is selected if ``record`` is; None where this run has no such source."""
    source = found.source(record)
    if source is None:
        return None
    selected = step_of(record, region, source, baseline, ctx.catalog)
    return Alternative(signature=region.signature, match_id=record.step.match_id, selected=selected)


def kernels_of(
    selections: tuple[Selection, ...], alternatives: tuple[Alternative, ...], found: Evaluated, ctx: Context
) -> tuple[Kernel, ...]:
    """The kernels of everything that the chain may try: those that validation built in this run, else those in the store."""
    assert ctx.backend is not None
    steps = (*(s for selection in selections for s in selection.steps), *(a.selected for a in alternatives if a.selected is not None))
    kernels = []
    for digest, source in {s.source.digest: s.source for s in steps if s.source is not None}.items():
        kernel = found.kernels.get(digest) or ctx.store.kernel(keys.kernel_key(source, ctx.target, ctx.backend))
        if kernel is not None:
            kernels.append(kernel)
    return tuple(kernels)


def _diverse(records: list[TuningRecord]) -> list[TuningRecord]:
    first_of_class: dict[tuple[int, int, int], TuningRecord] = {}
    for record in records:
        stage_bytes = dict(record.step.schedule.items)
        key = (record.resources.shared_bytes >> 15, record.resources.registers >> 5, int(stage_bytes.get("in_flight", 0) or 0))
        first_of_class.setdefault(key, record)
    merged = list(dict.fromkeys([*records[: MOST_PER_STEP // 2], *first_of_class.values(), *records]))
    return merged[:MOST_PER_STEP + MOST_LATER]
