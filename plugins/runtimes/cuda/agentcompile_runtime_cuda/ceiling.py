"""The measured read ceiling: the roofline that floors and published shares of bandwidth refer to."""

import functools
import statistics
from importlib import resources

from agentcompile_core.plugin_api import Access, DType, Launch, Reject, Role, StepSource, Target, UsageError, i64, pointer, serial

from .backend import CudaBackend

MAX_BYTES = 4 << 30
WORD_BYTES = 16
BLOCKS_PER_SM = (1, 2, 4, 8)
THREADS = (256, 512, 1024)


def ceiling_source(blocks: int, threads: int, count: int) -> StepSource:
    """The kernel that reads ``count`` 16-byte words with ``blocks`` blocks of ``threads`` threads."""
    code = resources.files(__package__).joinpath("read_ceiling.cu").read_text(encoding="utf-8")
    arguments = (pointer("data", Role.WEIGHT, DType.U8), pointer("sink", Role.OUTPUT, DType.I32, Access.WRITE),
                 i64("count", count))
    launch = Launch(entry="read_ceiling", grid=(blocks, 1, 1), block=(threads, 1, 1), arguments=arguments)
    return StepSource(digest=serial.digest(code), code=code, launches=(launch,))


@functools.cache
def read_ceiling_gbps(repetitions: int = 9) -> float:
    """The highest read bandwidth of the current CUDA device in 1e9 bytes per second, measured once per process.

    Reads a buffer of up to 4 GiB, a quarter of the free memory at the most, in twelve launch shapes; the best median of
    ``repetitions`` event timings counts.

    Raises:
        UsageError: there is no CUDA device, no compiler for it, or not enough free memory to leave the L2 cache.
    """
    backend = CudaBackend()
    target = _target(backend)
    import torch

    free, _ = torch.cuda.mem_get_info()
    count = min(MAX_BYTES, free // 4) // WORD_BYTES
    if count * WORD_BYTES < 8 * target.l2_bytes:
        raise UsageError(f"{free / 2**30:.1f} GiB of device memory are free; the read ceiling needs at least "
                         f"{32 * target.l2_bytes / 2**30:.1f} GiB; stop other programs on this GPU")
    data = torch.empty(count * WORD_BYTES // 8, dtype=torch.int64, device="cuda").random_()
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    handle = backend.load(backend.build(ceiling_source(1, 256, count), target))
    best = 0.0
    for per_sm in BLOCKS_PER_SM:
        for threads in THREADS:
            launch = ceiling_source(per_sm * target.sm_count, threads, count).launches[0]
            run = backend.prepare_launch(handle, launch, (data.data_ptr(), sink.data_ptr(), count), False)
            times = backend.time(run, repetitions=repetitions, runs_per_repetition=1)
            if isinstance(times, Reject):
                raise UsageError(f"the read ceiling cannot be measured: {times.reason}")
            best = max(best, count * WORD_BYTES / statistics.median(times) / 1e3)
    return best


def _target(backend: CudaBackend) -> Target:
    usable = backend.available()
    if isinstance(usable, Reject):
        raise UsageError(f"the read ceiling cannot be measured: {usable.reason}")
    target = backend.live_target()
    if target is None:
        raise UsageError("the read ceiling cannot be measured: the architecture of this GPU has no preset")
    buildable = backend.can_build(target)
    if isinstance(buildable, Reject):
        raise UsageError(f"the read ceiling cannot be measured: {buildable.reason}")
    return target
