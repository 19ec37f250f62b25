"""The store under damage: killed and concurrent writers, flipped bits, full disks, folders that cannot be written."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentcompile_core
from agentcompile_core.ir.candidate import Kernel
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.store import Store
from agentcompile_core.store.entries import Entries

REPOSITORY = Path(agentcompile_core.__file__).parents[1]
MAKERS = '''
import hashlib
from agentcompile_core.ir.candidate import Kernel
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.store import Store

def kernel(seed):
    binary = bytes([seed % 256]) * (1000 + seed % 7 * 30_000)
    return Kernel(digest=f"d{seed}", backend="cuda", arch="sm_90", binary=binary,
                  sha256=hashlib.sha256(binary).hexdigest(), compiler="nvrtc 13.0")

def record(key, seed):
    step = Step(match_id="m", implementation="gemv/gemv", origin=Origin.GENERATED, schedule=Schedule({"warps": seed}))
    return TuningRecord(key=key, signature="s1", step=step, source_digest=f"d{seed}", verdict=None, measurement=None)
'''
WRITER = MAKERS + '''
import itertools, sys
store = Store(sys.argv[1])
print("started", flush=True)
for seed in itertools.count(int(sys.argv[2])):
    key = f"k{seed % 5}"
    store.put_kernel(key, kernel(seed))
    store.put_record(record(key, seed))
    store.put_text("captures", key, f"text {seed} " * 500)
'''


def kernel(seed: int = 1) -> Kernel:
    binary = bytes([seed % 256]) * 1000
    return Kernel(digest=f"d{seed}", backend="cuda", arch="sm_90", binary=binary,
                  sha256=hashlib.sha256(binary).hexdigest(), compiler="nvrtc 13.0")


def record(key: str = "r1", seed: int = 1) -> TuningRecord:
    step = Step(match_id="m", implementation="gemv/gemv", origin=Origin.GENERATED, schedule=Schedule({"warps": seed}))
    return TuningRecord(key=key, signature="s1", step=step, source_digest=f"d{seed}", verdict=None, measurement=None)


def filled(root: Path) -> Store:
    store = Store(root)
    store.put_kernel("k1", kernel())
    store.put_record(record())
    store.put_text("captures", "c1", "a graph")
    store.close()
    return store


def python(code: str, *arguments: str, **options: object) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, stdout=subprocess.PIPE,  # type: ignore[call-overload]
                            text=True, **options)


def check_consistent(store: Store, keys: Iterator[str]) -> None:
    """Whatever is found is whole; that nothing is found is allowed."""
    for key in keys:
        found = store.kernel(key)
        if found is not None:
            assert found.digest == f"d{found.digest[1:]}" and set(found.binary) == {int(found.digest[1:]) % 256}
        text = store.text("captures", key)
        if text is not None:
            words = text.split()
            assert text == f"text {words[1]} " * 500
        row = store.record(key)
        assert row is None or row.source_digest == f"d{row.step.schedule.integer('warps')}"


def test_killed_and_concurrent_writers_leave_whole_entries(tmp_path: Path) -> None:
    writers = [python(WRITER, str(tmp_path), str(start)) for start in (0, 1000)]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "started\n"
        store = Store(tmp_path)
        for _ in range(4):  # a storm: kill one writer somewhere in its work, start another
            end = time.monotonic() + 0.4
            while time.monotonic() < end:
                check_consistent(store, iter(["k0", "k1", "k2", "k3", "k4"]))
            victim = writers.pop(0)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            writers.append(python(WRITER, str(tmp_path), "5000"))
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    survivor = Store(tmp_path)
    check_consistent(survivor, iter(["k0", "k1", "k2", "k3", "k4"]))
    assert survivor.describe()["records"] == 5
    survivor.put_kernel("k0", kernel(7))
    assert survivor.kernel("k0") == kernel(7) and survivor.warnings == []


def test_a_place_that_two_others_take_in_turn_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One writer was faster, and the next one has moved its entry away before anybody looks."""
    store, rename, refused = Store(tmp_path), Path.rename, []

    def taken(path: Path, target: Path) -> Path:
        if path.name == "new" and not refused:
            refused.append(path)
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path), None, str(target))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", taken)
    store.put_kernel("shared", kernel(1))
    assert refused and store.kernel("shared") == kernel(1) and store.warnings == []


def test_threads_share_a_store(tmp_path: Path) -> None:
    store, failures = Store(tmp_path), []

    def work(offset: int) -> None:
        try:
            for seed in range(offset, offset + 15):
                store.put_kernel(f"k{seed}", kernel(seed))
                store.put_record(record(f"k{seed}", seed))
                store.put_kernel("shared", kernel(seed))
                assert store.kernel(f"k{seed}") == kernel(seed)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(i * 100,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and store.warnings == []
    assert Store(tmp_path).describe()["records"] == 60 and store.kernel("shared") is not None


def _files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "garbage", "remove", "folder"])
def test_damage_of_any_file_is_a_miss_and_is_repaired(tmp_path: Path, damage: str) -> None:
    filled(tmp_path / "good")
    for index in range(len(_files(tmp_path / "good"))):
        root = tmp_path / f"{damage}{index}"
        shutil.copytree(tmp_path / "good", root)
        path = _files(root)[index]
        content = path.read_bytes()
        if damage == "truncate":
            path.write_bytes(content[: len(content) // 2])
        elif damage == "flip":
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1:])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "garbage":
            path.write_bytes(os.urandom(len(content)))
        else:
            path.unlink()
            if damage == "folder":
                path.mkdir()
        store = Store(root)
        assert store.kernel("k1") in (None, kernel())
        assert store.text("captures", "c1") in (None, "a graph")
        assert store.record("r1") in (None, record())
        if "tuning" not in path.name:  # a flipped bit in an unused page of the database changes nothing
            assert None in (store.kernel("k1"), store.text("captures", "c1")), path.name
        store.put_kernel("k1", kernel(2))
        store.put_text("captures", "c1", "another graph")
        store.put_record(record(seed=2))
        for reader in (store, Store(root)) if "tuning" not in path.name else (store,):
            assert reader.kernel("k1") == kernel(2) and reader.text("captures", "c1") == "another graph"
            assert reader.record("r1") == record(seed=2)


