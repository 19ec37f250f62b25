"""Storage: damaged, full, read-only, old and half-written caches. What is read is whole or a miss, and a compile works without any."""

import errno
import hashlib
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve
from test_store_faults import FULL, filled, kernel, python, record

from agentcompile_core.errors import ContractError, UsageError
from agentcompile_core.private_folders import MARKER
from agentcompile_core.store import Store, care
from agentcompile_core.store.entries import Entries

from . import cheap
from .registry import add, fault
from .seen import refused, right

AREA, KEPT = "storage", "the other entries were read, and the damaged one can be written again"


def _whole(store: Store) -> None:
    """What is found is what was put; what is not found can be put again."""
    assert store.kernel("k1") in (None, kernel()) and store.record("r1") in (None, record())
    assert store.text("captures", "c1") in (None, "a graph")
    store.put_kernel("k1", kernel(2)), store.put_record(record("r2", 3)), store.put_text("captures", "c1", "b")
    assert store.kernel("k1") == kernel(2) and store.record("r2") == record("r2", 3) and store.text("captures", "c1") == "b"


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut in half": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
    "with a flipped bit": lambda p: p.write_bytes(p.read_bytes()[:-2] + bytes([p.read_bytes()[-2] ^ 1]) + p.read_bytes()[-1:]),
    "empty": lambda p: p.write_bytes(b""),
    "gone": lambda p: p.unlink(),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
}


def _damaged(pattern: str, damage: Callable[[Path], object]) -> Any:
    def run(folder: Path) -> str:
        filled(folder)
        (path,) = folder.glob(pattern)
        damage(path)
        store = Store(folder)
        found = care.verify(store)
        said = [*found["damaged"], *([found["database"]] if found["database"] else []), *store.warnings]
        _whole(store)
        return f"a miss; cache verify: {'; '.join(map(str, said)) or 'the entry is not there'}"

    return run


for _what, _pattern in {"a kernel": "v1/kernels/*/*/binary", "the head of a kernel": "v1/kernels/*/*/kernel.json",
                        "a capture": "v1/text-captures/*/*/text.z", "a manifest": "v1/kernels/*/*/manifest.json"}.items():
    for _how, _damage in DAMAGE.items():
        if _what != "the head of a kernel" or _how == "cut in half":
            add(AREA, f"{_what} {_how}", f"{_what} of the cache is {_how}", _damaged(_pattern, _damage), KEPT)
add(AREA, "a database that is none", "the tuning database holds other bytes",
    _damaged("v1/tuning.sqlite", lambda p: p.write_bytes(b"not a database at all" * 1000)), KEPT + "; the file is kept aside")
add(AREA, "a row that was changed", "a record's text is changed in the database", lambda folder: _row(folder), KEPT)


def _row(folder: Path) -> str:
    filled(folder)
    with sqlite3.connect(folder / "v1" / "tuning.sqlite") as database:
        database.execute("UPDATE records SET json = replace(json, 'gemv', 'gemw')")
    database.close()
    store = Store(folder)
    assert store.record("r1") is None
    found = care.verify(store)["damaged"]
    _whole(store)
    return f"a miss; cache verify: {', '.join(found)}"


@fault(AREA, "a database of a later version", "the later version's file is untouched, this run keeps its records")
def _a_newer_database(folder: Path) -> str:
    filled(folder)
    path = folder / "v1" / "tuning.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 77")
    database.close()
    before, store = path.read_bytes(), Store(folder)
    store.put_record(record("r2", 2))
    assert store.record("r2") == record("r2", 2) and path.read_bytes() == before
    return next(text for text in store.warnings if "update this program" in text)


def _compiles(folder: Path, root: Path, words: str) -> str:
    made = cheap.compiled(cheap.module(folder), Store(root), workers=cheap.HERE)
    right(made)
    found = [note for note in made.notes if words in note]
    assert found and made.statistics["selected"] == 1, made.notes
    return str(found[0])


@fault(AREA, "the cache folder cannot be made: a file is in its way", "the compile used a temporary folder; the program is right")
def _a_file_in_the_way(folder: Path) -> str:
    (folder / "file").write_text("in the way")
    return _compiles(folder, folder / "file" / "cache", "temporary folder")


@fault(AREA, "every write to the cache folder fails: no space left", "a temporary folder took what was made; the program is right")
def _a_full_disk(folder: Path) -> str:
    real = Entries.write

    def full(self: Entries, kind: str, key: str, files: dict[str, bytes]) -> None:
        if self.root.is_relative_to(folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, kind, key, files)

    Entries.write = full  # type: ignore[method-assign]
    try:
        return _compiles(folder, folder / "cache", "No space left on device")
    finally:
        Entries.write = real  # type: ignore[method-assign]


