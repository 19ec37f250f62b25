"""Later ranges of positions: the steps whose time grows with what is cached are judged again in the captured chain, further on.

With them are judged the steps beside them, by what came close in the first range: a kernel that holds much of the cache on its way leaves
its neighbours less room. Everything else stays as it was selected; a step is replaced by others of its match, so that all ranges share
weights and caches.
"""

import math
from itertools import zip_longest

from attrs import evolve, frozen

from ...context import Context
from ...ir import ranges
from ...ir.candidate import Launch
from ...ir.decisions import ChainLog, ChainTrial
from ...ir.evaluated import Evaluated
from ...ir.graph import Graph, ValueKind
from ...ir.plan import RegionPlan
from ...ir.record import TuningRecord
from ...ir.region import Match, Region
from ...ir.selection import SelectedStep, Selection
from ...ir.target import Target
from ...plugin.events import Skipped
from ...store import keys
from ...worker.chain_question import Alternative
from ...worker.neighbours import NEAR, in_order
from . import chain

MOST_PER_STEP = 16
MOST_PER_NEIGHBOUR = 6
KIND = "ranges"  # of texts in the store
LEAST_S, WORTH_S = 1.0, 2.0  # for a range: less is over before the chain is made; what one is worth where there are others to judge


@frozen(kw_only=True)
class Later:
    """Selections that begin at later positions, of regions where something else wins there; and the log of each range."""

    selections: tuple[Selection, ...] = ()
    logs: tuple[ChainLog, ...] = ()


def possible(graph: Graph | None) -> bool:
    """Whether a step has later ranges."""
    return graph is not None and bool(ranges.starts(chain.capacity_of(graph)))


def places(graph: Graph | None, plans: tuple[RegionPlan, ...]) -> frozenset[tuple[str, str]]:
    """The matches that are judged again further on, by the signature of their region and their id."""
    if graph is None or not possible(graph):
        return frozenset()
    cached = _cached(graph)
    return frozenset((plan.region.signature, match.id) for plan in plans for match in plan.region.matches
                     if _reads(cached, plan.region, match))


def later(graph: Graph, plans: tuple[RegionPlan, ...], selections: tuple[Selection, ...], found: Evaluated, ctx: Context,
          trials: tuple[ChainTrial, ...] = ()) -> Later:
    """What wins from each further position on, beginning with what holds before it. ``selections``: of the first range; ``trials``: of
    the chain that chose them."""
    regions, capacity = tuple(plan.region for plan in plans), chain.capacity_of(graph)
    held, made = selections, Later()
    reading = alternatives_of(graph, regions, selections, found, ctx)
    alternatives = (*reading, *_beside(reading, regions, selections, trials, found, ctx)) if reading else ()
    if not alternatives:
        return made
    stop_at, key = ctx.budget.stop_at("ranges"), _key(graph, regions, selections, alternatives, ctx)
    before = _remembered(key, len(ranges.starts(capacity)), ctx)
    count = _affordable(capacity, stop_at - ctx.budget.now()) if before is None else before.count
    _tell(capacity, count, ctx)
    judged, done, failed = ranges.judged(capacity, count), 0, False
    for index, (start, position) in enumerate(judged):
        left_s = max(0.0, stop_at - ctx.budget.now()) / (len(judged) - index)
        if left_s < LEAST_S if before is None else index >= before.done:
            _skipped(start, ctx)
            break
        question = chain.question_of(graph, regions, held, alternatives, position, left_s, ctx)
        question = evolve(question, with_framework=False, earlier=ranges.beginnings(start, position))
        won, answer = chain.ask(question, held, found, ctx)
        if answer is None:
            failed = True
            continue
        done += 1
        begins = ranges.beginning(start, ranges.holds_from(answer.earlier, position), capacity)
        if begins is None:
            ctx.emit(Skipped(subject="ranges", message=f"what was chosen at position {position} wins near the end of the cache alone"))
            continue
        log = ChainLog(started=tuple((s.signature, x.step) for s in held for x in s.steps), trials=answer.trials, start=begins,
                       judged=position, earlier=answer.earlier)
        others = tuple(_from(begins, new, old, position) for new, old in zip(won, held, strict=True) if _steps(new) != _steps(old))
        made = Later(selections=(*made.selections, *others), logs=(*made.logs, log))
        changed = {s.signature for s in others}
        held = (*(s for s in held if s.signature not in changed), *others)
    if not failed:
        ctx.store.put_text(KIND, key, f"{count} {done}")
    return made


