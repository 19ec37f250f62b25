"""Signals: Ctrl-C once and twice, SIGKILL and SIGTERM, a closed pipe, a worker that is killed from outside."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from child_processes import children

from agentcompile_core.plugin.events import CandidateFinished
from agentcompile_core.processes import fork_server
from agentcompile_core.store import Store, care

from . import cheap
from .registry import add, fault
from .seen import right, told

AREA = "signals"
TINY = Path(__file__).parents[2] / "examples" / "tiny_model"
TESTS = Path(__file__).parents[1]
COMPILE = """
import sys
from pathlib import Path
from faults import cheap
from agentcompile_core.store import Store
from agentcompile_core.plugin.events import CandidateFinished, StageFinished
import time
root = Path(sys.argv[1])
def watch(event):
    if isinstance(event, CandidateFinished):
        print("candidate", flush=True)
        time.sleep(float(sys.argv[2]))
try:
    cheap.compiled(cheap.module(root), Store(root / "store"), family=cheap.Family("honest", "wrong", "nans", "unwritten"),
                   workers=cheap.HERE, report=watch)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


def _started(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.Popen([sys.executable, "-c", COMPILE, str(folder), *arguments], stdout=subprocess.PIPE, text=True, env=env,
                             stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    while child.stdout.readline().strip() != "candidate":
        assert child.poll() is None, "the compile ended before a candidate was evaluated"
    return child


def _resumed(folder: Path) -> str:
    """The next run finds what was evaluated, and its program is right."""
    store = Store(folder / "store")
    assert care.verify(store)["damaged"] == [] and store.describe()["records"] >= 1
    seen: list[Any] = []
    made = cheap.compiled(cheap.module(folder), store, family=cheap.Family("honest", "wrong", "nans", "unwritten"), workers=cheap.HERE,
                          report=seen.append)
    right(made)
    cached = sum(1 for event in seen if isinstance(event, CandidateFinished) and event.cached)
    assert cached >= 1
    return f"the next run used {cached} of its candidates again"


def _ends(number: signal.Signals, code: int) -> Any:
    def run(folder: Path) -> str:
        child = _started(folder, "10.0")
        child.send_signal(number)
        out, _ = child.communicate(timeout=60)
        assert child.returncode == code, child.returncode
        return f"exit status {code}{', ' + out.strip() if out.strip() else ''}; {_resumed(folder)}"

    return run


LEFT = "what was evaluated is in the cache, and the next run goes on from there"
add(AREA, "ctrl-c while candidates are evaluated", "SIGINT", _ends(signal.SIGINT, 130), LEFT)
add(AREA, "a compile that is killed", "SIGKILL", _ends(signal.SIGKILL, -9), LEFT)
add(AREA, "a compile that is terminated", "SIGTERM", _ends(signal.SIGTERM, -15), LEFT)


@fault(AREA, "SIGINT on the command line", "one sentence says what is kept; exit code 130")
def _ctrl_c_on_the_command_line(folder: Path) -> str:
    command = [sys.executable, "-m", "agentcompile_core.cli", "compile", str(cheap.module(folder)), "--device", "cpu", "--json"]
    env = {**os.environ, "AGENTCOMPILE_CACHE_DIR": str(folder / "cache")}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert child.stderr is not None
    child.stderr.readline()  # "... is executed": the handler is in place
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 130 and "Traceback" not in err and json.loads(out)["exit_code"] == 130, (out, err)
    return err.splitlines()[-1]


@fault(AREA, "SIGINT twice", "the process ended at once")
def _ctrl_c_twice(folder: Path) -> str:
    code = ("import time\nfrom agentcompile_core.cli.interrupt import in_order\n"
            "try:\n    with in_order():\n        try:\n            print('ready', flush=True)\n            time.sleep(60)\n"
            "        finally:\n            print('cleaning', flush=True)\n            time.sleep(60)\n"
            "except KeyboardInterrupt:\n    pass\n")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "cleaning\n"
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == -signal.SIGINT and time.monotonic() - began < 50
    return "the first began the clean-up, the second ended the process"


@fault(AREA, "the reader of standard output goes away", "no traceback")
def _a_closed_pipe(folder: Path) -> str:
    command = f"{sys.executable} -m agentcompile_core.cli config --json | true"
    done = subprocess.run(["/bin/bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return f"exit status {done.returncode}, and nothing on standard error"


def _worker_killed(find: Callable[[set[int]], set[int]]) -> Any:
    """A compile whose second candidate never ends, while ``find`` tells from the children that it has started which ones to kill."""
    def run(folder: Path) -> str:
        before, killed = children(), threading.Event()

        def kill(event: object) -> None:
            if isinstance(event, CandidateFinished) and not killed.is_set():
                for pid in find(children() - before):
                    os.kill(pid, signal.SIGKILL)
                    killed.set()

        # Servers of its own: those that are kept for other tests are not its to kill.
        with mock.patch.multiple(fork_server, _servers={}, _keeping=0):
            made = cheap.compiled(cheap.module(folder), Store(folder / "store"), family=cheap.Family("honest", "hang"),
                                  workers="agentcompile_core.testing.doubles:catalog", report=kill)
        right(made)
        assert killed.is_set() and children() <= before
        return told(made, "SIGKILL", folder)

    return run


LOST = "its candidate was lost, the program is right"
add(AREA, "the worker is killed from outside while it works", "SIGKILL",
    _worker_killed(lambda servers: {worker for server in servers for worker in children(server)}), LOST)
add(AREA, "what workers are forked from is killed while one works", "SIGKILL", _worker_killed(lambda servers: servers), LOST)


@fault(AREA, "the parent of a compiler process is killed", "the compiler ended by itself")
def _a_killed_parent_of_a_compiler(folder: Path) -> str:
    code = ("import sys, time\n"
            "from agentcompile_core.processes.toolchain import GuardedServer\n"
            "child = 'from agentcompile_core.processes.toolchain import serve; serve(lambda data: data)'\n"
            "server = GuardedServer([sys.executable, '-c', child])\nserver.request(b'x', 60.0)\nprint(server.pid, flush=True)\n"
            "time.sleep(60)\n")
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10.0
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()
    return "the compiler process ended with its parent"
