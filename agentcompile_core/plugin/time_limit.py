"""A limit for calls into plugins in this process: Python that runs on is stopped by an exception that is put into its thread.

What waits in foreign code is not stopped by that. It is named in the log, so that who waits knows for whom.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from attrs import Factory, define

from ..errors import AgentCompileError
from . import thread_exceptions

T = TypeVar("T")
LOOK_S = 1.0  # at least that often it is looked whose limit is over
SETTLING_S = 1.0  # what was put into a thread arrives at its next instruction; a plugin may have swallowed it
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
    _token: list[None] = Factory(lambda: [None])
    stopped: bool = False

    def claim(self) -> bool:
        """True for the first who asks: the call that has come back, or the watch that stops it. Taking from a list is one instruction."""
        try:
            self._token.pop()
        except IndexError:
            return False
        return True


_open: dict[int, _Call] = {}
_watch: list[threading.Thread] = []
_lock = threading.Lock()


def within(limit_s: float, name: str, call: Callable[[], T]) -> T:
    """What ``call`` returns.

    Raises:
        OutOfTime: it took longer than ``limit_s``; also where it swallowed what stopped it.
        BaseException: whatever ``call`` raises.
    """
    one = _Call(thread=threading.current_thread(), name=name, limit_s=limit_s, end_s=time.monotonic() + limit_s)
    try:
        _open[id(one)] = one
        _have_watch()
        try:
            return call()
        finally:
            _settle(one)
    except _Stop:
        if not one.stopped:
            raise  # a call around this one is stopped
        raise OutOfTime(f"{name} did not come back within {limit_s:g} s, and was stopped") from None
    finally:
        _open.pop(id(one), None)


def _settle(one: _Call) -> None:
    """Leave no exception behind that is still on its way."""
    if one.claim() or isinstance(sys.exc_info()[1], _Stop):
        return
    end = time.monotonic() + SETTLING_S
    while time.monotonic() < end:
        time.sleep(0.001)
    raise _Stop


def _have_watch() -> None:
    with _lock:
        if not _watch:
            _watch.append(threading.Thread(target=_look, name="plugin calls", daemon=True))
            _watch[0].start()


def _look() -> None:
    """Watch while there are calls, and then no more: a process that forks later has no thread of ours."""
    while True:
        _look_once()
        with _lock:
            if not _open:
                _watch.clear()
                return


def _forget() -> None:
    """In the child of a fork nobody watches yet, and what was open is the parent's."""
    global _lock
    _lock = threading.Lock()
    _watch.clear()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _look_once() -> None:
    now = time.monotonic()
    calls = list(_open.values())
    for one in calls:
        if now >= one.end_s and not one.stopped and one.claim():
            log.warning("%s has not come back after %g s; it is stopped where it runs Python", one.name, one.limit_s)
            one.stopped = True
            thread_exceptions.put(one.thread, _Stop)
    time.sleep(min([LOOK_S, *(max(one.end_s - now, 0.0) for one in calls if not one.stopped)]))
