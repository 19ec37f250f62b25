"""What a fork and this process have in common beyond a copy of memory stays as it is: shared memory, open files, alarms."""

import logging
import mmap
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from remembering import Module, X, Y, compiled
from torch import nn

from agentcompile_core.processes import unshared
from agentcompile_core.processes.forked import ForkedCall, NothingSaid
from agentcompile_core.stages.capture import forked_calls


def test_a_buffer_in_shared_memory_is_as_it_was() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x.mean() + 1)
            return x - self.total

    module = Counting().eval().share_memory()
    made = compiled(module)
    assert "called with before" in made.graphs.eager_reason and not module.total
    assert torch.equal(made(Y), Y - Y.mean() - 1) and module.total.is_shared()


def test_numbers_in_shared_memory_are_asked_for_and_as_they_were() -> None:
    shared, mapped = torch.zeros(1).share_memory_(), mmap.mmap(-1, 4096)

    def in_a_tensor(x: torch.Tensor) -> torch.Tensor:
        shared.add_((shared == 0) * x.max())
        return shared.clone()

    def in_a_map(x: torch.Tensor) -> torch.Tensor:
        if not mapped[0]:
            mapped[0] = 1 + int(x.max() > 5)
        return torch.full((), float(mapped[0]))

    for kept, wanted in ((in_a_tensor, Y.max()), (in_a_map, 2.0)):
        made = compiled(Module(kept))
        assert "called with before" in made.graphs.eager_reason
        assert torch.equal(made(Y), Y - wanted)
    mapped.close()


def test_a_fork_that_ends_with_a_lock_of_processes_leaves_it_open() -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    here = os.getpid()

    def kept(x: torch.Tensor) -> torch.Tensor:
        with lock:
            if os.getpid() != here:
                time.sleep(60)
            return x.mean()

    compiled(Module(kept))
    assert lock.acquire(timeout=1)


def test_more_shared_memory_than_is_copied_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = mmap.mmap(-1, 1 << 16)
    monkeypatch.setattr(unshared, "MOST_BYTES", 1 << 12)
    with pytest.raises(NothingSaid, match="ended"), ForkedCall(lambda: b"", time.monotonic() + 20) as fork:
        fork.result()
    mapped.close()


def test_a_file_that_is_read_is_read_on_from_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(range(100)))
    with path.open("rb", buffering=0) as rows:
        made = compiled(Module(lambda x: torch.full((), float(rows.read(1)[0]))))
        assert rows.read(1) == b"\0" or not made.graphs.eager_reason.endswith("called with before")
        assert "before" in made.graphs.eager_reason


def test_what_a_fork_writes_to_a_file_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "log"
    handler = logging.FileHandler(path)
    handler.stream.write("before\n")  # and not written yet

    def says() -> bytes:
        handler.emit(logging.makeLogRecord({"msg": "in a fork"}))
        return b"said"

    with ForkedCall(says, time.monotonic() + 20) as fork:
        assert fork.result() == b"said"
    handler.close()
    assert path.read_text() == "before\n"


def test_an_alarm_of_ones_own_ends_a_compile() -> None:
    here = threading.get_native_id()

    def kept(x: torch.Tensor) -> torch.Tensor:
        if threading.get_native_id() != here:
            time.sleep(60)
        return x.mean()

    def stop(*_: object) -> None:
        raise TimeoutError("mine")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(TimeoutError, match="mine"):
            compiled(Module(kept))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_pool_of_threads_that_is_not_in_a_fork_costs_a_second() -> None:
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    began = time.monotonic()
    compiled(Module(lambda x: pool.submit(torch.mean, x).result()))
    assert time.monotonic() - began < forked_calls.ALONE_S + 8
    pool.shutdown()


def test_a_signal_handler_of_ones_own_is_not_called_in_a_fork(tmp_path: Path) -> None:
    called = tmp_path / "called"
    before = signal.signal(signal.SIGUSR1, lambda *_: called.write_text(str(os.getpid())))
    try:
        with ForkedCall(lambda: b"here", time.monotonic() + 20) as fork:
            assert fork.result() == b"here"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert called.read_text() == str(os.getpid())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert X.shape == (3, 4)
