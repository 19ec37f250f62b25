"""Children that are forked from a process that has imported what they need: a start takes milliseconds, not seconds of imports.

A fork server is a process of its own that imports, waits, and forks. It has no threads of ours, runs no kernel and touches no device,
so that what is forked from it is as good as new, however the children before it ended. Each has a status socket,
on which the server writes its pid and, when it ends, how; who closes the other end wants the child no more: the server kills and reaps
it, and closes its own.
The server ends when nobody holds it any more, with its parent, and after a minute without children.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

IDLE_S = 60.0
LOOKED_AGAIN_S = 0.2  # what a thread waits for another one may have read just before
MOST_KEPT = 3
_MOST_BYTES = 1 << 16  # of one request
_NUMBER = struct.Struct("<i")


def _kill(pid: int) -> None:
    """The leader first: one that has not made its group yet is not found as one, and a dead one forks nothing more."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


class Forked:
    """A child of the server, as ``subprocess.Popen`` shows its own: ``pid``, ``poll``, ``wait``. Any thread may kill it."""

    def __init__(self, status: socket.socket) -> None:
        status.setblocking(False)
        self._status = status
        self._reading, self._killing = threading.Lock(), threading.Lock()
        self._read = bytearray()
        self._ended = False  # the server closed its end: the child is reaped, or the server is gone

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group; 0 as long as the server has not forked it."""
        self._hear(0.0)
        return self._number(0) or 0

    def poll(self) -> int | None:
        """How it ended, as ``Popen.returncode``; None: it runs."""
        self._hear(0.0)
        return -signal.SIGKILL if self._ended and self._number(1) is None else self._number(1)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TimeoutError: it did not end in time.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            left = LOOKED_AGAIN_S if end is None else min(LOOKED_AGAIN_S, end - time.monotonic())
            if left <= 0:
                raise TimeoutError
            self._hear(left)
        return code

    def kill_group(self) -> None:
        """End it and every process of its group, and wait for it; one that is not forked yet ends as soon as it is."""
        with self._killing:
            if self._ended:
                return
            forked = self.pid
            if forked and not self._ended:  # where it ended, it stays unreaped until this end is closed: the group is nobody else's
                _kill(forked)
                self.wait()
                with contextlib.suppress(OSError):
                    self._status.shutdown(socket.SHUT_WR)
                while not self._ended:
                    self._hear(LOOKED_AGAIN_S)
            self._ended = True
            self._status.close()

    def _number(self, index: int) -> int | None:
        at = index * _NUMBER.size
        return _NUMBER.unpack_from(self._read, at)[0] if len(self._read) >= at + _NUMBER.size else None

    def _hear(self, most_s: float) -> None:
        """Read what the server wrote, waiting ``most_s`` for the first of it."""
        poller = select.poll()
        if self._ended:
            return
        poller.register(self._status, select.POLLIN)
        while not self._ended and poller.poll(most_s * 1000):
            with self._reading:
                try:
                    part = self._status.recv(64)
                    self._read += part
                    self._ended = not part
                except BlockingIOError:  # another thread read it
                    pass
                except OSError:  # another thread closed it, or the server is gone
                    self._ended = True
            most_s = 0.0


class ForkServer:
    """The parent's side of one server: ``command`` and the number of a socket, run in ``environment``."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the server
        with theirs:
            # A session of its own: Ctrl-C in the terminal reaches the parent only.
            self._process = subprocess.Popen([*command, str(theirs.fileno())], env=dict(environment), pass_fds=(theirs.fileno(),),
                                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._log, start_new_session=True)
        self.holders = 0

    @property
    def ended(self) -> bool:
        """Whether it takes no requests any more."""
        return self._process.poll() is not None

    def fork(self, arguments: Sequence[str], stdin: int, stdout: int, stderr: int) -> Forked:
        """A child that runs with these arguments and descriptors; returns before it does.

        Raises:
            OSError: the server is gone.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._socket, [json.dumps(list(arguments)).encode()], [stdin, stdout, stderr, theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return Forked(ours)

    def last_words(self, most_bytes: int) -> str:
        """The end of what it wrote to its standard error."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - most_bytes))
        return self._log.read().decode(errors="replace").strip()

    def close(self) -> None:
        """End it, and with it every child that it has."""
        self._socket.close()
        self._process.wait()
        self._log.close()


