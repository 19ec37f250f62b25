"""Ctrl-C: the first ends the work in order and says what is kept, the second ends the process at once."""

import argparse
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from .progress import INTERRUPTED, Progress


@contextmanager
def in_order() -> Iterator[None]:
    """The first interrupt is a KeyboardInterrupt, a second one during its clean-up kills the process (exit status 130)."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        INTERRUPTED.set()
        raise KeyboardInterrupt

    INTERRUPTED.clear()
    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        INTERRUPTED.clear()


def what_is_kept(options: argparse.Namespace, progress: Progress | None) -> str:
    """One sentence about what an interrupted command leaves behind."""
    if progress is None:
        return "interrupted"
    nothing = "" if not getattr(options, "out", None) else "; no bundle was written"
    count = progress.evaluated
    if not count:
        return f"interrupted before a candidate was evaluated{nothing}"
    if getattr(options, "no_cache", False):
        return f"interrupted; the {count} candidates that were evaluated are not kept, because of --no-cache{nothing}"
    if progress.warned:
        return f"interrupted; {count} candidates were evaluated, and because the cache cannot be used they may not be kept{nothing}"
    return f"interrupted; the {count} candidates that were evaluated are kept in the cache, and the next run does not repeat them{nothing}"
