"""The fixed timing protocol: a captured graph, warm-ups, CUDA events around each repetition, one synchronization."""

from collections.abc import Callable

from agentcompile_core.plugin_api import Reject

from .capturing import Captures, first_line, settle_generator

WARM_UPS = 3
HOST_US_PER_REPLAY = 40.0  # generous: the host must be ahead of the device when the first event is reached
CLOCK_MHZ = 2000.0


def time_captured(run: Callable[[int], None], repetitions: int, runs_per_repetition: int, captures: Captures) -> tuple[float, ...] | Reject:
    """Microseconds per run of each repetition.

    ``run`` is called ``runs_per_repetition`` times during the capture: one that takes other weights at each call is
    timed with cold caches.
    """
    import torch

    if repetitions < 1 or runs_per_repetition < 1:
        return Reject(f"{repetitions} repetitions of {runs_per_repetition} runs: both must be at least 1")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):  # lazy work of a first call may not happen inside a capture
            replay = captures(lambda: run(torch.cuda.current_stream().cuda_stream), warm_ups=1, runs=runs_per_repetition, owner=None)
    except RuntimeError as exc:
        settle_generator()  # raises where the device itself is broken: that is no matter of capturing
        return Reject(f"cannot be captured into a CUDA graph: {first_line(exc)}")
    if isinstance(replay, Reject):
        return replay
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            replay()
        # Work that keeps the device busy while everything is enqueued, so that no repetition waits for the host.
        torch.cuda._sleep(int(CLOCK_MHZ * HOST_US_PER_REPLAY * (repetitions + 1)))
        for start, end in events:
            start.record(stream)
            replay()
            end.record(stream)
    stream.synchronize()
    return tuple(start.elapsed_time(end) * 1e3 / runs_per_repetition for start, end in events)


def time_eagerly(run: Callable[[int], None], repetitions: int, runs_per_repetition: int) -> tuple[float, ...]:
    """Microseconds per run by events around launches on the current stream; includes what the host costs."""
    import torch

    times = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(runs_per_repetition):
            run(0)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / runs_per_repetition)
    return tuple(times)
