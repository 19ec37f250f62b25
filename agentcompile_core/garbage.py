"""Python's collector of circular garbage, kept from slowing a compile and from keeping a device's memory."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_apart = 0  # blocks of ``set_apart`` in all threads
_deserted = list["weakref.ref[object]"]()


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected: that ends a capture, where a graph in a circle is destroyed within it, and slows what makes many objects."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def set_apart() -> Iterator[None]:
    """A block whose collections look at what was made within it alone; what models that are gone have left is collected before.

    A process with torch and transformers holds a million objects: a full collection takes 0.3 to 1 s, and a compile makes enough for
    several. A process that froze objects itself (``gc.freeze``) is left alone.
    """
    global _apart
    with _lock:
        left, is_own = any(one() is not None for one in _deserted), _apart > 0 or gc.get_freeze_count() == 0
        _deserted.clear()
        if left:
            gc.collect()
        if is_own:
            _apart += 1
            gc.freeze()
    try:
        yield
    finally:
        with _lock:
            if is_own:
                _apart -= 1
                if not _apart:
                    gc.unfreeze()


def belongs_to(owner: object, held: object) -> None:
    """``held``, which lies in circles and holds memory of a device, is garbage when ``owner`` is gone: the next compile collects it."""
    if held is not None:
        weakref.finalize(owner, _deserted.append, weakref.ref(held)).atexit = False