_AS_NOBODY = ("import os, sys\nfrom agentcompile_core.store import Store\n"
              "if os.getuid() == 0:\n    os.setgroups([]); os.setgid(65534); os.setuid(65534)\nstore = Store(sys.argv[1])\n")
_ROUND_TRIP = "store.put_text('captures', 'c2', 'x')\nassert store.text('captures', 'c2') == 'x'\nprint(store.warnings[0])\n"


def _said_to_nobody(root: Path, code: str) -> str:
    child = python(_AS_NOBODY + code + _ROUND_TRIP, str(root), stderr=subprocess.PIPE)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0 and "temporary folder" in out, (out, err)
    return out


@fault(AREA, "a read-only cache folder, for a user who may not write it", "what is there was read, a temporary folder took the rest")
def _a_read_only_folder(_: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:  # where this runs others may not enter the folder of a test
        folder, root = Path(name), Path(name) / "cache"
        filled(root)
        for path in (folder, root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            return _said_to_nobody(root, "assert store.text('captures', 'c1') == 'a graph'\n")
        finally:
            for path in (folder, root, *root.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)


@fault(AREA, "a cache folder behind one that this user may not enter", "a temporary folder took what was made")
def _a_closed_folder(_: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        filled(Path(name) / "cache")
        Path(name).chmod(0o000)
        try:
            return _said_to_nobody(Path(name) / "cache", "assert store.text('captures', 'c1') is None\n")
        finally:
            Path(name).chmod(0o755)


@fault(AREA, "the system refuses writes in the middle of a file (RLIMIT_FSIZE)", "records and kernels were kept for this run")
def _files_that_cannot_grow(folder: Path) -> str:
    child = python(FULL.replace('print("survived")', 'print(store.warnings[0])'), str(folder), stderr=subprocess.PIPE)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0 and "failed" in out, err
    return out


@fault(AREA, "folders of killed writers and killed compilers", "what lives stays, what nobody owns goes")
def _leftovers_of_killed_runs(folder: Path) -> str:
    code = ("import sys, time\nfrom pathlib import Path\nfrom agentcompile_core.private_folders import PrivateFolder\n"
            "made = PrivateFolder(Path(sys.argv[1]))\nprint(made.path, flush=True)\ntime.sleep(60)\n")
    (folder / "v1" / "tmp").mkdir(parents=True)
    command = [sys.executable, "-c", code, str(folder / "v1" / "tmp")]
    owners = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    dead, living = (Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout)
    owners[0].kill(), owners[0].wait()
    for path in (dead, living):
        os.utime(path, (time.time() - 120,) * 2)
    Store(folder)
    there = living.exists()
    owners[1].kill(), owners[1].wait()
    assert there and not dead.exists() and not (dead / MARKER).exists()
    return "the next run removed the killed one's folder and left the living one's alone"


@fault(AREA, "a cache folder that everybody can write", "it is used, and said")
def _a_folder_of_everybody(folder: Path) -> str:
    filled(folder)
    (folder / "v1").chmod(0o777)
    return next(text for text in Store(folder).warnings if "chmod 700" in text)


@fault(AREA, "a kernel whose hash is not that of its binary is put", "nothing was stored")
def _a_kernel_with_another_hash(folder: Path) -> str:
    store = Store(folder)
    said = refused(lambda: store.put_kernel("k", evolve(kernel(), binary=b"other")), "sha256", ContractError)
    assert store.kernel("k") is None
    return said


@fault(AREA, "a key that leaves the cache folder", "nothing was written outside")
def _a_key_that_leaves(folder: Path) -> str:
    return refused(lambda: Store(folder / "cache").put_text("captures", "../../evil", "x"), "letters, digits", UsageError)


@fault(AREA, "a text of the cache that inflates without end", "a miss; memory is bounded")
def _a_bomb_in_the_cache(folder: Path) -> str:
    import agentcompile_core.store as module

    store, before = Store(folder), module.MAX_TEXT_BYTES
    module.MAX_TEXT_BYTES = 1 << 20
    try:
        assert store.shelf is not None
        store.shelf.entries.write("text-captures", "bomb", {"text.z": zlib.compress(b"x" * (64 << 20))})
        assert store.text("captures", "bomb") is None
        return f"a miss; cache verify: {', '.join(care.verify(store)['damaged'])}"
    finally:
        module.MAX_TEXT_BYTES = before


@fault(AREA, "a kernel in the cache whose manifest was made to agree with other bytes", "the head's own hash refuses it")
def _a_planted_binary(folder: Path) -> str:
    filled(folder)
    store = Store(folder)
    assert store.shelf is not None
    files = store.shelf.entries.read("kernels", "k1")
    assert files is not None
    store.shelf.entries.write("kernels", "k1", {**files, "binary": b"planted"})
    assert store.kernel("k1") is None and hashlib.sha256(b"planted").hexdigest()
    return f"a miss; cache verify: {', '.join(care.verify(store)['damaged'])}"
