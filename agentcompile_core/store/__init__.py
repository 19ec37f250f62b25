"""What is kept between runs: built kernels, tuning records, captured graphs. At worst a miss, never a wrong answer.

Where the folder cannot be written (read-only, full, somebody else's), a warning says so and a temporary folder takes what this run
makes; where there is no room for that either, memory does.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from attrs import evolve

from ..errors import ContractError, UsageError
from ..ir import serial
from ..ir.candidate import Kernel, StepSource
from ..ir.record import TuningRecord
from ..private_folders import sweep
from .entries import check_name
from .shelf import DATABASE, Shelf, Spare

__all__ = ["Store", "default_root"]

log = logging.getLogger("agentcompile.store")
ENVIRONMENT = "AGENTCOMPILE_CACHE_DIR"
MAX_TEXT_BYTES = 1 << 30


def default_root() -> Path | None:
    """The folder of the user's cache: ``AGENTCOMPILE_CACHE_DIR``, else the platform's; None where there is no home."""
    named = os.environ.get(ENVIRONMENT, "")
    if named:
        return Path(named).expanduser()
    try:
        import platformdirs

        return Path(platformdirs.user_cache_dir("agentcompile"))
    except ImportError:
        pass
    try:
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "agentcompile"
    except RuntimeError:
        return None


class Store:
    """Kernels, tuning records and texts by key.

    ``root`` is created with mode 0700; None keeps everything in memory. Callers make keys with ``serial.digest`` over
    every input of what they store. A read that finds damage is a miss. A write that fails is logged once, listed in
    ``warnings``, and kept in a temporary folder (or in memory) for the life of this object. Kernels and texts on disk that were not
    used longest go when they are more than ``max_bytes`` (0: no limit); the oldest records go beyond an eighth of that.
    Safe to use from several threads and processes.
    """

    def __init__(self, root: Path | None, *, max_bytes: int = 0) -> None:
        self.root = None if root is None else Path(root)
        self.warnings: list[str] = []
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: dict[tuple[str, str], dict[str, bytes]] = {}
        self._rows: dict[str, tuple[str, str]] = {}
        self._shelf: Shelf | None = None
        self._spare = Spare()
        if self.root is not None:
            self._open(self.root)

    def kernel(self, key: str) -> Kernel | None:
        """The kernel stored under ``key``, with its binary."""
        files = self._read("kernels", key)
        if files is None:
            return None
        try:
            kernel = serial.loads(files["kernel.json"].decode(), Kernel)
            binary = files["binary"]
        except (KeyError, UnicodeDecodeError, UsageError):
            return None
        if hashlib.sha256(binary).hexdigest() != kernel.sha256:
            return None
        return evolve(kernel, binary=binary)

    def put_kernel(self, key: str, kernel: Kernel) -> None:
        """Store a kernel.

        Raises:
            ContractError: its ``sha256`` is not that of its binary.
        """
        if hashlib.sha256(kernel.binary).hexdigest() != kernel.sha256:
            raise ContractError(f"kernel {kernel.digest} of {kernel.backend!r}: sha256 is not that of its binary")
        head = serial.dumps(evolve(kernel, binary=b"")).encode()
        self._write("kernels", key, {"kernel.json": head, "binary": kernel.binary})

    def knows(self, sha256: str, source: StepSource) -> bool:
        """Whether this binary was built here from exactly this source (text, launches and workspaces)."""
        found = self._read("known", _known_key(sha256, source))
        return found is not None and found.get("sha256") == sha256.encode()

    def put_known(self, sha256: str, source: StepSource) -> None:
        """Remember that the binary of this hash was built here from ``source``."""
        self._write("known", _known_key(sha256, source), {"sha256": sha256.encode()})

    def record(self, key: str) -> TuningRecord | None:
        """The tuning record stored under ``key``."""
        row = self._rows.get(key)
        text = row[1] if row else None
        for shelf in (self._spare.holding(DATABASE, key), self._shelf):
            if text is None and shelf is not None:
                with self._tolerate("reading the tuning database", shelf):
                    text = shelf.database.get(key)
        return None if text is None else _record(key, text)

    def put_record(self, record: TuningRecord) -> None:
        """Store a record under its own key."""
        key, text = check_name("key", record.key), serial.dumps(record)
        if self._put("writing the tuning database", DATABASE, key, lambda shelf: shelf.database.put(key, record.signature, text)):
            self._rows.pop(key, None)
        else:
            self._rows[key] = (record.signature, text)

    def text(self, kind: str, key: str) -> str | None:
        """The text stored under ``kind`` (a word such as ``captures``) and ``key``."""
        files = self._read(f"text-{kind}", key)
        try:
            return None if files is None else _inflate(files["text.z"]).decode()
        except (KeyError, UnicodeDecodeError, zlib.error):
            return None

    def put_text(self, kind: str, key: str, text: str) -> None:
        """Store a text, compressed."""
        self._write(f"text-{kind}", key, {"text.z": zlib.compress(text.encode(), 6)})

    def describe(self) -> dict[str, int]:
        """Number of entries of each kind, and ``bytes`` on disk."""
        counts = {"records": len(self._rows), "bytes": 0}
        for kind, _ in self._files:
            counts[kind] = counts.get(kind, 0) + 1
        if self._shelf is not None:
            with self._tolerate("reading the tuning database", self._shelf):
                counts["records"] += self._shelf.database.count()
            for kind, count in self._shelf.count().items():
                counts[kind] = counts.get(kind, 0) + count
        return counts

    def clear(self) -> None:
        """Forget everything, on disk too (this version's part of the root; other files there are left alone)."""
        self.close()
        self._files.clear()
        self._rows.clear()
        self._spare.drop()
        if self._shelf is not None:
            shutil.rmtree(self._shelf.folder, ignore_errors=True)
            assert self.root is not None
            self._open(self.root)

    def close(self) -> None:
        """Close the database; using the store opens it again."""
        if self._shelf is not None:
            self._shelf.database.close()

    @property
    def shelf(self) -> Shelf | None:
        """The folder of this version below ``root``, for tools that look after it; None where there is none."""
        return self._shelf

    def _open(self, root: Path) -> None:
        # Another schema is another folder: old and new versions can share a root.
        folder = root / f"v{serial.SCHEMA}"
        try:
            if not os.path.isdir(root):
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as exc:
            if not os.path.isdir(folder):  # and no further error where nobody may look
                self._shelf = None
                self._warn(f"the cache folder {root} cannot be used ({exc.strerror}); {self._instead()}; "
                           f"set {ENVIRONMENT} to a folder that can be written")
                return
        found = folder.stat()
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or found.st_uid not in (0, os.geteuid()):
            self._warn(f"the cache folder {folder} can be written by other users, who could plant kernels in it; "
                       f"run chmod 700 on it")
        self._shelf = Shelf(folder, self._max_bytes)
        self._shelf.entries.remove_stale()
        sweep(Path(tempfile.gettempdir()))

    def _read(self, kind: str, key: str) -> dict[str, bytes] | None:
        found = self._files.get((check_name("kind", kind), check_name("key", key)))
        for shelf in (self._spare.holding(kind, key), self._shelf):
            if found is None and shelf is not None:
                found = shelf.entries.read(kind, key)
        return found

    def _write(self, kind: str, key: str, files: dict[str, bytes]) -> None:
        check_name("kind", kind), check_name("key", key)
        if self._put("writing the cache", kind, key, lambda shelf: shelf.entries.write(kind, key, files)):
            self._files.pop((kind, key), None)
        else:
            self._files[kind, key] = files

    def _put(self, doing: str, kind: str, key: str, write: Callable[[Shelf], None]) -> bool:
        """Write on the store's own shelf, else on the spare one; False: on neither."""
        if self._shelf is not None:
            with self._tolerate(doing, self._shelf):
                write(self._shelf)
                self._spare.keys.discard((kind, key))
                return True
        if self.root is None or (spare := self._spare.shelf()) is None:
            return False
        with self._tolerate(doing, spare):
            write(spare)
            self._spare.keys.add((kind, key))
            return True
        return False

    @contextlib.contextmanager
    def _tolerate(self, doing: str, shelf: Shelf) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, OverflowError) as exc:
            own = shelf is self._shelf
            instead = self._instead() if own and doing.startswith("writing") else "going on without it"
            self._warn(f"{doing} in {self.root if own else shelf.folder} failed ({type(exc).__name__}: {exc}); {instead}")

    def _instead(self) -> str:
        spare = self._spare.shelf()
        if spare is None:
            return "what this run makes is kept in memory"
        return f"what this run makes is kept in the temporary folder {spare.folder}, which goes with it"

    def _warn(self, message: str) -> None:
        with self._lock:
            if message in self.warnings:
                return
            self.warnings.append(message)
        log.warning(message)


def _known_key(sha256: str, source: StepSource) -> str:
    return "known-" + serial.digest(sha256, source, length=32)


def _record(key: str, text: str) -> TuningRecord | None:
    try:
        record = serial.loads(text, TuningRecord)
    except UsageError:
        return None
    return record if record.key == key else None


def _inflate(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    text = stream.decompress(data, MAX_TEXT_BYTES)
    if not stream.eof:
        raise zlib.error("more than the largest text, or cut off")
    return text
