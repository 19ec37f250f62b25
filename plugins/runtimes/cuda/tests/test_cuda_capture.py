"""How the backend captures, seen by a torch.cuda that only writes down what it is asked: no GPU needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from agentcompile_runtime_cuda import capturing
from agentcompile_runtime_cuda.backend import CudaBackend

from agentcompile_core.plugin_api import Reject


class Stream:
    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self.cuda, self.name, self.cuda_stream = cuda, name, sum(map(ord, name))

    def wait_stream(self, other: "Stream") -> None:
        self.cuda.seen.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.cuda.seen.append(f"host waits for {self.name}")


class Graph:
    def __init__(self, cuda: "FakeCuda") -> None:
        self.cuda = cuda

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert self.cuda.current.name != "default" and not self.cuda.capturing
        self.cuda.capturing = True
        self.cuda.seen.append(f"begin on {self.cuda.current.name}, pool {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self.cuda.capturing = False
        self.cuda.seen.append("end")
        if self.cuda.broken:
            self.cuda.broken = False
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nCompile with ...")

    def replay(self) -> None:
        self.cuda.seen.append(f"replay on {self.cuda.current.name}")


class FakeCuda:
    """Stands for torch.cuda, and for what its allocator is told. ``free``: bytes of the device, ``cached``: of torch."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.streams = self.pools = 0
        self.capturing = self.broken = self.lost = False
        self.free, self.cached = 2 * capturing.SPARE_BYTES, 0
        self.current = Stream(self, "default")

    def make_stream(self) -> Stream:
        self.streams += 1
        return Stream(self, f"stream {self.streams}")

    def make_pool(self) -> str:
        self.pools += 1
        return f"p{self.pools}"

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self) -> None:
        self.seen.append("host waits for the device")
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name, value in {"Stream": fake.make_stream, "stream": fake.on, "current_stream": lambda: fake.current,
                        "CUDAGraph": lambda: Graph(fake), "graph_pool_handle": fake.make_pool, "synchronize": fake.synchronize,
                        "mem_get_info": lambda: (fake.free, 1 << 40), "current_device": lambda: 3,
                        "memory_stats_as_nested_dict": lambda: {"reserved_bytes": {"all": {"current": fake.cached}},
                                                                "allocated_bytes": {"all": {"current": 0}}},
                        "empty_cache": lambda: fake.seen.append("cache emptied")}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, word in (("_cuda_endAllocateToPool", "ended"), ("_cuda_releasePool", "released")):
        monkeypatch.setattr(torch._C, name, lambda device, pool, word=word: fake.seen.append(f"{word} {pool} on {device}"), raising=False)
    monkeypatch.setattr(capturing, "_forget_workspaces", lambda: fake.seen.append("workspaces dropped"))
    monkeypatch.setattr(CudaBackend, "available", lambda self: True)
    return fake


class Owner:
    pass


def test_graphs_of_one_owner_share_a_stream_and_a_pool_and_own_their_workspaces(cuda: FakeCuda) -> None:
    backend, owner, other = CudaBackend(), Owner(), Owner()
    replay = backend.capture(lambda: cuda.seen.append(f"run on {cuda.current.name}"), warm_ups=1, runs=2, owner=owner)
    assert cuda.seen == [
        "stream 1 waits for default", "run on stream 1", "host waits for stream 1", "workspaces dropped",
        "begin on stream 1, pool p1, thread_local", "run on stream 1", "run on stream 1", "end", "default waits for stream 1"]
    for one in (owner, other):
        backend.capture(lambda: None, owner=one)
    assert [s.split(", thread")[0] for s in cuda.seen if s.startswith("begin")] == [
        "begin on stream 1, pool p1", "begin on stream 1, pool p1", "begin on stream 2, pool p2"]
    replay()
    assert cuda.seen[-1] == "replay on default" and cuda.current.name == "default"


class ForeignError(Exception):
    """What a library that is not torch raises."""


def test_a_capture_that_lacks_memory_is_made_once_more_behind_an_emptied_cache(cuda: FakeCuda) -> None:
    def run(emptied: int = 1) -> None:
        if cuda.capturing and cuda.seen.count("cache emptied") < emptied:
            raise torch.OutOfMemoryError("CUDA out of memory")

    backend, owner = CudaBackend(), Owner()
    for one, fails in ((run, False), (lambda: run(3), True)):
        cuda.seen.clear()
        assert isinstance(backend.capture(one, owner=owner), Reject) is fails
        assert cuda.seen.count("cache emptied") == 1 and cuda.current.name == "default" and not cuda.capturing
    cuda.seen.clear()
    assert isinstance(backend.capture(run), Reject) and "cache emptied" not in cuda.seen, "what is timed and dropped may go without"


