"""Private temporary folders: removed when their work ends, and by a later process where the one that made them was killed.

A folder holds a marker file, locked as long as its owner lives. The lock goes with the process, however that ends, so that the
next one knows what nobody owns any more. A folder without the marker is never touched: it is somebody else's.
"""

import contextlib
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # no such locks here: age alone tells what was left behind
    fcntl = None  # type: ignore[assignment]

MARKER = ".agentcompile-private"
PREFIX = "agentcompile-private-"  # nobody else names a folder so
YOUNG_S = 60.0  # a folder this young may not be locked yet
OLD_S = 24 * 3600.0  # beyond it a folder is left over where locks cannot tell


class PrivateFolder:
    """A folder of mode 0700 that goes with this object, at the latest with the process.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path | None = None, prefix: str = PREFIX) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            self._marker = os.open(self.path / MARKER, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        _lock(self._marker)
        self._end = weakref.finalize(self, _remove, self.path, self._marker, os.getpid())

    @property
    def name(self) -> str:
        """The path as text."""
        return str(self.path)

    def cleanup(self) -> None:
        """Remove the folder and all in it."""
        self._end()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.cleanup()


def sweep(parent: Path, prefix: str = PREFIX, young_s: float = YOUNG_S, *, ours: bool = False) -> int:
    """Remove private folders below ``parent`` whose owners are gone; those younger than ``young_s`` stay. Returns how many went.

    An empty one without a marker was killed before it. ``ours``: nobody else keeps anything below ``parent``, so that whatever bears
    no marker goes after a day.
    """
    removed = 0
    with contextlib.suppress(OSError):
        for folder in sorted(parent.iterdir()):
            if folder.name.startswith(prefix) and _is_left_over(folder, young_s, ours):
                shutil.rmtree(folder, ignore_errors=True)
                removed += not folder.exists()
    return removed


def _is_left_over(folder: Path, young_s: float, ours: bool) -> bool:
    age_s = 0.0
    try:
        found = folder.lstat()
        age_s = time.time() - found.st_mtime
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or age_s < young_s or age_s < 0:
            return False
        marker = os.open(folder / MARKER, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _is_empty(folder) or (ours and age_s > OLD_S)
    except OSError:
        return False
    try:
        return _lock(marker) if fcntl is not None else age_s > OLD_S
    finally:
        os.close(marker)


def _is_empty(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return not any(folder.iterdir())
    return False


def _lock(marker: int) -> bool:
    """Whether this process holds the lock now; where the file system knows none, nobody does."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _remove(path: Path, marker: int, owner: int) -> None:
    if owner == os.getpid():  # a forked child inherits the object, not the folder
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(marker)
