"""The fixed timing protocol: copies of the operands in rotation, so that weights come from memory and not from the L2.

Median over repetitions of one repetition's time per run; the spread is half the distance between the 10th and the 90th
percentile. The framework is timed in the same way, over the same copies.
"""

import math
import statistics
from collections.abc import Callable

from attrs import evolve, frozen
from torch import Tensor

from ..errors import Reject
from ..ir.record import Measurement
from ..ir.region import Operand, Role
from ..ir.target import Target
from ..ir.verdict import Case, Trial
from ..ops.interpreter import compile_nodes
from ..plugin.interfaces import Backend
from ..plugin.match_kind import MatchKind
from .buffers import GIVEN, Buffers
from .execution import Execution
from .operands import graph_values, make_inputs

REPETITIONS = 25
SCREENING = 5
RUNS = 20  # at the least, per repetition
MAX_COPIES = 64
FEW_COPIES = 4  # where rotation cannot exceed the L2 anyway
COPY_BYTES = 6 << 30  # of all copies together
TOO_FAST = 0.9  # of the physical floor, with cold data
HOPELESS = 2.0  # times the best so far: not timed to the end
HISTORY_SLACK = 1 << 15  # elements: a decode state that moves on at every timed run needs room


@frozen(kw_only=True, eq=False)
class Rotation:
    """Copies of a trial's operands, all with the same contents. ``cold``: together they exceed the L2 twice."""

    copies: tuple[Buffers, ...]
    cold: bool
    case: Case


def copies_needed(trial: Trial, target: Target) -> tuple[int, bool]:
    """How many copies keep the weights cold, and whether that many are affordable."""
    big = sum(o.spec.nbytes for o in trial.match.operands if o.role in (Role.WEIGHT, Role.CONSTANT))
    held = sum(o.spec.nbytes for o in trial.match.operands if o.role is Role.STATE)  # what is read and written is there once
    big += min(int(trial.match.attribute("state_bytes", 0)), held) - int(trial.match.attribute("unread_bytes", 0))
    stored = sum(o.spec.nbytes for o in trial.match.operands)
    wanted = math.ceil(2 * target.l2_bytes / max(big, 1)) + 1
    allowed = max(2, min(MAX_COPIES, COPY_BYTES // max(stored, 1)))
    cold = wanted <= allowed
    return (wanted if cold else min(allowed, FEW_COPIES)), cold


def rotation(trial: Trial, kind: MatchKind, case: Case, device: str) -> Rotation:
    """Make the copies and fill them with the inputs of ``case``."""
    count, cold = copies_needed(trial, trial.target)
    copies: list[Buffers] = []
    for _ in range(count):
        buffers = Buffers(roomy(trial, kind), device)
        if copies:
            buffers.fill_from(copies[0])
            for name, tensor in buffers.tensors(Role.STATE).items():
                tensor.copy_(copies[0].operands[name].tensor)
        else:
            make_inputs(buffers.trial.match, kind, case, device, into=buffers.tensors(*GIVEN))
        copies.append(buffers)
    return Rotation(copies=tuple(copies), cold=cold, case=case)


def roomy(trial: Trial, kind: MatchKind) -> Trial:
    """The trial with room behind the states that grow by one element at every run, as the kind says."""
    def grown(operand: Operand) -> Operand:
        said = kind.operand(operand.name)
        if operand.role is not Role.STATE or said is None or not said.grows:
            return operand
        return evolve(operand, spec=evolve(operand.spec, shape=(operand.spec.numel + HISTORY_SLACK,)))

    return evolve(trial, match=evolve(trial.match, operands=tuple(grown(o) for o in trial.match.operands)))


def time_kernel(execution: Execution, turn: Rotation, good_enough_us: float = 0.0) -> Measurement | Reject:
    """Time the launches of an execution over the copies; a hopeless one only a few times.

    What no captured graph may hold is timed as it will run, launch by launch from the host.
    """
    runs = [execution.prepared(buffers) for buffers in turn.copies]
    if not execution.capturable and execution.backend.captures:
        return _time_eagerly(execution.backend, in_rotation(runs), len(runs), floor_us(execution.trial))
    return _time(execution.backend, in_rotation(runs), len(runs), floor_us(execution.trial), good_enough_us)


def time_framework(trial: Trial, backend: Backend, turn: Rotation, kernel_us: float = 0.0) -> Measurement | Reject:
    """Time the framework's operators of the same nodes over the same copies, captured in a graph where that is possible.

    Where they take more than twice as long as ``kernel_us``, a few times are enough to know.
    """
    prepared = compile_nodes(trial.graph, device=backend.device)
    bound = []
    for buffers in turn.copies:
        values = graph_values(trial.match, trial.graph, _plain_history(trial, buffers))
        bound.append(prepared.bind(values))
    runs = [_ignoring_the_stream(run) for run in bound]
    measured = _time(backend, in_rotation(runs), len(runs), floor_us(trial), kernel_us)
    if isinstance(measured, Reject) and backend.captures:
        return _time_eagerly(backend, in_rotation(runs), len(runs), floor_us(trial))
    return measured


def _plain_history(trial: Trial, buffers: Buffers) -> dict[str, Tensor]:
    tensors = buffers.tensors()
    return {o.name: tensors[o.name].reshape(-1)[: o.spec.numel].view(o.spec.shape) for o in trial.match.operands}


def _ignoring_the_stream(run: Callable[[], object]) -> Callable[[int], None]:
    def on_current_stream(stream: int) -> None:
        run()

    return on_current_stream


def in_rotation(runs: list[Callable[[int], None]]) -> Callable[[int], None]:
    """A run that takes the next copy at each call."""
    position = 0

    def run(stream: int) -> None:
        nonlocal position
        runs[position](stream)
        position = (position + 1) % len(runs)

    return run


def floor_us(trial: Trial) -> float:
    """The time that the bytes of the match need at the device's bandwidth."""
    return trial.target.floor_us(trial.match.bytes_moved)


def _time(backend: Backend, run: Callable[[int], None], copies: int, floor: float, good_enough_us: float) -> Measurement | Reject:
    per_repetition = math.ceil(RUNS / copies) * copies
    if good_enough_us:
        first = backend.time(run, repetitions=SCREENING, runs_per_repetition=per_repetition)
        if isinstance(first, Reject):
            return first
        quick = summarize(first, floor)
        if isinstance(quick, Reject) or quick.us - quick.spread_us > HOPELESS * good_enough_us:  # whatever one of a few was
            return quick
    times = backend.time(run, repetitions=REPETITIONS, runs_per_repetition=per_repetition)
    return times if isinstance(times, Reject) else summarize(times, floor)


def _time_eagerly(backend: Backend, run: Callable[[int], None], copies: int, floor: float) -> Measurement | Reject:
    """Launched from the host, for what cannot be captured; includes what the host costs. Two repetitions warm up."""
    times = backend.time_from_host(run, repetitions=SCREENING + 2, runs_per_repetition=math.ceil(RUNS / copies) * copies)
    return summarize(times[2:], floor)


def summarize(times: tuple[float, ...], floor: float) -> Measurement | Reject:
    """Median and spread, or why the timings cannot be true."""
    if not times or not all(math.isfinite(t) and t > 0.0 for t in times):
        return Reject(f"the backend reported impossible timings: {times[:3]}")
    ordered = sorted(times)
    low, high = ordered[int(0.1 * (len(ordered) - 1))], ordered[math.ceil(0.9 * (len(ordered) - 1))]
    return Measurement(us=statistics.median(ordered), spread_us=(high - low) / 2, repetitions=len(ordered), floor_us=floor)
