"""Files of ``cache export`` that were changed, cut off, or hold what must not be taken."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_store_faults import filled, record

from agentcompile_core.ir import serial
from agentcompile_core.store import Store, exchange

from .registry import add, fault
from .seen import refused

AREA, KEPT = "storage", "nothing of the file was taken"
Lines = list[dict[str, Any]]


def _exported(folder: Path) -> tuple[Path, Lines]:
    filled(folder / "from")
    store, path = Store(folder / "from"), folder / "export.gz"
    store.put_text("searches", "search-1", "ended")
    exchange.write(store, path)
    return path, [json.loads(line) for line in gzip.open(path, "rt")]


def _import(change: Callable[[Lines], object], words: str) -> Any:
    def run(folder: Path) -> str:
        path, lines = _exported(folder)
        change(lines)
        with gzip.open(path, "wt") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        store = Store(folder / "to")
        said = refused(lambda: exchange.read(store, path), words)
        assert store.describe()["records"] == 0 and store.text("searches", "search-1") is None
        return said

    return run


CHANGES: dict[str, tuple[Callable[[Lines], object], str]] = {
    "with a changed record": (lambda x: x[1].update(text=x[1]["text"].replace("gemv", "gemw")), "was changed after it was exported"),
    "without its end": (lambda x: x.pop(), "cut off"),
    "that lacks an entry": (lambda x: x.pop(1), "ends after"),
    "of another schema": (lambda x: x[0].update(schema=99), "schema 99"),
    "that is something else": (lambda x: x[0].update(format="other"), "no export of a cache"),
    "with a key that leaves the cache": (lambda x: x[1].update(key="../../evil"), "letters, digits"),
    "with a record under another key": (
        lambda x: x[1].update(key="r9", sha256=exchange._sum("records", "r9", x[1]["text"])), "another key"),
}
for _name, (_change, _words) in CHANGES.items():
    add(AREA, f"an import {_name}", f"a file of cache export {_name}", _import(_change, _words), KEPT)


@fault(AREA, "a file of cache export is cut in half", KEPT)
def _an_import_that_was_cut(folder: Path) -> str:
    path, _ = _exported(folder)
    path.write_bytes(path.read_bytes()[:-40])
    return refused(lambda: exchange.read(Store(folder / "to"), path), "damaged")


@fault(AREA, "a file of cache export holds kernels, captures and answers of the chain", "its records were taken, and no kernel")
def _an_import_with_kernels(folder: Path) -> str:
    path, lines = _exported(folder)
    texts = {kind: (f"{kind}-1", "evil") for kind in ("kernels", "known", "capture", "chain")}
    planted = [{"kind": kind, "key": key, "text": text, "sha256": exchange._sum(kind, key, text)} for kind, (key, text) in texts.items()]
    lines[1:1] = planted
    lines[-1]["end"] += len(planted)
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    store = Store(folder / "to")
    found = exchange.read(store, path)
    assert found["refused"] == 4 and store.record("r1") == record() and set(store.describe()) == {"records", "bytes", "text-searches"}
    assert not any(store.text(kind, key) for kind, (key, _) in texts.items()) and serial.SCHEMA
    return f"{found['added']} entries added, {found['refused']} of other kinds not taken"
