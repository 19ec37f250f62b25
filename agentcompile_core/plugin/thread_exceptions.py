"""An exception put into another thread, without the interpreter noticing it for ever.

CPython keeps one flag for "some thread has an exception waiting", set until the thread takes it, which one that waits in foreign code
does not. While it is set every function call of every thread takes a detour, and in CPython 3.11 a thread that is traced or profiled
never gets past the entry of the next function. A thread that gets the interpreter raises the flag again for what waits for itself, so
it can be taken down at any time.
"""

import ctypes
import threading


class _Own(BaseException):
    """Put by a thread into itself."""


def put(thread: threading.Thread, kind: type[BaseException]) -> None:
    """``kind`` is raised in that thread when it next runs Python; nothing happens to one that has ended or not begun."""
    if thread.ident is not None:
        _put(thread.ident, kind)
        lower_flag()


def withdraw() -> None:
    """Nothing that was put into this thread, and that it has not taken, is raised any more."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None)


def lower_flag() -> None:
    """Take down the interpreter's flag: it goes down when a thread, here one of its own, takes what was put into it."""
    taker = threading.Thread(target=_take, name="thread exceptions", daemon=True)
    taker.start()
    taker.join()


def _take() -> None:
    try:
        _put(threading.get_ident(), _Own)
        while True:
            pass
    except _Own:
        pass


def _put(ident: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))