def test_every_flipped_bit_of_the_database_is_a_miss_or_harmless(tmp_path: Path) -> None:
    filled(tmp_path / "good")
    (database,) = [p for p in _files(tmp_path / "good") if p.name == "tuning.sqlite"]
    content = database.read_bytes()
    used = [i for i, byte in enumerate(content) if byte]
    for position in used[:: max(1, len(used) // 60)]:
        database.write_bytes(content[:position] + bytes([content[position] ^ 0x04]) + content[position + 1:])
        store = Store(tmp_path / "good")
        assert store.record("r1") in (None, record())
        assert store.describe()["records"] in (0, 1)
        store.put_record(record("r2", 3))
        assert store.record("r2") == record("r2", 3)
        store.close()
        for extra in database.parent.glob("tuning.sqlite*"):
            extra.unlink()


def test_a_damaged_database_is_moved_aside_and_started_anew(tmp_path: Path) -> None:
    filled(tmp_path)
    (database,) = [p for p in _files(tmp_path) if p.name == "tuning.sqlite"]
    database.write_bytes(b"not a database at all" * 1000)
    store = Store(tmp_path)
    store.put_record(record("r2"))
    assert store.record("r1") is None and Store(tmp_path).record("r2") == record("r2")
    assert database.with_name("tuning.sqlite.damaged").read_bytes().startswith(b"not a database")


def test_a_root_that_cannot_be_made_means_memory_and_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = filled(tmp_path / "file" / "cache")
    assert store.kernel("k1") == kernel() and store.record("r1") == record() and store.text("captures", "c1") == "a graph"
    assert len(store.warnings) == 1 and "AGENTCOMPILE_CACHE_DIR" in store.warnings[0]


def test_a_full_disk_costs_a_warning_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    store = Store(tmp_path)

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Entries, "write", no_space)
    store.put_kernel("k2", kernel(2))
    store.put_kernel("k3", kernel(3))
    assert store.kernel("k2") == kernel(2) and store.kernel("k1") == kernel()
    assert len(store.warnings) == 2 and all("No space left" in text for text in store.warnings)
    monkeypatch.undo()
    assert Store(tmp_path).kernel("k2") is None
    store.put_kernel("k2", kernel(4))
    assert store.kernel("k2") == kernel(4) and Store(tmp_path).kernel("k2") == kernel(4)


FULL = MAKERS + '''
import resource, signal, sys
store = Store(sys.argv[1])
store.put_record(record("before", 1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
store.put_kernel("big", kernel(6))
store.put_record(record("after", 2))
for seed in range(100):
    store.put_record(record(f"many{seed}", seed))
assert store.kernel("big") == kernel(6), "a kernel that did not fit is kept in memory"
assert store.record("after") == record("after", 2) and store.record("before") == record("before", 1)
assert all(store.record(f"many{seed}") == record(f"many{seed}", seed) for seed in range(100))
assert store.warnings, "nobody was told"
print("survived")
'''


def test_files_that_cannot_grow_any_more(tmp_path: Path) -> None:
    """The operating system refuses real writes in the middle: what a full disk looks like, to SQLite too."""
    child = python(FULL, str(tmp_path), stderr=subprocess.PIPE)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "survived\n"), err
    after = Store(tmp_path)
    assert after.kernel("big") is None and after.record("before") == record("before", 1)


READ_ONLY = MAKERS + '''
import os, sys
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    open(os.path.join(sys.argv[1], "probe"), "w")
    sys.exit("the folder is not read-only")
except PermissionError:
    pass
store = Store(sys.argv[1])
assert store.kernel("k1").digest == "d1", "what is there can be read"
assert store.record("r1") == record("r1", 1) and store.describe()["records"] == 1
assert store.text("captures", "c1") == "a graph"
store.put_kernel("k2", kernel(2)); store.put_record(record("r2", 2)); store.put_text("captures", "c2", "x")
assert store.kernel("k2") == kernel(2) and store.record("r2") == record("r2", 2) and store.text("captures", "c2") == "x"
assert store.record("r1") and store.record("r2") and 1 <= len(store.warnings) <= 3, store.warnings
print("survived")
'''


def test_a_read_only_root_is_read_and_not_written() -> None:
    root = Path(tempfile.mkdtemp(prefix="agentcompile-test-"))  # tmp_path is closed to the user the child becomes
    try:
        filled(root)
        for path in sorted(root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        root.chmod(0o555)
        child = python(READ_ONLY, str(root), stderr=subprocess.PIPE)
        out, err = child.communicate(timeout=60)
        assert (child.returncode, out) == (0, "survived\n"), err
    finally:
        for path in (root, *root.rglob("*")):
            if path.is_dir():
                path.chmod(0o700)
        shutil.rmtree(root)
