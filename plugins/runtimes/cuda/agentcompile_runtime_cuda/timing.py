"""The fixed timing protocol: a captured graph, warm-ups, CUDA events around each repetition, one synchronization."""

from collections.abc import Callable

from agentcompile_core.errors import Reject

WARM_UPS = 3
HOST_US_PER_REPLAY = 40.0  # generous: the host must be ahead of the device when the first event is reached
CLOCK_MHZ = 2000.0


def time_captured(run: Callable[[int], None], repetitions: int, runs_per_repetition: int) -> tuple[float, ...] | Reject:
    """Microseconds per run of each repetition.

    ``run`` is called ``runs_per_repetition`` times during the capture: one that takes other weights at each call is
    timed with cold caches.
    """
    import torch

    if repetitions < 1 or runs_per_repetition < 1:
        return Reject(f"{repetitions} repetitions of {runs_per_repetition} runs: both must be at least 1")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            run(stream.cuda_stream)  # lazy work of a first call may not happen inside a capture
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(runs_per_repetition):
                run(stream.cuda_stream)
    except RuntimeError as exc:
        return Reject(f"cannot be captured into a CUDA graph: {str(exc).splitlines()[0]}")
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            graph.replay()
        # Work that keeps the device busy while everything is enqueued, so that no repetition waits for the host.
        torch.cuda._sleep(int(CLOCK_MHZ * HOST_US_PER_REPLAY * (repetitions + 1)))
        for start, end in events:
            start.record(stream)
            graph.replay()
            end.record(stream)
    stream.synchronize()
    return tuple(start.elapsed_time(end) * 1e3 / runs_per_repetition for start, end in events)
