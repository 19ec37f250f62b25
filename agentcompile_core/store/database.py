"""The tuning database: one SQLite file in WAL mode, which survives killed and concurrent writers (measured)."""

import contextlib
import errno
import fcntl
import hashlib
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from . import migrations

_SELECT = "SELECT key, signature, json, sha256 FROM records"
# SQLITE_ERROR is a wrong statement; ours are fixed, so then it is the stored schema that is wrong (a flipped bit).
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR)
_INSERT = "INSERT OR REPLACE INTO records (key, signature, json, sha256, written_s) VALUES (?, ?, ?, ?, ?)"
_OLDEST = "DELETE FROM records WHERE key IN (SELECT key FROM records ORDER BY written_s, key LIMIT ?)"
FORGOTTEN = 0.1  # of the rows at a time, so that not every write beyond the limit looks for the oldest
BUSY_S, AGAIN_S = 10.0, 0.01
GIVEN_UP_S = 60.0  # how long nobody waits again for a file that stayed busy
# Another process is at work. SQLite waits by itself, but not where a file of another journal becomes one with a write-ahead log.
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def _sum(key: str, signature: str, text: str) -> str:
    return hashlib.sha256("\0".join((key, signature, text)).encode()).hexdigest()


def _is_any(exc: sqlite3.DatabaseError, codes: tuple[int, ...]) -> bool:
    return (getattr(exc, "sqlite_errorcode", 0) & 0xFF) in codes


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, size = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size"))
    return (pages - free) * size


def _forget_oldest(connection: sqlite3.Connection) -> None:
    count = int(connection.execute("SELECT count(*) FROM records").fetchone()[0])
    connection.execute(_OLDEST, (max(1, int(FORGOTTEN * count)),))


def _has_locks(folder: Path) -> bool:
    """Whether files of ``folder`` can be locked. Where they cannot (some network file systems), SQLite calls every file busy."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # not the database: closing that would end the locks that SQLite holds on it
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        return exc.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
    return True


def _decode(data: bytes) -> str:
    return data.decode(errors="replace")  # a flipped bit must fail the checksum of its row, not the whole query


class Database:
    """Keyed JSON texts with a signature. Usable from several threads and, each with its own object, processes.

    A damaged file is moved aside and started anew; one of an older schema is brought up to date when it is opened. Beyond
    ``max_bytes`` (0: no limit) the rows that were written longest ago go. Methods raise sqlite3.Error where the file cannot be used.
    """

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        self._given_up: tuple[sqlite3.OperationalError, float] | None = None  # why, and until when

    def get(self, key: str) -> str | None:
        """The text of ``key``; None where there is none or its row is damaged."""
        rows = self._query(f"{_SELECT} WHERE key = ?", key)
        return rows[0][1] if rows else None

    def put(self, key: str, signature: str, text: str) -> None:
        """Write one row, replacing another one of the same key."""
        row = (key, signature, text, _sum(key, signature, text))
        try:
            self._insert(row)
        except sqlite3.DatabaseError as exc:
            if not _is_any(exc, _DAMAGED):
                raise
            self._insert(row)

    def _insert(self, row: tuple[str, str, str, str]) -> None:
        with self._recover() as connection, connection:
            connection.execute(_INSERT, (*row, int(time.time())))
            if self._max_bytes and _used_bytes(connection) > self._max_bytes:
                _forget_oldest(connection)

    def count(self) -> int:
        """Number of rows."""
        with self._recover() as connection:
            return int(connection.execute("SELECT count(*) FROM records").fetchone()[0])

    def schema(self) -> int:
        """Version of the file's schema."""
        with self._recover() as connection:
            return migrations.version(connection)

    def rows(self) -> tuple[list[tuple[str, str, str]], list[str]]:
        """Key, signature and text of every row in order of the keys, and the keys of damaged rows."""
        with self._recover() as connection:
            found = connection.execute(f"{_SELECT} ORDER BY key").fetchall()
        whole = [(key, signature, text) for key, signature, text, total in found if self._intact(key, signature, text, total)]
        return whole, [str(key) for key, signature, text, total in found if not self._intact(key, signature, text, total)]

    def remove(self, key: str) -> None:
        """Forget one row."""
        with self._recover() as connection, connection:
            connection.execute("DELETE FROM records WHERE key = ?", (key,))

    def problem(self) -> str:
        """What SQLite finds wrong with the whole file; empty: nothing."""
        with self._recover() as connection:
            said = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
        return "" if said == "ok" else said

    def shrink(self) -> None:
        """Give the space of removed rows back to the file system."""
        with self._recover() as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = self._given_up = None

    def _query(self, sql: str, argument: str) -> list[tuple[str, str]]:
        with self._recover() as connection:
            rows = connection.execute(sql, (argument,)).fetchall()
        return [(key, text) for key, signature, text, total in rows if self._intact(key, signature, text, total)]

    @staticmethod
    def _intact(key: object, signature: object, text: object, total: object) -> bool:
        texts = all(type(value) is str for value in (key, signature, text))
        return texts and total == _sum(str(key), str(signature), str(text))

    @contextlib.contextmanager
    def _recover(self) -> Iterator[sqlite3.Connection]:
        """Give the connection; if the file turns out damaged, move it aside so that the next use starts anew."""
        with self._lock:
            try:
                yield self._connect()
            except UnicodeDecodeError as exc:  # the message of an error about a schema with a flipped bit
                self._move_aside()
                raise sqlite3.DatabaseError(f"schema is damaged ({exc})") from exc
            except sqlite3.DatabaseError as exc:
                if _is_any(exc, _DAMAGED):
                    self._move_aside()
                raise

    def _connect(self) -> sqlite3.Connection:
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        connection = self._opened()
        connection.text_factory = _decode
        self._connection, self._pid = connection, os.getpid()
        return connection

    def _opened(self) -> sqlite3.Connection:
        """Able to write, when others let it; only reading where that is not possible at all.

        Raises:
            sqlite3.OperationalError: others are at work for longer than BUSY_S. Read as it is, their file would lack what they wrote. It is
                raised at once then until GIVEN_UP_S are over.
        """
        if self._given_up is not None and time.monotonic() < self._given_up[1]:
            raise self._given_up[0].with_traceback(None)
        until = time.monotonic() + BUSY_S
        while True:
            try:
                return self._open_writable(max(AGAIN_S, until - time.monotonic()))
            except sqlite3.OperationalError as exc:
                is_over = time.monotonic() > until
                if not _is_any(exc, _BUSY) or (is_over and not _has_locks(self.path.parent)):
                    return self._open_read_only()
                if is_over:
                    self._given_up = exc, time.monotonic() + GIVEN_UP_S
                    raise
            time.sleep(AGAIN_S)

    def _open_writable(self, wait_s: float) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=wait_s, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            migrations.migrate(connection)
            connection.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
            return connection
        except BaseException:
            connection.close()
            raise

    def _open_read_only(self) -> sqlite3.Connection:
        # immutable: on a read-only file system SQLite cannot create the shared-memory file that WAL needs.
        uri = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1"
        connection = sqlite3.connect(uri, uri=True, timeout=BUSY_S, check_same_thread=False)
        try:
            connection.execute("SELECT count(*) FROM records").fetchone()
            return connection
        except sqlite3.Error:
            connection.close()
            raise

    def _move_aside(self) -> None:
        self.close()
        for suffix in ("", "-wal", "-shm"):
            path = self.path.with_name(self.path.name + suffix)
            with contextlib.suppress(OSError):
                path.replace(path.with_name(f"{path.name}.damaged"))
