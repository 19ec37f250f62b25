"""Timing as the public harness does it: a few runs to warm up, then each run alone on a cold L2, between two events; the mean."""

import statistics
import time
from collections.abc import Callable

import torch

WARM_UPS = 3
FLUSH_BYTES = 256 << 20


def mean_us(run: Callable[[], object], count: int, device: str) -> float:
    """Microseconds of one run, the mean of ``count``; the first timed one is left out."""
    for _ in range(WARM_UPS):
        run()
    samples = [(_on_device if device == "cuda" else _on_host)(run) for _ in range(count + 1)]
    return statistics.mean(samples[1:])


def _on_device(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda").fill_(7)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _on_host(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e6
