"""Compilers in guarded child processes: own process group, deadline, memory limit, private TMPDIR that is removed.

Compilers hang, fork, and eat memory; each of these must cost only the source that caused it. ``run_guarded`` runs one
command. ``GuardedServer`` keeps a compiler alive between requests and replaces it when it misbehaves. The compilers
themselves belong to the backends.
"""

import contextlib
import math
import os
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from ..errors import BuildError
from ..private_folders import PrivateFolder

MEMORY_BYTES = 8 << 30
MAX_LOG_BYTES = 1 << 20
MAX_REPLY_BYTES = 1 << 30
# What every compiler needs of the environment, besides what its backend hands on; all else (keys of LLM services first) stays here.
PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT")
_LENGTH = struct.Struct("<Q")


@frozen(kw_only=True)
class Completed:
    """How a guarded command ended. The outputs are cut at 1 MiB each; undecodable bytes are replaced."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


def compiler_environment(temporary: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a compiler process: a few variables of ours, ``TMPDIR``, and ``extra``."""
    env = {name: os.environ[name] for name in PASSED if name in os.environ}
    return {**env, "TMPDIR": temporary, **(extra or {})}


def run_guarded(command: Sequence[str], *, deadline_s: float, memory_bytes: int = MEMORY_BYTES,
                cwd: Path | None = None, extra_env: Mapping[str, str] | None = None) -> Completed:
    """Run ``command`` and wait for it. Its children do not outlive it.

    Args:
        command: program and arguments; no shell reads them.
        deadline_s: seconds after which the whole process group is killed.
        memory_bytes: limit on the address space of each of its processes.
        cwd: its working folder; a private temporary one by default.
        extra_env: variables beside those of ``compiler_environment``.

    Raises:
        BuildError: it could not be started or ran past the deadline.
    """
    with PrivateFolder() as private:
        temporary = str(private)
        out, err = private / ".stdout", private / ".stderr"
        start = time.monotonic()
        with out.open("wb") as stdout, err.open("wb") as stderr:
            # The limit on processor time ends a compiler whose guardian was killed.
            process = _start(command, memory_bytes, cpu_s=math.ceil(deadline_s) + 5, cwd=str(cwd or temporary),
                             stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                             env=compiler_environment(temporary, extra_env))
            try:
                finished = _wait(process, start + deadline_s)
            finally:
                _kill_group(process)
        if not finished:
            raise BuildError(f"{Path(command[0]).name} did not finish within {deadline_s:g} s and was killed")
        return Completed(returncode=process.returncode, stdout=_tail(out), stderr=_tail(err),
                         seconds=time.monotonic() - start)


