"""Runs a decode step in which the kernels of one layer note when their blocks pass their phases; everything else runs as it serves."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from attrs import evolve, frozen

from ..errors import Reject, UsageError
from ..ir.candidate import Kernel, StepSource
from ..ir.graph import Graph
from ..ir.region import Match, Role
from ..ir.target import Target
from ..ir.timeline import OUTSIDE, TimeLine, Times, TracedLaunch, clock_step_ns, losses, medians, phase_times
from ..plugin.backend import Backend
from ..plugin.phases import PHASES
from .holding import hold
from .program import Program, Segment
from .session import Session

RELEASED = PHASES.index("released")
WARM_UPS = 2
TIMED, TIMED_RUNS = 5, 8  # samples of a whole step, and steps of each
Run = tuple[tuple[Times, ...], ...]  # per traced step and launch what its blocks noted


@frozen(kw_only=True)
class _Traced:
    """A step that notes its times: its segment as it serves, its layer, and what runs in its place."""

    segment: Segment
    layer: int
    source: StepSource
    kernel: Kernel


def trace(session: Session, target: Target, position: int, *, layer: int | None = None, repetitions: int = 15) -> TimeLine:
    """The time line of one layer (default: the middle one), of the first step of the next, and of what comes behind the last layer.

    ``position``: that of the token which the traced step reads; below it the cache holds whatever it held. State is as before afterwards.

    Raises:
        UsageError: the model runs no generated kernels, they cannot be traced here, or there is no such position or layer.
    """
    import torch

    backend = session.backend
    if backend is None:
        raise UsageError("nothing to trace: no backend launches kernels in this session; compile where the model runs on a GPU")
    if not 1 <= position < session.max_context:
        raise UsageError(f"position {position} cannot be traced; allowed are 1 to {session.max_context - 1}")
    with session.exclusive(), torch.inference_mode():
        hold(session.kv, position + TIMED_RUNS)
        name = session.decode_program(position)
        program = session.bound(name).program
        chosen, layers = _layer(program, layer)
        traced = _traced(program, chosen, backend, target)
        with _as_before(session):
            plain, noting = _captured(session, program, {}), _captured(session, *_with(program, traced))
            runs = [_one_run(session, noting, traced, backend, position) for _ in range(repetitions + 1)][1:]
            token_us, noted_us = (_token_us(session, step, backend, position) for step in (plain, noting))
    launches = _launches(traced, runs, position, target)
    return TimeLine(
        model=session.graphs.model.name, program=program.name, position=position, layer=chosen, layers=layers,
        layer_us=_layer_us(launches, chosen), layer_floor_us=sum(launch.floor_us for launch in launches if launch.layer == chosen),
        token_us=token_us, noted_us=noted_us, clock_ns=clock_step_ns([blocks for run in runs for step in run for blocks in step]),
        launches=launches, losses=losses(launches, chosen, layers))


def _layer(program: Program, layer: int | None) -> tuple[int, int]:
    """The layer to trace, and how many there are."""
    numbers = sorted({_layer_of(program.graph, s) for s in program.segments if s.source} - {OUTSIDE})
    if not numbers:
        raise UsageError("nothing to trace: no step of a layer runs a generated kernel; `agentcompile explain` says why")
    chosen = numbers[(len(numbers) - 1) // 2] if layer is None else layer
    if chosen not in numbers:
        raise UsageError(f"layer {chosen} has no generated kernels; allowed are {numbers[0]} to {numbers[-1]}")
    return chosen, len(numbers)


def _layer_of(graph: Graph, segment: Segment) -> int:
    return graph.node_by_name[segment.nodes[-1]].layer


def _traced(program: Program, layer: int, backend: Backend, target: Target) -> tuple[_Traced, ...]:
    """The steps of the layer, the first one behind it, and those behind the last layer; each with a kernel of its own."""
    sources, found = {source.key: source for source in program.sources}, []
    numbered = [(_layer_of(program.graph, s), index, s) for index, s in enumerate(program.segments) if s.source]
    numbered = numbered[next(place for place, (number, *_) in enumerate(numbered) if number == layer):]
    following = next((one for one in numbered if one[0] not in (layer, OUTSIDE)), None)
    for number, index, segment in (one for one in numbered if one is following or one[0] in (layer, OUTSIDE)):
        source = backend.traced(sources[segment.source], f"{program.name} {index}")
        if source is None:
            raise UsageError(f"the backend {backend.name} traces no kernels")
        found.append(_Traced(segment=segment, layer=number, source=source, kernel=backend.build(source, target)))
    return tuple(found)


def _with(program: Program, traced: tuple[_Traced, ...]) -> tuple[Program, Mapping[str, Kernel]]:
    """The program with the traced steps in place of theirs, and the kernels that it needs more."""
    places = {one.segment.nodes: one for one in traced}
    segments = tuple(evolve(s, source=places[s.nodes].source.key) if s.nodes in places else s for s in program.segments)
    sources = (*program.sources, *(one.source for one in traced))
    return evolve(program, segments=segments, sources=sources), {one.source.digest: one.kernel for one in traced}


def _captured(session: Session, program: Program, kernels: Mapping[str, Kernel]) -> Callable[[], None]:
    """One step of a version of a program, as the session would replay it; from Python where the backend records no graphs."""
    bound = session.variant(program, kernels)
    session.position.fill_(1)
    found = session.capture(bound.run, warm_ups=WARM_UPS)
    return bound.run if isinstance(found, Reject) else found


@contextmanager
def _as_before(session: Session) -> Iterator[None]:
    """Tokens, position and states of fixed size are afterwards what they were; rows of caches are not: a prompt writes them anew."""
    kept = {name: tensor.clone() for name, tensor in session.states.items() if not name.startswith("kv.")}
    try:
        yield
    finally:
        for name, tensor in kept.items():
            session.states[name].copy_(tensor)


def _one_run(session: Session, step: Callable[[], None], traced: tuple[_Traced, ...], backend: Backend,
             position: int) -> Run:
    """Per traced step and launch what its blocks noted, in a step that follows another one at once."""
    session.position.fill_(position - 1)
    step()
    step()
    return tuple(backend.noted(backend.load(one.kernel), one.source) for one in traced)


def _token_us(session: Session, step: Callable[[], None], backend: Backend, position: int) -> float:
    samples: list[float] = []
    for _ in range(TIMED):
        session.position.fill_(max(0, min(position, session.max_context - TIMED_RUNS - 1)))
        samples += backend.time_from_host(lambda stream: step(), repetitions=1, runs_per_repetition=TIMED_RUNS)
    return statistics.median(samples)


def _launches(traced: tuple[_Traced, ...], runs: list[Run], position: int, target: Target) -> tuple[TracedLaunch, ...]:
    """Every launch of the traced steps, with the medians of all runs."""
    starts, found = [_start_ns(run) for run in runs], []
    for index, one in enumerate(traced):
        for number, launch in enumerate(one.source.launches):
            nbytes = _bytes(one.segment.match, position) if number == 0 else 0
            shown = medians([phase_times(run[index][number], PHASES, start) for run, start in zip(runs, starts, strict=True)])
            found.append(TracedLaunch(step=str(one.segment.step), label=one.segment.label, layer=one.layer, blocks=math.prod(launch.grid),
                                      nbytes=nbytes, floor_us=target.floor_us(nbytes), phases=shown))
    return tuple(found)


def _start_ns(run: Run) -> int:
    """Where the time line begins: when the first step was released, in the mean; else when it started."""
    times = [block[RELEASED] or block[0] for block in run[0][0]]
    return round(statistics.fmean(times))


def _layer_us(launches: tuple[TracedLaunch, ...], layer: int) -> float:
    inside = [launch for launch in launches if launch.layer == layer]
    behind = next((launch.at("released") or launch.at("start") for launch in launches if launch.layer not in (layer, OUTSIDE)), None)
    ends = [end.most_us for launch in inside if (end := launch.at("end")) is not None]
    return behind.mean_us if behind is not None else max(ends, default=0.0)


def _bytes(match: Match | None, position: int) -> int:
    """What a step must move at a position: of caches the rows that it attends to, of everything else all of it."""
    if match is None:
        return 0
    numbers = dict(match.attributes)
    capacity, window, chunk, counted = (int(numbers.get(name, 0)) for name in ("capacity", "window", "chunk", "state_bytes"))
    rows = min(position + 1, capacity, window or capacity, position % chunk + 1 if chunk else capacity)
    caches = [o.spec for o in match.operands if o.role is Role.STATE and capacity and o.spec.shape[1:2] == (capacity,)]
    return match.bytes_moved + (sum(spec.nbytes // capacity * rows for spec in caches) - counted if caches else 0)
