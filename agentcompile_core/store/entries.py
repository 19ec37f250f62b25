"""Entries of the cache on disk: one folder per key, complete or absent.

An entry is written into a private folder on the same file system, its manifest (names, sizes and SHA-256 of its
files) last, and then renamed into place. Whatever is read is checked against the manifest, so a killed writer, a full
disk or a flipped bit is a miss and never wrong content. That is also why nothing is synced to the disk.
"""

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import UsageError
from ..private_folders import YOUNG_S, PrivateFolder, sweep
from .size_limit import MANIFEST, SizeLimit

MANIFEST_BYTES = 512  # about; exact sizes are read from the disk when it matters
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def check_name(what: str, name: str) -> str:
    """Return ``name`` if it can be a file name everywhere.

    Raises:
        UsageError: it cannot.
    """
    if not _SAFE.fullmatch(name):
        raise UsageError(f"{what} {name!r} of the store is not 1 to 128 letters, digits, '_', '-' or '.'; "
                         "make keys with serial.digest")
    return name


class Entries:
    """The entries below one folder, which must exist. Every method may raise OSError; ``read`` never does.

    Beyond ``max_bytes`` (0: no limit) a write removes the entries that were not used longest, never its own.
    """

    def __init__(self, root: Path, max_bytes: int = 0) -> None:
        self.root = root
        self._temporary = root / "tmp"
        self._limit = SizeLimit(root, max_bytes)

    def path(self, kind: str, key: str) -> Path:
        """The folder of an entry, whether or not it exists."""
        return self.root / check_name("kind", kind) / check_name("key", key)[-2:] / key

    def read(self, kind: str, key: str) -> dict[str, bytes] | None:
        """The files of an entry by name, or None where it is missing, incomplete or damaged."""
        folder = self.path(kind, key)
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            if (manifest["kind"], manifest["key"]) != (kind, key):
                return None
            files = {}
            for name, expected in manifest["files"].items():
                content = (folder / check_name("file", name)).read_bytes()
                if hashlib.sha256(content).hexdigest() != expected:
                    return None
                files[name] = content
            self._limit.used(folder)
            return files
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, UsageError):
            return None

    def all_keys(self) -> Iterator[tuple[str, str]]:
        """Kind and key of every entry whose manifest is there, whole or not, sorted."""
        for manifest in sorted(self.root.glob(f"*/??/*/{MANIFEST}")):
            yield manifest.parents[2].name, manifest.parent.name

    def remove(self, kind: str, key: str) -> None:
        """Remove an entry; other processes see it whole or not at all."""
        self._temporary.mkdir(mode=0o700, exist_ok=True)
        with PrivateFolder(self._temporary) as private, contextlib.suppress(FileNotFoundError):
            self.path(kind, key).rename(private / "old")

    def write(self, kind: str, key: str, files: dict[str, bytes]) -> None:
        """Write an entry, replacing another one of the same key. Readers see the old one, none, or the new one."""
        target = self.path(kind, key)
        self._temporary.mkdir(mode=0o700, exist_ok=True)
        with PrivateFolder(self._temporary) as private:
            entry = private / "new"
            entry.mkdir(mode=0o700)
            for name, content in files.items():
                (entry / check_name("file", name)).write_bytes(content)
            sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
            manifest = {"kind": kind, "key": key, "files": sums}
            (entry / MANIFEST).write_text(json.dumps(manifest, sort_keys=True), encoding="utf-8")
            for folder in (target.parent.parent, target.parent):  # ``parents=True`` would not give them the mode
                folder.mkdir(mode=0o700, exist_ok=True)
            self._limit.used(entry)
            self._place(entry, target, private / "old")
            self._limit.written(target, sum(len(content) for content in files.values()) + MANIFEST_BYTES, private)

    @staticmethod
    def _place(entry: Path, target: Path, old: Path) -> None:
        # A folder cannot be renamed over a full one: the old one moves away first. If another writer was faster
        # twice, its entry of the same key is as good as ours.
        for attempt in range(2):
            with contextlib.suppress(FileNotFoundError):
                target.rename(old.with_name(f"old{attempt}"))
            try:
                entry.rename(target)
                return
            except OSError as exc:  # not a look at the target: a third writer may have moved away what stood there
                if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def remove_stale(self, young_s: float = YOUNG_S) -> int:
        """Remove what killed writers left behind, once it is ``young_s`` old; returns how many folders went."""
        return sweep(self._temporary, "", young_s, ours=True)