def _key(graph: Graph, regions: tuple[Region, ...], held: tuple[Selection, ...], alternatives: tuple[Alternative, ...],
         ctx: Context) -> str:
    """Of what the ranges are chosen from, and of the budget: another one is another search."""
    assert ctx.backend is not None
    question = chain.question_of(graph, regions, held, alternatives, 0, 0.0, ctx)
    return keys.ranges_key(chain.timeless(question), float(ctx.config.budget_s), keys.environment(ctx.backend))


@frozen
class _Before:
    """How many ranges there were when they were chosen before, and for how many of them the time had sufficed."""

    count: int
    done: int


def _remembered(key: str, most: int, ctx: Context) -> _Before | None:
    """What is known of an earlier run; None: there was none. A warm run asks what the cold one did, which has answers."""
    words = (ctx.store.text(KIND, key) or "").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return None
    before = _Before(*map(int, words))
    return before if before.done <= before.count <= most else None


def _affordable(capacity: int, seconds: float) -> int:
    """For how many ranges ``seconds`` suffice: what wins behind the first one wins by much, and one choice for all positions from there
    on has most of it."""
    return min(len(ranges.starts(capacity)), max(int(seconds / WORTH_S), int(seconds >= LEAST_S)))


def _tell(capacity: int, count: int, ctx: Context) -> None:
    starts = ranges.starts(capacity)
    if not count:
        _skipped(starts[0], ctx)
    elif count < len(starts):
        together = f"positions from {starts[count - 1]} on were chosen for as one range, since time was short"
        ctx.emit(Skipped(subject="ranges", message=together))


def _skipped(start: int, ctx: Context) -> None:
    ctx.emit(Skipped(subject="ranges", message=f"no time was left to choose again for positions from {start} on"))


def _from(start: int, new: Selection, old: Selection, position: int) -> Selection:
    """The selection that begins at ``start``: what changed says where it won, what did not is as it was."""
    before = {x.step.match_id: x for x in old.steps}

    def said(step: SelectedStep) -> SelectedStep:
        was = before.get(step.step.match_id)
        if was is not None and was.step == step.step:
            return was
        than = f" than {was.step.schedule}, which holds before it" if was is not None else ""
        return evolve(step, reason=f"faster at position {position} inside the captured chain{than}")

    return evolve(new, steps=tuple(said(x) for x in new.steps), start=start)


def _steps(selection: Selection) -> frozenset[object]:
    return frozenset(x.step for x in selection.steps)


def alternatives_of(graph: Graph, regions: tuple[Region, ...], selections: tuple[Selection, ...], found: Evaluated,
                    ctx: Context) -> tuple[Alternative, ...]:
    """Others for every selected step that reads the KV cache: ways to cut its work into blocks, fastest first of each, in turns with those
    that have most in flight, since what is fastest at few positions says little of many."""
    made, cached = [], _cached(graph)
    for region, selection in ((r, s) for r in regions for s in selections if s.signature == r.signature):
        for step in selection.steps:
            if not _reads(cached, region, region.match_by_id[step.step.match_id]):
                continue
            mine = _ways(chain.rivals(step, region, found), found, ctx.target)
            options = (chain.alternative(record, region, step.baseline, found, ctx) for record in mine)
            made += [option for option in options if option is not None]
    return tuple(made)


