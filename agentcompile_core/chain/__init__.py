"""The chain has the last word: steps that won alone are judged inside captured whole layers, all others held at their best."""

from typing import TYPE_CHECKING

from attrs import evolve

from .. import serial
from ..context import Context
from ..errors import Cause, Failure, StageName
from ..graph import Graph
from ..record import TuningRecord
from ..region import Region
from ..selection import Basis, Selection, SelectedStep
from .cut import cut, layers_needed
from .judge import Alternative, Answer, Question

if TYPE_CHECKING:
    from ..worker import Worker

MOST_PER_STEP = 8
POSITION = 256
CALL_DEADLINE_S = 60.0


def run(graph: Graph, regions: tuple[Region, ...], selections: tuple[Selection, ...], alternatives: tuple[Alternative, ...],
        worker: "Worker", budget_s: float, ctx: Context) -> tuple[tuple[Selection, ...], Answer | None]:
    """Judge ``alternatives`` in the captured chain; returns the selections that won, and what was measured.

    Without a backend that can time, or if the worker fails, the selections stay as they are.
    """
    if ctx.backend is None or ctx.backend.device != "cuda" or not any(s.steps for s in selections):
        return selections, None
    layers = layers_needed(graph, ctx.target)
    short, short_regions = cut(graph, regions, layers) if layers else (graph, regions)
    capacity = min((v.spec.shape[1] for v in graph.values if v.source.startswith("kv.")), default=POSITION * 4)
    question = Question(graph=short, regions=short_regions, selections=selections, alternatives=alternatives, target=ctx.target,
                        backend=ctx.backend.name, position=min(POSITION, capacity // 4), margin=ctx.config.margin / 2, budget_s=budget_s)
    from ..worker.client import WorkerLost

    try:
        answer = serial.structure(
            worker.call("agentcompile_core.chain.judge:judge", serial.unstructure(question), deadline_s=CALL_DEADLINE_S,
                        progress=lambda what: ctx.report("candidate", {"step": what, "verdict": "chain"})), Answer)
    except WorkerLost as exc:
        ctx.fail(Failure(stage=StageName.SELECT, cause=Cause(exc.cause), plugin="core", subject="chain", message=str(exc)))
        return selections, None
    return tuple(_annotated(s, old, answer) for s, old in zip(answer.selections, selections, strict=True)), answer


def _annotated(new: Selection, old: Selection, answer: Answer) -> Selection:
    before = {s.step.match_id: s.step for s in old.steps}

    def reason(step: SelectedStep) -> SelectedStep:
        if before.get(step.step.match_id) == step.step:
            return evolve(step, basis=Basis.CHAIN, reason=f"{step.reason}; kept by the chain")
        was = before.get(step.step.match_id)
        return evolve(step, basis=Basis.CHAIN, reason=f"faster inside the captured chain than {was.schedule if was else 'the fallback'}, which won alone")

    return evolve(new, steps=tuple(reason(s) for s in new.steps), basis=Basis.CHAIN if new.steps else new.basis)


def alternatives_of(regions: tuple[Region, ...], selections: tuple[Selection, ...], records: tuple[TuningRecord, ...],
                    chosen: "dict[str, SelectedStep]") -> tuple[Alternative, ...]:
    """For every selected step up to eight others that passed and were measured, fastest alone first, one per class at least.

    A class is (shared memory, registers) rounded: the chain's winner is rarely the fastest alone. ``chosen`` maps a
    record's key to what would be selected. The steps with the largest share of the time come first.
    """
    found: list[tuple[float, list[Alternative]]] = []
    for region, selection in ((r, s) for r in regions for s in selections if s.signature == r.signature):
        for step in selection.steps:
            mine = [r for r in records if r.signature == region.signature and r.step.match_id == step.step.match_id and r.usable and r.key in chosen]
            mine.sort(key=lambda r: r.measurement.us if r.measurement else 0.0)
            share = (step.measurement.us if step.measurement else 0.0) * len(region.instances)
            found.append((-share, [Alternative(signature=region.signature, match_id=step.step.match_id, selected=chosen[r.key])
                                   for r in _diverse(mine)]))
    return tuple(a for _, group in sorted(found, key=lambda item: item[0]) for a in group)


def _diverse(records: list[TuningRecord]) -> list[TuningRecord]:
    first_of_class: dict[tuple[int, int, int], TuningRecord] = {}
    for record in records:
        stage_bytes = dict(record.step.schedule.items)
        key = (record.resources.shared_bytes >> 15, record.resources.registers >> 5, int(stage_bytes.get("in_flight", 0) or 0))
        first_of_class.setdefault(key, record)
    merged = list(dict.fromkeys([*records[: MOST_PER_STEP // 2], *first_of_class.values(), *records]))
    return merged[:MOST_PER_STEP]
