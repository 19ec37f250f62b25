"""The tuning database over versions and sizes: older files are brought up to date, newer ones left alone, the oldest rows go first."""

import errno
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.store import Store, database, migrations
from agentcompile_core.store.database import Database
from agentcompile_core.store.shelf import DATABASE

BEFORE_VERSIONS = """
CREATE TABLE records (key TEXT PRIMARY KEY, signature TEXT NOT NULL, json TEXT NOT NULL, sha256 TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX by_signature ON records (signature);
"""


def record(key: str, signature: str = "s") -> TuningRecord:
    step = Step(match_id="m", implementation="gemv/gemv", origin=Origin.GENERATED, schedule=Schedule({"warps": 4}))
    return TuningRecord(key=key, signature=signature, step=step, source_digest="d", verdict=None, measurement=None)


def downgraded(path: Path) -> None:
    """Write the file again as the first release did."""
    old = sqlite3.connect(path)
    rows = old.execute("SELECT key, signature, json, sha256 FROM records").fetchall()
    old.close()
    for extra in path.parent.glob(path.name + "*"):
        extra.unlink()
    with sqlite3.connect(path) as old:
        old.executescript(BEFORE_VERSIONS)
        old.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
    old.close()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    store = Store(tmp_path)
    for number in range(20):
        store.put_record(record(f"r{number:02}"))
    store.close()
    assert store.shelf is not None
    downgraded(store.shelf.folder / DATABASE)
    return tmp_path


def test_a_file_from_before_versions_keeps_every_record(old: Path) -> None:
    store = Store(old)
    assert tuple(store.record(f"r{n:02}") for n in range(20)) == tuple(record(f"r{n:02}") for n in range(20))
    store.put_record(record("new"))
    assert store.shelf is not None and store.shelf.database.schema() == migrations.VERSION and store.warnings == []
    assert Store(old).describe()["records"] == 21
    with sqlite3.connect(store.shelf.folder / DATABASE) as found:
        indices = {name for (name,) in found.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")}
    found.close()
    assert indices == {"by_age"}, "an index that nothing asks costs every write"


def test_processes_that_migrate_at_once_wait_for_each_other(old: Path) -> None:
    code = ("import sys; from agentcompile_core.store import Store; s = Store(sys.argv[1]); "
            "print(s.describe()['records'], s.shelf.database.schema(), s.warnings)")
    running = [subprocess.Popen([sys.executable, "-c", code, str(old)], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in running] == [f"20 {migrations.VERSION} []\n"] * 3


@pytest.mark.parametrize("lock", ("BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"))
def test_a_file_that_another_process_writes_is_waited_for(old: Path, lock: str) -> None:
    """A journal of the older kind: SQLite refuses a write-ahead log at once while the other one is about to write."""
    (path,) = old.rglob(DATABASE)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute(lock)
    other.execute("INSERT INTO records SELECT 'other', signature, json, sha256 FROM records LIMIT 1")
    ending = threading.Timer(0.5, lambda: other.execute("COMMIT"))
    ending.start()
    found = Database(path)
    assert (found.count(), found.schema()) == (21, migrations.VERSION)
    found.put("mine", "s", "{}")
    assert found.get("mine") == "{}"
    ending.join()
    other.close()


def test_a_file_that_stays_locked_is_not_read_as_it_lies(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other process writes would be missing; the store goes on with what this run makes, and says so."""
    monkeypatch.setattr(database, "BUSY_S", 0.2)
    (path,) = old.rglob(DATABASE)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting, began = Database(path), time.monotonic()
    for _ in range(20):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            waiting.count()
    assert time.monotonic() - began < 1.0, "it is waited for once"
    store = Store(old)
    store.put_record(record("mine"))
    assert store.record("mine") == record("mine") and any("locked" in text for text in store.warnings)
    other.execute("ROLLBACK")
    other.close()
    assert Store(old).describe()["records"] == 20
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        waiting.count()
    waiting.close()
    assert waiting.count() == 20


def test_a_file_where_nothing_can_be_locked_is_read_as_it_lies(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on network file systems without locks: SQLite calls the file busy for ever."""
    monkeypatch.setattr(database, "BUSY_S", 0.1)
    (path,) = old.rglob(DATABASE)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(database.fcntl, "lockf", refused)
    found = Database(path)
    assert found.count() == 20
    other.execute("ROLLBACK")
    other.close()


def test_a_migration_that_fails_leaves_the_file_as_it_was(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = (*migrations.MIGRATIONS, ("CREATE TABLE more (a)", "NO SUCH STATEMENT"))
    monkeypatch.setattr(migrations, "MIGRATIONS", broken)
    monkeypatch.setattr(migrations, "VERSION", len(broken))
    store = Store(old)
    assert all(store.record(f"r{n:02}") for n in range(20)), "what is there can be read"
    monkeypatch.undo()
    again = Store(old)
    assert again.describe()["records"] == 20 and again.shelf is not None and again.shelf.database.schema() == migrations.VERSION


def test_a_newer_file_is_left_alone_and_said(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_record(record("r1"))
    store.close()
    assert store.shelf is not None
    path = store.shelf.folder / DATABASE
    with sqlite3.connect(path) as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()
    before = path.read_bytes()
    store = Store(tmp_path)
    store.put_record(record("r2"))
    assert store.record("r1") is None and store.record("r2") == record("r2"), "this run goes on with what it makes"
    assert any("schema 99" in text and "update this program" in text for text in store.warnings)
    assert path.read_bytes() == before


def test_beyond_the_limit_the_oldest_rows_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1_000_000))
    monkeypatch.setattr(database.time, "time", lambda: next(now))
    limited = Database(tmp_path / "t.sqlite", max_bytes=200_000)
    for number in range(300):
        limited.put(f"k{number:03}", "s", "x" * 2000)
        assert limited.get(f"k{number:03}") is not None
    keys = [key for key, _, _ in limited.rows()[0]]
    assert 30 <= len(keys) <= 100 and keys == [f"k{n:03}" for n in range(300 - len(keys), 300)]
    limited.shrink()
    assert (tmp_path / "t.sqlite").stat().st_size <= 300_000 and limited.problem() == ""


def test_a_folder_that_cannot_be_written_has_a_temporary_one_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "cache")
    store.put_record(record("r1"))
    store.put_text("captures", "c", "x")
    (said,) = store.warnings
    folder = Path(said.split("temporary folder ")[1].split(",")[0])
    assert folder.is_dir() and list(folder.glob("text-captures/*/c")) and store.record("r1") == record("r1")
    assert store.text("captures", "c") == "x"
    del store
    assert not folder.exists()
