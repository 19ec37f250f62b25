"""A call in a fork of this process: it finds all that this process holds, in every place, and leaves nothing behind there.

Only the calling thread is in a fork. A lock that another thread holds is held there for ever, and an accelerator that is in use here
cannot be used there; so a fork may hang or raise where the call would not, and says nothing then. Shared memory and open files are its
own (``unshared.py``). Nothing of it is written to standard output or standard error, no garbage of the parent is collected, and no
function of ``atexit`` runs in it; what the call itself lets go of is finalized, and what was registered by ``os.register_at_fork`` runs.
"""

import contextlib
import faulthandler
import fcntl
import gc
import os
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

from .unshared import own_files, own_memory

_HEAD = struct.Struct("<?Q")  # whether the call returned, and how many bytes
_SLICE_S = 0.2  # what is put into a waiting thread from outside is raised behind one of these
_BEYOND_S = 5  # a fork that nobody ends (its parent was killed) ends itself so much later


class NothingSaid(Exception):
    """No fork could be made, it ended, or it took too long: nothing is known of the call."""


class ForkedCall:
    """``call`` in a fork that begins now and has until ``deadline`` (``time.monotonic``, seconds). A context manager: the fork, and
    what it started without a session of its own, is ended with the block. Raises NothingSaid."""

    def __init__(self, call: Callable[[], bytes], deadline: float) -> None:
        if sys.platform != "linux":  # elsewhere libraries of the system itself do not stand it
            raise NothingSaid("no process is forked on this system")
        self._deadline, self._pid = deadline, 0
        try:
            self._read, self._written = os.pipe()
        except OSError as exc:
            raise NothingSaid(f"no process could be forked: {exc}") from exc
        try:
            self._fork(call)
        except BaseException:  # a signal's, too
            self.__exit__()
            raise

    def _fork(self, call: Callable[[], bytes]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forking beside threads, by Python and by libraries: see the head of this file
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none is handled in the fork by this program
            try:
                self._pid = os.fork()
                if not self._pid:
                    _become(call, self._written, self._deadline, blocked)
            except OSError as exc:
                raise NothingSaid(f"no process could be forked: {exc}") from exc
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(self._written)
        self._written = -1

    def __enter__(self) -> "ForkedCall":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pid:
            for kill in (os.kill, os.killpg):  # it may not lead its group yet, and what it started belongs to that
                with contextlib.suppress(OSError):
                    kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # somebody reaps every child of this process
                os.waitpid(self._pid, 0)
        for descriptor in (self._read, self._written):
            if descriptor >= 0:
                os.close(descriptor)

    def result(self) -> bytes | None:
        """What the call returned; None: it raised. Raises NothingSaid."""
        has_returned, length = _HEAD.unpack(self._bytes(_HEAD.size))
        found = self._bytes(length)
        return found if has_returned else None

    def _bytes(self, count: int) -> bytes:
        found, ready = bytearray(), select.poll()
        ready.register(self._read, select.POLLIN)
        while len(found) < count:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise NothingSaid("the call took too long in a fork")
            if ready.poll(1000 * min(left_s, _SLICE_S)):
                read = os.read(self._read, min(count - len(found), 1 << 20))
                if not read:
                    raise NothingSaid("the fork ended")
                found += read
        return bytes(found)


def _become(call: Callable[[], bytes], written: int, deadline: float, blocked: "set[int | signal.Signals]") -> NoReturn:
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked - {signal.SIGALRM})
        signal.alarm(max(int(deadline - time.monotonic()), 0) + _BEYOND_S)
        gc.freeze()  # no finalizer of what the parent holds, whoever collects
        gc.disable()
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # where memory ends, this process is ended, and not the parent
        faulthandler.disable()
        written = fcntl.fcntl(written, fcntl.F_DUPFD_CLOEXEC, 3)
        own_memory()
        own_files()
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nothing, standard)
        held = sys.stdout, sys.stderr  # noqa: F841 - what these hold is written by the parent, and not where they end
        sys.stdout = sys.stderr = os.fdopen(nothing, "w")  # those of notebooks write elsewhere
        try:
            has_returned, found = True, call()
        except Exception:
            has_returned, found = False, b""
        _write(written, _HEAD.pack(has_returned, len(found)))
        _write(written, found)
    finally:
        os._exit(0)


def _write(descriptor: int, what: bytes) -> None:
    left = memoryview(what)
    while left:
        left = left[os.write(descriptor, left):]