@pytest.mark.parametrize("cached", [0, 3])
def test_cached_memory_is_given_back_where_it_is_more_than_is_left(cuda: FakeCuda, cached: int) -> None:
    cuda.cached = cached * capturing.SPARE_BYTES
    assert not isinstance(CudaBackend().capture(lambda: None, owner=Owner()), Reject)
    assert cuda.seen.count("cache emptied") == (cached > 2)


@pytest.mark.parametrize(("owner", "short"), [(Owner(), True), (Owner(), False), (None, True)])
def test_cached_memory_is_given_back_before_a_capture_that_stays_where_little_is_left(cuda: FakeCuda, owner: Any, short: bool) -> None:
    cuda.free = capturing.SPARE_BYTES - short
    assert not isinstance(CudaBackend().capture(lambda: None, owner=owner), Reject)
    assert cuda.seen.count("cache emptied") == (short and owner is not None)


def test_an_owner_that_is_gone_leaves_nothing(cuda: FakeCuda) -> None:
    backend = CudaBackend()
    backend.capture(lambda: None, owner=Owner())
    assert len(backend._captures._places) == 0


def test_what_is_timed_and_dropped_empties_no_cache_and_shares_nothing(cuda: FakeCuda) -> None:
    backend = CudaBackend()
    for _ in range(2):
        assert not isinstance(backend.capture(lambda: None, warm_ups=1), Reject)
    begun = [s for s in cuda.seen if s.startswith("begin")]
    assert begun == ["begin on stream 1, pool p1, thread_local", "begin on stream 2, pool p2, thread_local"]
    assert not {"cache emptied", "workspaces dropped"} & set(cuda.seen)


@pytest.mark.parametrize("kind", [RuntimeError, ForeignError])
@pytest.mark.parametrize("owner", [None, Owner()], ids=["timed", "kept"])
def test_what_cannot_be_captured_is_rejected_with_the_generator_settled_and_the_stream_restored(cuda: FakeCuda, owner: Any,
                                                                                               kind: type[Exception]) -> None:
    def run() -> None:
        cuda.broken = True
        raise kind("operation not permitted when stream is capturing\nmore")

    answer = CudaBackend().capture(run, owner=owner)
    assert isinstance(answer, Reject) and answer.reason.startswith("cannot be captured into a CUDA graph: RuntimeError: ")
    assert "operation not permitted" in answer.reason and ("previous error during capture" in answer.reason) is (kind is ForeignError)
    assert "\n" not in answer.reason and cuda.current.name == "default" and not cuda.capturing
    assert cuda.seen[-3:] == ["host waits for the device", "begin on stream 2, pool p2, thread_local", "end"], "an empty graph settles it"
    assert cuda.seen[-6:-3] == ["end", "ended p1 on 3", "released p1 on 3"], "and its allocator records to the pool no more"


@pytest.mark.parametrize("owner", [None, Owner()], ids=["timed", "kept"])
def test_a_defect_of_the_program_passes_and_a_lost_device_is_no_matter_of_capturing(cuda: FakeCuda, owner: Any) -> None:
    backend = CudaBackend()
    with pytest.raises(KeyError, match="a defect"):
        backend.capture(lambda: {}["a defect"], owner=owner)
    with pytest.raises(ZeroDivisionError):
        backend.capture(lambda: 1 // 0, warm_ups=1, owner=owner)

    def breaks() -> None:
        cuda.lost = True
        raise RuntimeError("any")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        backend.capture(breaks, owner=owner)
    assert cuda.current.name == "default"


def test_timing_captures_the_same_way_and_repeats_replays(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Stream) -> None:
            assert stream is cuda.current

        def elapsed_time(self, end: "Event") -> float:
            return 0.006

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: cuda.seen.append("sleep"), raising=False)
    handles: list[int] = []
    times = CudaBackend().time(handles.append, repetitions=4, runs_per_repetition=3)
    assert times == (2.0,) * 4, "milliseconds of three runs as microseconds of one"
    assert handles == [Stream(cuda, "stream 2").cuda_stream] * 4, "one warm-up and three runs, told the stream that is captured"
    assert [s for s in cuda.seen if s.startswith("replay")] == ["replay on stream 1"] * 7 and "cache emptied" not in cuda.seen

    def refuses(stream: int) -> None:
        if cuda.capturing:
            raise RuntimeError("not while capturing")

    answer = CudaBackend().time(refuses, repetitions=1, runs_per_repetition=1)
    assert isinstance(answer, Reject) and "cannot be captured" in answer.reason
    answer = CudaBackend().time(lambda stream: (_ for _ in ()).throw(RuntimeError("bad launch")), repetitions=1, runs_per_repetition=1)
    assert isinstance(answer, Reject) and "bad launch" in answer.reason