_servers: dict[object, ForkServer] = {}
_lock = threading.Lock()
_keeping = 0


def hold(command: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
    """The running server for this command, environment and working folder, started where there is none; until ``release``."""
    key = (os.getpid(), os.getcwd(), tuple(command), tuple(sorted(environment.items())))
    with _lock:
        found = _servers.pop(key, None)
        if found is None or found.ended:
            found = ForkServer(command, environment)
        found.holders += 1
        _servers[key] = found  # the last one is the one used last
        _close_unused()
        return found


def release(server: ForkServer) -> None:
    """Whoever held it needs it no more."""
    with _lock:
        server.holders -= 1
        _close_unused()


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Inside, a few servers that nobody holds stay for the next one who asks: for who compiles many models one after another."""
    global _keeping
    with _lock:
        _keeping += 1
    try:
        yield
    finally:
        with _lock:
            _keeping -= 1
            _close_unused()


def _close_unused() -> None:
    unused = [key for key, server in _servers.items() if not server.holders]
    for key in unused[: max(0, len(_servers) - MOST_KEPT) if _keeping else None]:
        _servers.pop(key).close()


def serve(descriptor: int, run: Callable[[list[str]], object], idle_s: float = IDLE_S) -> None:
    """The server's side: fork a child for each request, which calls ``run`` with its arguments; returns when nobody needs it."""
    gc.collect()
    gc.freeze()  # a collection in a child would otherwise copy every page that it shares with the others
    _Serving(socket.socket(fileno=descriptor), run).loop(idle_s)


class _Serving:
    def __init__(self, requests: socket.socket, run: Callable[[list[str]], object]) -> None:
        self._requests, self._run = requests, run
        self._status: dict[int, int] = {}  # by pid
        self._told: set[int] = set()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # which interrupts the poll
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._poller = select.poll()
        for descriptor in (requests.fileno(), self._woken):
            self._poller.register(descriptor, select.POLLIN)

    def loop(self, idle_s: float) -> None:
        while True:
            ready = self._poller.poll(None if self._status else idle_s * 1000)
            if not ready and not self._status:
                return
            for descriptor, _ in ready:
                if descriptor == self._requests.fileno():
                    message, descriptors, _, _ = socket.recv_fds(self._requests, _MOST_BYTES, 4)
                    if not message:
                        self._end_all()
                        return
                    self._fork(json.loads(message), descriptors)
                elif descriptor == self._woken:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                else:
                    self._forget(next(pid for pid, status in self._status.items() if status == descriptor))
            for pid in set(self._status) - self._told:
                self._tell_if_ended(pid)

    def _fork(self, arguments: list[str], descriptors: list[int]) -> None:
        *standard, status = descriptors
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: those of numpy's BLAS, which knows of forks
            pid = os.fork()
        if not pid:
            self._become(arguments, standard, status)
        for descriptor in standard:
            os.close(descriptor)
        self._status[pid] = status
        self._poller.register(status, select.POLLIN)  # nobody writes to it: ready where the other end was closed
        self._write(status, pid)

    def _become(self, arguments: list[str], standard: list[int], status: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            for descriptor in {*standard, status, self._woken, self._wake, *self._status.values()}:
                os.close(descriptor)
            self._requests.close()
            self._run(arguments)
            code = 0
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _tell_if_ended(self, pid: int) -> None:
        # Not reaped: as long as the parent may signal the group, its number must not become somebody else's.
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            self._told.add(pid)
            self._write(self._status[pid], found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)

    @staticmethod
    def _write(status: int, number: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(status, _NUMBER.pack(number))

    def _forget(self, pid: int) -> None:
        status = self._status.pop(pid)
        self._told.discard(pid)
        self._poller.unregister(status)
        _kill(pid)
        os.waitpid(pid, 0)
        os.close(status)  # last: it says that nothing is left

    def _end_all(self) -> None:
        for pid in list(self._status):
            self._forget(pid)
