"""Calls in forks: what comes back, what does not, and that nothing of them stays."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from agentcompile_core.processes.forked import ForkedCall, NothingSaid

SOON_S = 0.3


def asked(call: Callable[[], bytes], limit_s: float = 20.0) -> bytes | None:
    with ForkedCall(call, time.monotonic() + limit_s) as fork:
        return fork.result()


def is_there(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("count", [0, 1, 70_000, 5_000_000])
def test_what_a_call_returns_comes_back(count: int) -> None:
    held = bytes(range(250)) * (count // 250 + 1)
    assert asked(lambda: held[:count]) == held[:count]


def test_what_a_call_changes_stays_there() -> None:
    kept: list[int] = []
    assert asked(lambda: bytes([kept.append(1) or len(kept)])) == b"\1"  # type: ignore[func-returns-value]
    assert not kept


def test_a_call_that_raises_has_no_result() -> None:
    assert asked(lambda: bytes(1 // len(()))) is None


@pytest.mark.parametrize("end", [lambda: os._exit(0), lambda: sys.exit(3), lambda: os.kill(os.getpid(), signal.SIGSEGV)])
def test_of_a_fork_that_ended_nothing_is_known(end: Callable[[], None]) -> None:
    with pytest.raises(NothingSaid, match="ended"):
        asked(lambda: end() or b"")  # type: ignore[func-returns-value]


def test_a_fork_that_takes_too_long_is_ended_and_what_it_started_too() -> None:
    read, write = os.pipe()

    def hangs() -> bytes:
        child = subprocess.Popen(["sleep", "60"])
        os.write(write, f"{os.getpid()} {child.pid}".encode())
        time.sleep(60)
        return b""

    with pytest.raises(NothingSaid, match="too long"):
        asked(hangs, SOON_S)
    assert not any(map(is_there, map(int, os.read(read, 100).split())))
    os.close(read)
    os.close(write)


def test_a_lock_that_another_thread_holds_hangs_for_no_longer_than_allowed() -> None:
    lock, is_held, may_end = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    with pytest.raises(NothingSaid, match="too long"):
        asked(lambda: lock.acquire() and b"", SOON_S)  # type: ignore[arg-type, return-value]
    may_end.set()
    thread.join()


def test_nothing_is_written_where_people_read(capfd: pytest.CaptureFixture[str]) -> None:
    def speaks() -> bytes:
        print("in a fork", flush=True)
        print("in a fork", file=sys.stderr, flush=True)
        os.system("echo in a fork")
        sys.stdout.buffer.write(b"in a fork")
        return b"said"

    print("before", end="")
    assert asked(speaks) == b"said"
    assert capfd.readouterr() == ("before", "")


def test_who_waits_may_be_stopped_and_nobody_stays() -> None:
    pids: list[int] = []

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SOON_S)
    try:
        with pytest.raises(TimeoutError), ForkedCall(lambda: time.sleep(60) or b"", time.monotonic() + 60) as fork:  # type: ignore[func-returns-value]
            pids.append(fork._pid)
            fork.result()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not is_there(pids[0])


def test_who_is_stopped_while_a_fork_begins_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pids, fork, descriptors = list[int](), os.fork, len(os.listdir("/proc/self/fd"))

    def stopped() -> int:
        pids.append(fork())
        if pids[0]:
            signal.raise_signal(signal.SIGUSR1)
        return pids[0]

    def stop(*_: object) -> None:
        raise TimeoutError("mine")

    before = signal.signal(signal.SIGUSR1, stop)
    monkeypatch.setattr(os, "fork", stopped)
    try:
        with pytest.raises(TimeoutError, match="mine"):
            asked(lambda: time.sleep(60) or b"")  # type: ignore[func-returns-value]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not is_there(pids[0]) and len(os.listdir("/proc/self/fd")) == descriptors


def test_a_program_that_reaps_every_child_gets_its_answers() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert asked(lambda: b"here") == b"here"
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_program_that_may_start_no_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise BlockingIOError("too many processes")

    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", none)
    with pytest.raises(NothingSaid, match="too many processes"):
        asked(lambda: b"")
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_another_system_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NothingSaid, match="on this system"):
        asked(lambda: b"")


def test_a_program_without_standard_streams_gets_its_answers() -> None:
    program = ("import os, time\nfrom agentcompile_core.processes.forked import ForkedCall\n"
               "os.close(0); os.close(1)\n"
               "with ForkedCall(lambda: b'here', time.monotonic() + 20) as fork:\n    os.write(2, fork.result())\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stderr == b"here"


def test_a_fork_from_another_thread_answers() -> None:
    found: list[bytes | None] = []
    thread = threading.Thread(target=lambda: found.append(asked(lambda: b"here")))
    thread.start()
    thread.join()
    assert found == [b"here"]
