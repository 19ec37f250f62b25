"""Python's collector of circular garbage, kept from slowing a compile."""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_apart = 0  # blocks of ``set_apart`` in all threads
_uncollected = 0  # blocks of ``uncollected`` in all threads
_collecting = True  # whether garbage was collected before the first of them
_thresholds, _own_thresholds = (0, 0, 0), (0, 0, 0)  # before the first block of ``set_apart``, and within it
# Objects made within such a block between two collections of what was made last, and such collections between two that look further back,
# at objects that no cache holds any more. By Python's own numbers (700 or 2,000, and 10) a compile collects thousands of times.
YOUNG, OLDER = 10_000, 300


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected, in any thread.

    A collection ends a capture, where a graph in a circle is destroyed within it, and slows what makes many objects.
    """
    global _uncollected, _collecting
    with _lock:
        if not _uncollected:
            _collecting = gc.isenabled()
            gc.disable()
        _uncollected += 1
    try:
        yield
    finally:
        with _lock:
            _uncollected -= 1
            if not _uncollected and _collecting:
                gc.enable()


@contextmanager
def set_apart() -> Iterator[None]:
    """A block whose collections look at what was made within it alone.

    A process with torch and transformers holds a million objects: a full collection takes 0.3 to 1 s, and a compile makes enough for
    several. There are fewer collections, too, unless the process has larger thresholds of its own, or none: one for each ``YOUNG``
    objects, and one for three million at most that looks at more than those, until somebody asks to ``look_further``. Where torch holds
    memory of a device, garbage is collected before, which may be that. A process that froze objects itself (``gc.freeze``) is left
    alone; what it freezes within such a block is thawed with the rest.
    """
    global _apart, _thresholds, _own_thresholds
    with _lock:
        is_own = _apart > 0 or not is_frozen()
        if is_own and not _apart:
            if _holds_memory():
                gc.collect()
            gc.freeze()
            _thresholds = gc.get_threshold()
            if _thresholds[0]:  # 0: the process never collects by itself
                gc.set_threshold(max(YOUNG, _thresholds[0]), max(OLDER, _thresholds[1]), _thresholds[2])
            _own_thresholds = gc.get_threshold()
        _apart += is_own
    try:
        yield
    finally:
        with _lock:
            if is_own:
                _apart -= 1
                if not _apart:
                    gc.unfreeze()
                    if gc.get_threshold() == _own_thresholds:  # nobody else has set it meanwhile
                        gc.set_threshold(*_thresholds)


def look_further() -> None:
    """Within a block of ``set_apart``: from now on older objects are looked at as often as before it.

    For whoever begins what takes long and makes much, such as a search, of which circles may hold memory.
    """
    global _own_thresholds
    with _lock:
        if _apart and gc.get_threshold() == _own_thresholds and _thresholds[0]:
            gc.set_threshold(_own_thresholds[0], *_thresholds[1:])
            _own_thresholds = gc.get_threshold()


def settle() -> None:
    """Within a block of ``set_apart``: collections look no more at what was made in it until now, such as graphs of a deep model."""
    with _lock:
        if _apart:
            gc.freeze()


def is_frozen() -> bool:
    """Whether objects of this process are frozen. Python walks over all of them to count them: of a million that takes 50 ms."""
    return gc.get_freeze_count() > 0


def _holds_memory() -> bool:
    """Whether torch, where it is imported, holds memory of an accelerator."""
    accelerator = getattr(sys.modules.get("torch"), "accelerator", None)
    return accelerator is not None and bool(accelerator.is_available()) and accelerator.memory_allocated() > 0
