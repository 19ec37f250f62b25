"""One folder of the store: entries and the tuning database, and the temporary one that stands in where a folder cannot be written."""

import contextlib
from pathlib import Path

from ..private_folders import PREFIX, PrivateFolder
from .database import Database
from .entries import Entries

DATABASE = "tuning.sqlite"
DATABASE_SHARE = 8  # the database may hold this part of the limit, beside kernels and texts


class Shelf:
    """Entries and database below ``folder``, which must exist. Methods of both may raise OSError and sqlite3.Error."""

    def __init__(self, folder: Path, max_bytes: int = 0) -> None:
        self.folder = folder
        self.entries = Entries(folder, max_bytes)
        self.database = Database(folder / DATABASE, max_bytes // DATABASE_SHARE)

    def count(self) -> dict[str, int]:
        """Number of entries of each kind, and ``bytes`` on disk."""
        counts = {"bytes": 0}
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):
                counts["bytes"] += path.stat().st_size if path.is_file() else 0
        for kind, _ in self.entries.all_keys():
            counts[kind] = counts.get(kind, 0) + 1
        return counts


class Spare:
    """The temporary shelf of one run: made when it is first needed, gone with the process; None where there is no place for one."""

    def __init__(self) -> None:
        self._folder: PrivateFolder | None = None
        self._shelf: Shelf | None = None
        self._failed = False
        self.keys: set[tuple[str, str]] = set()  # what was put here and nowhere else: (kind, key)

    def shelf(self) -> Shelf | None:
        """The shelf, made now if need be."""
        if self._shelf is None and not self._failed:
            try:
                self._folder = PrivateFolder(prefix=f"{PREFIX}cache-")
                self._shelf = Shelf(self._folder.path)
            except OSError:
                self._failed = True
        return self._shelf

    def holding(self, kind: str, key: str) -> Shelf | None:
        """The shelf if it holds this key."""
        return self._shelf if (kind, key) in self.keys else None

    def drop(self) -> None:
        """Remove the folder and all in it."""
        if self._shelf is not None:
            self._shelf.database.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = self._shelf = None
        self.keys.clear()
