"""Looking after the cache: what is in it, whether all of it is whole, and what can go."""

import contextlib
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..ir import serial
from . import Store
from .shelf import Shelf

_VERSIONS = re.compile(r"v(\d+)")


def shelf_of(store: Store) -> Shelf:
    """The folder that the store works in.

    Raises:
        UsageError: there is none.
    """
    if store.shelf is None:
        raise UsageError(store.warnings[0] if store.warnings else "there is no cache folder; name one with AGENTCOMPILE_CACHE_DIR")
    return store.shelf


def show(store: Store) -> dict[str, Any]:
    """Where the cache is, how many entries of which kind it holds, and how large it is; ``older``: folders of older versions."""
    shelf = shelf_of(store)
    counts = store.describe()
    return {"folder": str(shelf.folder), "bytes": counts.pop("bytes"), "entries": counts, "schema": _schema(shelf),
            "older": [str(folder) for folder in _older(shelf)], "warnings": list(store.warnings)}


def verify(store: Store) -> dict[str, Any]:
    """Read everything: ``checked`` entries, those that are ``damaged`` (kind/key), and what SQLite finds wrong with the database."""
    shelf = shelf_of(store)
    damaged, checked = [], 0
    for kind, key in shelf.entries.all_keys():
        checked += 1
        if not _is_whole(store, shelf, kind, key):
            damaged.append(f"{kind}/{key}")
    rows: list[tuple[str, str, str]] = []
    broken: list[str] = []
    try:
        problem = shelf.database.problem()
        rows, broken = shelf.database.rows()
    except sqlite3.Error as exc:
        problem = str(exc)
    damaged += [f"records/{key}" for key in broken]
    damaged += [f"records/{key}" for key, _, _ in rows if store.record(key) is None]
    return {"folder": str(shelf.folder), "checked": checked + len(rows) + len(broken), "damaged": damaged, "database": problem,
            "warnings": list(store.warnings)}


def prune(store: Store) -> dict[str, Any]:
    """Remove what is damaged, what killed runs left behind and folders of older versions; give free space back."""
    shelf = shelf_of(store)
    damaged = verify(store)["damaged"]
    for name in damaged:
        kind, _, key = name.partition("/")
        with contextlib.suppress(OSError, sqlite3.Error):
            shelf.database.remove(key) if kind == "records" else shelf.entries.remove(kind, key)
    left_over, older = shelf.entries.remove_stale(), _older(shelf)
    for folder in older:
        shutil.rmtree(folder, ignore_errors=True)
    before = store.describe()["bytes"]
    with contextlib.suppress(sqlite3.Error):
        shelf.database.shrink()
    return {"folder": str(shelf.folder), "damaged": damaged, "left_over": left_over, "older": [str(folder) for folder in older],
            "freed_bytes": max(0, before - store.describe()["bytes"]), "warnings": list(store.warnings)}


def _is_whole(store: Store, shelf: Shelf, kind: str, key: str) -> bool:
    if kind == "kernels":
        return store.kernel(key) is not None
    if kind.startswith("text-"):
        return store.text(kind.removeprefix("text-"), key) is not None
    return shelf.entries.read(kind, key) is not None


def _schema(shelf: Shelf) -> int:
    with contextlib.suppress(sqlite3.Error):
        return shelf.database.schema()
    return 0


def _older(shelf: Shelf) -> list[Path]:
    found = ((_VERSIONS.fullmatch(folder.name), folder) for folder in shelf.folder.parent.iterdir() if folder.is_dir())
    return sorted(folder for match, folder in found if match is not None and int(match[1]) < serial.SCHEMA)
