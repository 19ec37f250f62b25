"""One clock for all contenders: captured graphs over copies of the operands, cold caches, turns in alternating order, medians.

Every contender runs once per copy of its operands, in one CUDA graph; copies and results together are more than twice the L2,
and where they cannot be (64 copies of little) every copy is read once. Before each repetition twice the L2 is overwritten and
the device kept busy until the host has enqueued everything. Edges inside the graph are ordinary ones: no kernel begins before
the one before it has ended.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from agentcompile_core.plugin_api import Backend, Reject

REPETITIONS = 24
MOST_COPIES = 64
LEAST_RUNS = 16
COPIES_BYTES = 8 << 30
AHEAD_CYCLES = 400_000  # about 0.2 ms, in which the host enqueues a repetition
CPU_L2_BYTES = 1 << 12
Run = Callable[[], Any]


@frozen(kw_only=True)
class Timing:
    """Median and half the distance from the 10th to the 90th percentile, microseconds of one run; and all in the order of turns."""

    us: float
    spread_us: float
    samples_us: tuple[float, ...] = ()


def copies_of(nbytes: int, l2_bytes: int) -> int:
    """How many copies of ``nbytes`` are made: together more than twice the L2 where that is possible."""
    wanted = math.ceil(2 * l2_bytes / max(1, nbytes)) + 1
    return max(2, min(wanted, MOST_COPIES, max(2, COPIES_BYTES // max(1, nbytes))))


def measured(contenders: Mapping[str, Sequence[Run]], backend: Backend, l2_bytes: int,
             repetitions: int = REPETITIONS) -> dict[str, Timing | str]:
    """The timing of each contender, which has one run per copy; or why it has none.

    On a device without captured graphs (the CPU) runs are timed one by one by the host's clock.
    """
    if not backend.captures:
        return {name: timing_of([_seconds(run) * 1e6 for run in runs for _ in range(2)]) for name, runs in contenders.items()}
    found: dict[str, Timing | str] = {}
    replays: dict[str, tuple[Run, int]] = {}
    kept: list[list[Any]] = []
    for name, runs in contenders.items():
        times = max(1, math.ceil(LEAST_RUNS / len(runs))) if len(runs) < MOST_COPIES else 1
        kept.append([])
        replay = _captured(runs, times, backend, kept[-1])
        if isinstance(replay, str):
            found[name] = replay
        else:
            replays[name] = replay, times * len(runs)
    samples = _turns(replays, l2_bytes, repetitions)
    del replays, kept
    return found | {name: timing_of(taken) for name, taken in samples.items()}


def _captured(runs: Sequence[Run], times: int, backend: Backend, kept: list[Any]) -> Run | str:
    def all_of_them() -> None:
        kept.clear()
        for _ in range(times):
            kept.extend(run() for run in runs)  # results that are kept have memory of their own, as those of a program have

    try:
        for run in runs[:2]:
            run()  # whatever is made lazily
        torch.cuda.synchronize()
        replay = backend.capture(all_of_them, warm_ups=1)  # libraries make their workspaces before
    except Exception as exc:  # one contender says why it is not there, the others go on
        return f"{type(exc).__name__}: {' '.join(str(exc).split())[:200]}"
    return replay.reason if isinstance(replay, Reject) else replay


def _turns(replays: Mapping[str, tuple[Run, int]], l2_bytes: int, repetitions: int) -> dict[str, list[float]]:
    flush = torch.empty(2 * l2_bytes // 4, dtype=torch.int32, device="cuda")
    events: dict[str, list[Any]] = {name: [] for name in replays}
    for replay, _ in replays.values():
        for _ in range(2):
            replay()
    for repetition in range(repetitions):
        for name in sorted(replays, reverse=bool(repetition % 2)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.fill_(repetition)
            torch.cuda._sleep(AHEAD_CYCLES)
            start.record()
            replays[name][0]()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) * 1e3 / replays[name][1] for start, end in taken] for name, taken in events.items()}


def timing_of(samples: Sequence[float]) -> Timing:
    """Median and spread of microseconds."""
    ordered = sorted(samples)
    low, high = ordered[int(0.1 * (len(ordered) - 1))], ordered[math.ceil(0.9 * (len(ordered) - 1))]
    return Timing(us=statistics.median(ordered), spread_us=(high - low) / 2, samples_us=tuple(samples))


def _seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def copy_ceiling_gbps(repetitions: int = 9, nbytes: int = 1 << 30) -> float:
    """The highest bandwidth at which this GPU copies, bytes read plus bytes written: by its copy engine's kernel or a pointwise one."""
    source = torch.empty(nbytes // 4, dtype=torch.int32, device="cuda").random_()
    made = torch.empty_like(source)
    best = 0.0
    for run in (lambda: made.copy_(source), lambda: torch.bitwise_not(source, out=made)):
        samples = _turns({"copy": (run, 1)}, 1 << 20, repetitions)["copy"]
        best = max(best, 2 * nbytes / statistics.median(samples) / 1e3)
    return best