def _beside(reading: tuple[Alternative, ...], regions: tuple[Region, ...], selections: tuple[Selection, ...],
            trials: tuple[ChainTrial, ...], found: Evaluated, ctx: Context) -> list[Alternative]:
    """Others for the steps in front of and behind those of ``reading``, which came close in the first range: those that were closest, in
    turns with those that leave most room on an SM, since what reads much of the cache begins beside them only where it finds some."""
    ratios = {(trial.signature, trial.step): trial.ratio for trial in trials
              if trial.step is not None and 0.0 < trial.ratio < NEAR and not trial.refused and trial.alone}
    places = {(a.signature, a.match_id) for a in reading}
    made: list[Alternative] = []
    for region, selection in ((r, s) for r in regions for s in selections if s.signature == r.signature):
        steps = in_order(selection, region)
        reads = [(region.signature, step.step.match_id) in places for step in steps]
        for number, step in enumerate(steps):
            if reads[number] or not any(reads[max(0, number - 1):number + 2]):
                continue
            mine = chain.rivals(step, region, found)
            close = sorted((r for r in mine if (region.signature, r.step) in ratios),
                           key=lambda r: (ratios[region.signature, r.step], str(r.step)))
            itself = [r for r in mine if close and r.step == step.step]  # for where an earlier range has replaced it
            wanted = (*_by_turns(close, sorted(close, key=lambda r: _on_an_sm(r, found, ctx.target)), MOST_PER_NEIGHBOUR), *itself)
            options = (chain.alternative(record, region, step.baseline, found, ctx) for record in dict.fromkeys(wanted))
            made += [option for option in options if option is not None]
    return made


def _ways(records: list[TuningRecord], found: Evaluated, target: Target) -> list[TuningRecord]:
    first: dict[object, TuningRecord] = {}
    for record in records:
        source = found.source(record)
        if source is not None:
            first.setdefault(tuple((launch.grid, launch.block) for launch in source.launches), record)
    in_flight = {record: _in_flight(record, found, target) for record in records}
    most = sorted(filter(in_flight.__getitem__, records), key=lambda one: -in_flight[one])  # of equal ones the fastest first
    return _by_turns(list(dict.fromkeys((*first.values(), *records))), most, MOST_PER_STEP)


def _by_turns(some: list[TuningRecord], others: list[TuningRecord], most: int) -> list[TuningRecord]:
    turns = zip_longest(some, others)
    return list(dict.fromkeys(record for turn in turns for record in turn if record is not None))[:most]


def _in_flight(record: TuningRecord, found: Evaluated, target: Target) -> int:
    """Bytes of dynamic shared memory that the blocks of a launch hold on the whole device at a time: what they may have on its way there
    from memory. The most of all launches."""
    return max((_resident(launch, target) * launch.shared_bytes for launch in _launches(record, found)), default=0)


def _on_an_sm(record: TuningRecord, found: Evaluated, target: Target) -> int:
    """The bytes of these that one SM holds: what its blocks leave no room for."""
    return max((-(-_resident(launch, target) // target.sm_count) * launch.shared_bytes for launch in _launches(record, found)), default=0)


def _resident(launch: Launch, target: Target) -> int:
    """How many of its blocks are on the device at a time, as far as dynamic shared memory tells."""
    blocks = math.prod(launch.grid)
    return min(blocks, target.sm_count * (target.shared_bytes_per_sm // launch.shared_bytes)) if launch.shared_bytes else blocks


def _launches(record: TuningRecord, found: Evaluated) -> tuple[Launch, ...]:
    source = found.source(record)
    return () if source is None else source.launches


def _cached(graph: Graph) -> frozenset[str]:
    """The keys and values that earlier steps left."""
    return frozenset(v.name for v in graph.values if v.kind is ValueKind.STATE and v.source.startswith("kv."))


def _reads(cached: frozenset[str], region: Region, match: Match) -> bool:
    names = region.instances[0].value if region.instances else {}
    return any(names.get(value, value) in cached for operand in match.operands for value in operand.values)
