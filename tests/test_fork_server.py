"""What workers are forked from: children are new, are killed and reaped, and end with whoever wanted them."""

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.processes import fork_server
from agentcompile_core.processes.fork_server import Forked, ForkServer
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Job, Worker, WorkerLost

SERVER = """
import os, signal, sys, time
from agentcompile_core.processes.fork_server import serve
seen = []

def run(arguments):
    seen.append(os.getpid())
    what, *rest = arguments
    print(what, len(seen), os.getpgid(0) == os.getpid(), signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, flush=True)
    if what == "exit":
        raise SystemExit(int(rest[0]))
    if what == "die":
        os.kill(os.getpid(), int(rest[0]))
    if what == "raise":
        raise ValueError("as it was told")
    if what == "echo":
        print(sys.stdin.readline().strip(), flush=True)
    if what == "hang":
        os.fork() or time.sleep(600)
        time.sleep(600)

serve(int(sys.argv[1]), run, idle_s=%s)
"""


def started(idle_s: float = 60.0) -> ForkServer:
    return ForkServer((sys.executable, "-c", SERVER % idle_s), dict(os.environ))


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = started()
    yield made
    made.close()


def forked(server: ForkServer, *arguments: str, said: str = "") -> tuple[Forked, int]:
    """A child, and the descriptor from which its output comes."""
    (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
    os.write(ours_in, said.encode())
    child = server.fork(arguments, theirs_in, theirs_out, theirs_out)
    for descriptor in (theirs_in, ours_in, theirs_out):
        os.close(descriptor)
    return child, ours_out


def output(descriptor: int) -> str:
    with os.fdopen(descriptor) as file:
        return file.read()


def group_is_gone(pid: int) -> bool:
    """Within seconds: the leader is reaped when it was waited for, but who inherits its children takes its time."""
    end = time.monotonic() + 20.0
    while _runs_in_group(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not Path(f"/proc/{pid}").exists() and not _runs_in_group(pid)


def _runs_in_group(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


@settings(max_examples=15)
@given(st.lists(st.sampled_from([("exit", 0), ("exit", 7), ("die", 9), ("die", 11), ("raise", 1)]), min_size=1, max_size=4))
def test_every_child_is_new_and_its_end_is_told(server: ForkServer, ends: list[tuple[str, int]]) -> None:
    children = [forked(server, what, str(number)) for what, number in ends]
    for (child, out), (what, number) in zip(children, ends, strict=True):
        assert child.wait(20.0) == (-number if what == "die" else number)
        text = output(out)
        assert text.splitlines()[0] == f"{what} 1 True True" and ("ValueError: as it was told" in text) == (what == "raise")
        pid = child.pid
        child.kill_group()
        assert group_is_gone(pid)


def test_a_child_reads_and_writes_what_it_was_given(server: ForkServer) -> None:
    child, out = forked(server, "echo", said="to be said again\n")
    assert child.wait(20.0) == 0 and output(out).splitlines()[1:] == ["to be said again"]
    child.kill_group()


def test_killing_reaches_the_children_of_a_child_and_waits(server: ForkServer) -> None:
    child, out = forked(server, "hang")
    os.read(out, 1)  # it runs
    pid = child.pid
    assert child.poll() is None
    child.kill_group()
    assert child.poll() == -signal.SIGKILL and group_is_gone(pid)
    child.kill_group()  # again: nothing
    os.close(out)


def test_who_is_killed_before_it_is_forked_never_lasts(server: ForkServer) -> None:
    for _ in range(20):
        child, out = forked(server, "hang")
        child.kill_group()
        assert output(out).count("hang") <= 2  # its output ends: nobody holds it


def test_a_server_that_nobody_asks_ends_and_says_so() -> None:
    idle = started(idle_s=0.3)
    child, out = forked(idle, "exit", "0")
    assert child.wait(20.0) == 0
    child.kill_group()
    os.close(out)
    end = time.monotonic() + 20.0
    while not idle.ended and time.monotonic() < end:
        time.sleep(0.05)
    assert idle.ended
    with pytest.raises(OSError):
        forked(idle, "exit", "0")
    idle.close()


def test_children_end_with_their_server_and_the_server_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed leaves neither."""
    code = textwrap.dedent(f"""
        import os, sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_fork_server import started, forked
        server = started()
        child, out = forked(server, "hang")
        os.read(out, 1)
        print(server._process.pid, child.pid, flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 20.0
    while any(not _ended(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(pids) == 2 and all(_ended(pid) for pid in pids)


def _ended(pid: int) -> bool:
    """Gone, or a zombie that waits for whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


CATALOG = "agentcompile_core.testing.doubles:catalog"
PID = "agentcompile_core.testing.calls:pid"


@pytest.fixture
def own_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that nobody else holds: those of the other tests are not ours to kill."""
    monkeypatch.setattr(fork_server, "_servers", {})
    monkeypatch.setattr(fork_server, "_keeping", 0)


def killed_server(worker: Worker) -> tuple[ForkServer, int]:
    """The server of the worker, which is killed, and the pid of the child that was lost with it."""
    child = worker.call(PID, None, deadline_s=60.0)
    lost = worker._server
    assert lost is not None
    os.kill(lost._process.pid, signal.SIGKILL)
    while not _ended(child):
        time.sleep(0.01)
    return lost, child


@pytest.mark.usefixtures("own_servers")
def test_a_server_lost_between_two_calls_costs_nothing() -> None:
    with Worker(catalog=CATALOG, builders=1) as worker:
        lost, first = killed_server(worker)
        assert worker.call(PID, None, deadline_s=60.0) != first and worker._server is not lost
        step = Step(match_id="elementwise:add+1:add", implementation="doubles/fake_family", origin=Origin.GENERATED,
                    schedule=Schedule({"behave": "honest"}))
        job = Job(trial=doubles.fake_trial("honest"), step=step, backend="fake", validators=("simple",))
        assert [evaluation.failure for _, evaluation in worker.evaluate([job])] == [None]
        killed_server(worker)
        assert [evaluation.failure for _, evaluation in worker.evaluate([job])] == [None]  # it is not to blame


@pytest.mark.usefixtures("own_servers")
def test_a_server_lost_during_a_call_costs_that_call_and_the_next_one_starts() -> None:
    with Worker(catalog=CATALOG, builders=1) as worker:
        worker.call(PID, None, deadline_s=60.0)
        lost = worker._server
        assert lost is not None
        killer = threading.Timer(0.5, os.kill, (lost._process.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(WorkerLost, match="SIGKILL"):
            worker.call("agentcompile_core.testing.calls:sleep", 60.0, deadline_s=90.0)
        killer.join()
        worker.call(PID, None, deadline_s=60.0)
        assert worker._server is not lost


def test_what_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a broken torch')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with Worker(catalog=CATALOG, builders=1) as worker, pytest.raises(WorkerLost, match=r"does not start: (?s:.)*a broken torch"):
        worker.call("agentcompile_core.testing.calls:pid", None, deadline_s=60.0)


@settings(max_examples=20)
@given(data=st.data())
def test_servers_live_as_long_as_they_are_held_or_a_few_are_kept(data: st.DataObject) -> None:
    """Over any order of holding and releasing, by environment."""
    command, keep = (sys.executable, "-c", "input()"), data.draw(st.booleans(), label="keep")
    with pytest.MonkeyPatch.context() as patch, fork_server.keeping() if keep else contextlib.nullcontext():
        patch.setattr(fork_server, "_servers", {})
        patch.setattr(fork_server, "_keeping", int(keep))
        patch.setattr(fork_server, "ForkServer", Held)
        held: list[tuple[str, Held]] = []
        for _ in range(data.draw(st.integers(1, 12), label="steps")):
            if held and data.draw(st.booleans(), label="release"):
                fork_server.release(held.pop(data.draw(st.integers(0, len(held) - 1), label="which"))[1])  # type: ignore[arg-type]
            else:
                name = data.draw(st.sampled_from("abcde"), label="environment")
                held.append((name, fork_server.hold(command, {"NAME": name})))  # type: ignore[arg-type]
            alive = list(fork_server._servers.values())
            wanted = {id(server) for _, server in held}
            assert wanted <= {id(server) for server in alive} and not any(server.ended for server in alive)
            assert all({id(s) for n, s in held if n == name} == {id(server)} for name, server in held)
            assert len(alive) <= max(len(wanted), fork_server.MOST_KEPT if keep else 0)


class Held:
    """A server in name only."""

    def __init__(self, command: object, environment: object) -> None:
        self.holders, self.ended = 0, False

    def close(self) -> None:
        self.ended = True


def test_who_waits_looks_again_where_another_thread_read_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a child is said once: the other of two threads waited a minute for it."""
    ours, theirs = socket.socketpair()
    child, poll = Forked(ours), select.poll

    class Late:
        """Another thread reads all of it between the look and the wait of this one."""

        def __init__(self) -> None:
            self._poller = poll()
            self.register = self._poller.register

        def poll(self, most_ms: float) -> list[tuple[int, int]]:
            if most_ms:
                monkeypatch.setattr(select, "poll", poll)
                theirs.send(struct.pack("<ii", 4711, 3))
                assert child.poll() == 3
            return self._poller.poll(most_ms)

    monkeypatch.setattr(select, "poll", Late)
    began = time.monotonic()
    assert child.wait() == 3 and time.monotonic() - began < 5.0
    theirs.close()
    ours.close()
