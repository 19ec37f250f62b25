"""Guarded compiler processes: whatever a compiler does, it costs its own source, and nothing of it is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentcompile_core.errors import BuildError
from agentcompile_core.processes.toolchain import Completed, GuardedServer, run_guarded

PYTHON = sys.executable


def run(code: str, *arguments: str, deadline_s: float = 20.0, **options: object) -> Completed:
    return run_guarded([PYTHON, "-c", code, *arguments], deadline_s=deadline_s, **options)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_dead(pid: int) -> bool:
    end = time.monotonic() + 5
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


def test_output_and_exit_code_come_back() -> None:
    done = run("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_arguments_are_not_read_by_a_shell() -> None:
    nasty = "$(touch pwned); `id` ' \" \n *"
    assert run("import sys; sys.stdout.write(sys.argv[1])", nasty).stdout == nasty


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = ("import os, subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
            "time.sleep(60)")
    start = time.monotonic()
    with pytest.raises(BuildError, match=r"did not finish within 2 s and was killed"):
        run(code, deadline_s=2)
    assert time.monotonic() - start < 10
    assert all(wait_dead(int(pid)) for pid in pids.read_text().split())


def test_children_that_outlive_the_command_are_killed() -> None:
    code = ("import subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            "print(child.pid)")
    start = time.monotonic()
    done = run(code)
    assert done.returncode == 0 and time.monotonic() - start < 10
    assert wait_dead(int(done.stdout))


def test_memory_is_limited() -> None:
    code = "import sys\ntry:\n  bytearray(3 << 30)\nexcept MemoryError:\n  sys.exit(42)"
    assert run(code, memory_bytes=1 << 30).returncode == 42


def test_temporary_folder_is_private_and_removed() -> None:
    done = run("import os, tempfile; f = tempfile.mkdtemp(); open(f + '/left', 'w').close(); print(f); print(os.getcwd())")
    used, cwd = done.stdout.split()
    assert not Path(used).exists() and not Path(cwd).exists()
    assert Path(used).parent == Path(cwd) and "agentcompile-" in cwd


def test_secrets_do_not_reach_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    assert "canary" not in run("import os; print(dict(os.environ))", extra_env={"EXTRA": "given"}).stdout


def test_a_huge_log_is_cut() -> None:
    assert len(run("import sys; sys.stdout.write('x' * (5 << 20))").stdout) == 1 << 20


def test_a_missing_program_is_a_build_error_or_a_failed_command() -> None:
    done = run_guarded(["/no/such/compiler"], deadline_s=5)
    assert done.returncode == 127 and "no/such/compiler" in done.stderr


SERVER = """
import os, sys, time
from agentcompile_core.processes.toolchain import serve
print("noise on standard output must not disturb the protocol")
def answer(request):
    print("more noise")
    word = request.decode()
    if word == "pid":
        return str(os.getpid()).encode()
    if word == "tmp":
        return os.environ["TMPDIR"].encode()
    if word == "hang":
        time.sleep(60)
    if word == "die":
        sys.exit("the last words")
    if word == "close":
        os._exit(9)
    if word == "eat":
        bytearray(4 << 30)
    return request * 2
serve(answer)
"""


@pytest.fixture
def server():
    path = os.pathsep.join(entry for entry in sys.path if entry)
    made = GuardedServer([PYTHON, "-c", SERVER], memory_bytes=2 << 30, extra_env={"PYTHONPATH": path})
    yield made
    made.close()


def test_a_server_answers_many_requests_from_one_process(server: GuardedServer) -> None:
    big = b"x" * (3 << 20)  # more than a pipe holds, both ways
    assert server.request(big, 20) == big * 2
    assert server.request(b"", 20) == b""
    assert server.request(b"pid", 20) == server.request(b"pid", 20) == str(server.pid).encode()


def test_a_server_that_hangs_is_killed_and_replaced(server: GuardedServer) -> None:
    first = int(server.request(b"pid", 20))
    temporary = Path(server.request(b"tmp", 20).decode())
    assert temporary.is_dir()
    start = time.monotonic()
    with pytest.raises(BuildError, match=r"did not answer within 0.5 s and was killed"):
        server.request(b"hang", 0.5)
    assert time.monotonic() - start < 5 and wait_dead(first) and not temporary.exists()
    assert int(server.request(b"pid", 20)) != first


def test_a_server_that_dies_says_its_last_words(server: GuardedServer) -> None:
    with pytest.raises(BuildError, match=r"ended with code 1 .*the last words"):
        server.request(b"die", 20)
    with pytest.raises(BuildError, match=r"ended with code 9"):
        server.request(b"close", 20)
    assert server.request(b"ok", 20) == b"okok"


def test_a_server_that_eats_memory_fails_alone(server: GuardedServer) -> None:
    with pytest.raises(BuildError, match="MemoryError"):
        server.request(b"eat", 20)
    assert server.request(b"ok", 20) == b"okok"


def test_a_server_that_was_killed_between_requests_is_replaced(server: GuardedServer) -> None:
    first = int(server.request(b"pid", 20))
    os.kill(first, signal.SIGKILL)
    assert wait_dead(first)
    assert server.request(b"ok", 20) == b"okok"


PARENT = """
import os, sys, threading, time
from agentcompile_core.processes.toolchain import GuardedServer
server = GuardedServer([sys.executable, "-c", sys.argv[1]], extra_env={"PYTHONPATH": os.environ["PYTHONPATH"]})
print(server.request(b"pid", 20).decode(), flush=True)
server.request(b"hang", 60)
"""


def test_a_server_ends_with_a_parent_that_was_killed() -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    parent = subprocess.Popen([PYTHON, "-c", PARENT, SERVER], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE,
                              text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    assert wait_dead(pid)


def test_a_command_has_a_limit_of_processor_time() -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_CPU)[0])"
    assert run(code, deadline_s=30).stdout == "35\n"


def test_an_endless_answer_is_refused() -> None:
    code = "import sys; sys.stdout.buffer.write((2 ** 62).to_bytes(8, 'little')); sys.stdout.flush(); sys.stdin.read()"
    liar = GuardedServer([PYTHON, "-c", code])
    with pytest.raises(BuildError, match="at most"):
        liar.request(b"x", 20)
    assert liar.pid is None
