"""The size of the cache on disk: beyond a limit the entries that were not used longest go.

When an entry was last used is the time of its manifest. An entry is renamed out of its place in one step before it is removed, so
that other processes see it whole or not at all, and two that remove the same one do not disturb each other.
"""

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path

MANIFEST = "manifest.json"
KEPT = 0.9  # of the limit is left when entries are removed, so that not every write looks at all of them
LOOK_AGAIN = 0.05  # of the limit: written by this process since it last looked, while others wrote too


class SizeLimit:
    """Keeps the entries below ``root`` within ``max_bytes``; 0: no limit. Usable from several threads and processes."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._lock = threading.Lock()
        self._known_bytes: int | None = None  # at the last look, and what was written since
        self._since_bytes = 0

    def used(self, entry: Path) -> None:
        """Note that an entry was used now."""
        if self._max_bytes:
            now = time.time_ns()
            with contextlib.suppress(OSError):
                os.utime(entry / MANIFEST, ns=(now, now))

    def written(self, entry: Path, size_bytes: int, aside: Path) -> None:
        """Count an entry that was written, and make room if it is too much; ``aside`` is a private folder for what goes."""
        if not self._max_bytes:
            return
        with self._lock:
            self._since_bytes += size_bytes
            known = self._max_bytes if self._known_bytes is None else self._known_bytes
            if self._since_bytes > LOOK_AGAIN * self._max_bytes or known + self._since_bytes > self._max_bytes:
                self._look(entry, aside)

    def _look(self, kept: Path, aside: Path) -> None:
        found = sorted(entry for path in self._root.glob("*/??/*") if (entry := _entry(path)) is not None)
        total = sum(size for _, size, _ in found)
        if total > self._max_bytes:
            for _, size, path in found:
                if total <= KEPT * self._max_bytes:
                    break
                if path != kept and _remove(path, aside):
                    total -= size
        self._known_bytes, self._since_bytes = total, 0


def _entry(path: Path) -> tuple[int, int, Path] | None:
    """When an entry was last used (ns), its bytes, its folder; None for what is no entry (any more)."""
    try:
        used = (path / MANIFEST).stat().st_mtime_ns
        return used, sum(file.stat().st_size for file in path.iterdir()), path
    except OSError:
        return None


def _remove(path: Path, aside: Path) -> bool:
    gone = aside / f"evicted-{path.name}"
    try:
        path.rename(gone)
    except OSError:  # another process was faster; its bytes are gone all the same
        return not path.exists()
    shutil.rmtree(gone, ignore_errors=True)
    return True
