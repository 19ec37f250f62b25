"""A limit for calls into plugins in this process: Python that runs on is stopped by an exception that is put into its thread.

It is put again every ``LOOK_S`` while the call goes on, which may have swallowed it. What waits in foreign code gets it when it returns to
Python; it is named in the log, so that who waits knows for whom.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from attrs import Factory, define

from ..errors import AgentCompileError
from . import thread_exceptions

T = TypeVar("T")
LOOK_S = 1.0  # at least that often it is looked whose limit is over
log = logging.getLogger(__name__)


class OutOfTime(AgentCompileError):
    """A call that did not come back within its limit."""


class _Stop(BaseException):
    """Put into the thread of a call; no ``except Exception`` of a plugin takes it."""


@define(eq=False)
class _Call:
    thread: threading.Thread
    name: str
    limit_s: float
    end_s: float
    lock: threading.Lock = Factory(threading.Lock)  # nothing is put once ``closed``
    closed: bool = False
    stopped: bool = False
    told: bool = False

    def stop(self) -> None:
        """Put the exception, unless the call has come back."""
        with self.lock:
            if not self.closed:
                self.stopped = True
                thread_exceptions.put(self.thread, _Stop)


_open: dict[int, _Call] = {}
_watch: list[threading.Thread] = []
_lock = threading.Lock()


def within(limit_s: float, name: str, call: Callable[[], T]) -> T:
    """What ``call`` returns. Where no thread can be started to watch it, it has no limit.

    Raises:
        OutOfTime: it took longer than ``limit_s``; also where it swallowed what stopped it.
        BaseException: whatever ``call`` raises; KeyboardInterrupt also where it was stopped.
    """
    one = _Call(thread=threading.current_thread(), name=name, limit_s=limit_s, end_s=time.monotonic() + limit_s)
    first: BaseException | None = None
    second: BaseException | None = None
    try:
        try:
            _open[id(one)] = one
            _have_watch()
            value = call()
        finally:
            # Signals and stops arrive at calls, entries and jumps back. There is none here outside of a ``try``, so that a call is closed
            # whatever arrives meanwhile: Ctrl-C, its own stop, that of a call around it.
            try:
                _close(one)
            except (KeyboardInterrupt, _Stop) as exc:
                first = exc
                try:
                    _close(one)
                except (KeyboardInterrupt, _Stop) as exc:
                    second = exc
                    try:
                        _close(one)
                    except (KeyboardInterrupt, _Stop):
                        _close(one)
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt) or not one.stopped:  # a user's, what it raised, or the stop of a call around this one
            raise
        why = None if isinstance(exc, _Stop) else exc
        raise _interrupted(first, second) or _late(one) from why
    if interrupt := _interrupted(first, second):
        raise interrupt
    if one.stopped:
        raise _late(one)
    return value


def _interrupted(*arrived: BaseException | None) -> BaseException | None:
    return next((exc for exc in arrived if isinstance(exc, KeyboardInterrupt)), None)


def _late(one: _Call) -> OutOfTime:
    return OutOfTime(f"{one.name} did not come back within {one.limit_s:g} s, and was stopped")


def _close(one: _Call) -> None:
    """Afterwards nothing is put for this call, and nothing that was is on its way. May be done again where it was interrupted.

    What was put for a call around this one may be taken here as well: it is put again.
    """
    with one.lock:
        one.closed = True
    if one.stopped:
        thread_exceptions.withdraw()
    _open.pop(id(one), None)


def _have_watch() -> None:
    with _lock:
        if _watch and _watch[0].is_alive():
            return
        thread = threading.Thread(target=_look, name="plugin calls", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            log.info("calls into plugins have no limit: %s", exc)
            return
        _watch[:] = [thread]


def _look() -> None:
    """Watch while there are calls, and then no more: a process that forks later has no thread of ours."""
    while True:
        pause_s = LOOK_S
        for one in list(_open.values()):
            left_s = one.end_s - time.monotonic()
            if left_s <= 0:
                with suppress(Exception):  # no thread to lower the interpreter's flag: it was put all the same
                    one.stop()
                _tell(one)
            else:
                pause_s = min(pause_s, left_s)
        time.sleep(pause_s)
        with _lock:
            if not _open:
                _watch.clear()
                return


def _tell(one: _Call) -> None:
    if not one.told:
        one.told = True
        with suppress(Exception):  # whatever a handler of the user's raises
            log.warning("%s has not come back after %g s; it is stopped where it runs Python", one.name, one.limit_s)


def _forget() -> None:
    """In the child of a fork nobody watches yet, and what was open is the parent's."""
    global _lock
    _lock = threading.Lock()
    _watch.clear()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