class GuardedServer:
    """A child process that answers requests: each is bytes in, bytes out, both behind an 8-byte little-endian length.

    The child reads requests on its standard input and answers on its standard output. It is started by the first
    request, killed with its group when it misses a deadline or breaks the protocol, and started anew by the next one.
    One request at a time; not for several threads.
    """

    def __init__(self, command: Sequence[str], *, name: str = "", memory_bytes: int = MEMORY_BYTES,
                 extra_env: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._name = name or Path(command[0]).name
        self._memory_bytes = memory_bytes
        self._extra_env = dict(extra_env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: PrivateFolder | None = None

    def request(self, payload: bytes, deadline_s: float) -> bytes:
        """Send one request and return its answer.

        Raises:
            BuildError: the child could not be started, died, or did not answer in time.
        """
        end = time.monotonic() + deadline_s
        process = self._running()
        name, done = self._name, False
        try:
            _send(process, _LENGTH.pack(len(payload)) + payload, end)
            (size,) = _LENGTH.unpack(_receive(process, _LENGTH.size, end))
            if size > MAX_REPLY_BYTES:
                raise BuildError(f"compiler process {name} answered {size} bytes; at most {MAX_REPLY_BYTES} are read")
            answer = _receive(process, size, end)
            done = True
            return answer
        except TimeoutError:
            raise BuildError(f"compiler process {name} did not answer within {deadline_s:g} s and was killed") from None
        except (EOFError, OSError) as exc:
            _wait(process, min(end, time.monotonic() + 2.0))  # its exit code says more than our signal
            code = self._close()
            last = self.log.strip()[-400:]
            raise BuildError(f"compiler process {name} ended with code {code} ({exc}); {last}") from exc
        finally:
            if not done:
                self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the running child, or None."""
        return self._process.pid if self._process and _alive(self._process) else None

    log: str = ""  # what the last ended child wrote to its standard error

    def close(self) -> None:
        """Kill the child and remove its TMPDIR."""
        self._close()

    def _close(self) -> int | None:
        process, temporary, self._process, self._temporary = self._process, self._temporary, None, None
        if process is None:
            return None
        _kill_group(process)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if temporary is not None:
            self.log = _tail(Path(temporary.name, ".stderr"))
            temporary.cleanup()
        return process.returncode

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and _alive(self._process):
            return self._process
        self._close()
        temporary = PrivateFolder()
        try:
            with Path(temporary.name, ".stderr").open("wb") as stderr:
                process = _start(self._command, self._memory_bytes, cwd=temporary.name, stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, stderr=stderr,
                                 env=compiler_environment(temporary.name, self._extra_env))
        except BaseException:
            temporary.cleanup()
            raise
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._process, self._temporary = process, temporary
        return process

    def __del__(self) -> None:
        try:  # noqa: SIM105  when the interpreter ends, contextlib may be gone already
            self._close()
        except Exception:
            pass


def serve(answer: Callable[[bytes], bytes]) -> None:
    """The child's side of GuardedServer: call ``answer(bytes) -> bytes`` for each request until the input ends.

    Standard output carries the answers alone: whatever else the process prints goes to standard error. The process ends
    when its parent does, even in the middle of an answer (which must release the interpreter, as bindings do).
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")
    while len(head := requests.read(_LENGTH.size)) == _LENGTH.size:
        reply = answer(requests.read(_LENGTH.unpack(head)[0]))
        output.write(_LENGTH.pack(len(reply)) + reply)
        output.flush()


def _start(command: Sequence[str], memory_bytes: int, cpu_s: int | None = None, **options: object) -> "subprocess.Popen[bytes]":
    # The shell sets the limits in the child: preexec_fn is not safe beside threads. Arguments are never parsed by it.
    limits = f"ulimit -v {memory_bytes >> 10}" + (f" && ulimit -t {cpu_s}" if cpu_s else "")
    limited = ["/bin/sh", "-c", f'{limits} && exec "$@"', "sh", *command]
    try:
        return subprocess.Popen(limited, start_new_session=True, **options)  # type: ignore[call-overload,no-any-return]
    except OSError as exc:
        raise BuildError(f"cannot start {command[0]}: {exc}") from exc


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _alive(process: "subprocess.Popen[bytes]") -> bool:
    """Whether it runs still; a dead one is not reaped, so that its group stays addressable until it is killed."""
    if process.returncode is not None or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        return False
    return not _leader_ended(process.pid)


def _leader_ended(pid: int) -> bool:
    """Whether the first thread is a zombie while others of a killed process still end: waitid reports it only after them (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (OSError, IndexError):
        return False


def _wait(process: "subprocess.Popen[bytes]", end: float) -> bool:
    """Wait until ``end`` for the leader to end; a look from time to time finds one that ended before its threads."""
    try:
        waiting = os.pidfd_open(process.pid)  # not reaped, so the number is its own
    except (AttributeError, OSError):  # no Linux, or an old one
        waiting = -1
    try:
        pause = 0.001
        while _alive(process):
            if time.monotonic() >= end:
                return False
            _ended_within(waiting, pause)
            pause = min(0.02, pause * 1.5)
        return True
    finally:
        if waiting >= 0:
            os.close(waiting)


def _ended_within(waiting: int, most_s: float) -> None:
    """Pause, or until the process of a descriptor ends."""
    if waiting < 0:
        time.sleep(most_s)
        return
    poller = select.poll()
    poller.register(waiting, select.POLLIN)
    poller.poll(most_s * 1000)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    if process.returncode is None:  # not reaped, so the group id cannot belong to anybody else
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ready(fd: int, end: float, *, write: bool) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT if write else select.POLLIN)
    if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
        raise TimeoutError


def _send(process: "subprocess.Popen[bytes]", data: bytes, end: float) -> None:
    assert process.stdin is not None
    fd, rest = process.stdin.fileno(), memoryview(data)
    while rest:
        _ready(fd, end, write=True)
        with contextlib.suppress(BlockingIOError):
            rest = rest[os.write(fd, rest[:1 << 20]):]


def _receive(process: "subprocess.Popen[bytes]", size: int, end: float) -> bytes:
    assert process.stdout is not None
    fd, parts, missing = process.stdout.fileno(), [], size
    while missing:
        _ready(fd, end, write=False)
        part = os.read(fd, min(missing, 1 << 20))
        if not part:
            raise EOFError("it closed its output")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
        return file.read().decode(errors="replace")
    return ""
