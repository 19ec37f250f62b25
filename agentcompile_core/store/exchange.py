"""The cache's evidence as a file for another machine: measurements and which searches ended. Never a kernel, never a text that runs.

A file is gzipped lines of JSON: a head, one line per entry with the hash of its text, and an end with their number. All of it is
checked before anything is taken. Kernels, captures and answers of the chain (which hold sources) are not taken, whoever wrote them:
kernels are built here, from the installed families, when a run wants them.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..ir import serial
from ..ir.record import TuningRecord
from ..private_folders import PrivateFolder
from ..version import __version__
from . import Store
from .care import shelf_of
from .entries import check_name

FORMAT = "agentcompile-cache"
RECORDS = "records"
TAKEN = ("searches", "winners")  # kinds of texts that name records and hold no code
MAX_LINE_BYTES = 16 << 20
MAX_LINES = 10_000_000


def write(store: Store, path: Path) -> dict[str, Any]:
    """Write the records and the ends of searches to ``path``, which appears whole or not at all; damaged ones are left out.

    Raises:
        UsageError: there is no cache, or the file cannot be written.
    """
    shelf, counts = shelf_of(store), {RECORDS: 0, **dict.fromkeys(TAKEN, 0)}
    try:
        with PrivateFolder(path.absolute().parent, f".{path.name}-") as private:
            with gzip.open(private / "file", "wt", encoding="utf-8") as file:
                file.write(_line({"format": FORMAT, "schema": serial.SCHEMA, "core": __version__}))
                for kind, key, text in _entries(store):
                    counts[kind] += 1
                    file.write(_line({"kind": kind, "key": key, "text": text, "sha256": _sum(kind, key, text)}))
                file.write(_line({"end": sum(counts.values())}))
            (private / "file").replace(path)
    except OSError as exc:
        raise UsageError(f"cannot write the export to {path}: {exc.strerror or exc}") from exc
    return {"file": str(path), "folder": str(shelf.folder), "entries": counts}


def read(store: Store, path: Path) -> dict[str, Any]:
    """Take what ``write`` wrote: everything is checked first, then what this cache does not have is added; its own stays.

    Raises:
        UsageError: it is no such file, of another version, damaged or cut off; then nothing was taken.
    """
    shelf, found = shelf_of(store), list(_checked(path))
    added, known, refused = 0, 0, 0
    for kind, key, text in found:
        if kind == RECORDS:
            have = store.record(key) is not None
            if not have:
                store.put_record(serial.loads(text, TuningRecord))
        elif kind in TAKEN:
            have = store.text(kind, key) is not None
            if not have:
                store.put_text(kind, key, text)
        else:
            refused += 1
            continue
        added, known = added + (not have), known + have
    return {"file": str(path), "folder": str(shelf.folder), "added": added, "known": known, "refused": refused,
            "warnings": list(store.warnings)}


def _entries(store: Store) -> Iterator[tuple[str, str, str]]:
    shelf = shelf_of(store)
    for key, _, text in shelf.database.rows()[0]:
        if store.record(key) is not None:
            yield RECORDS, key, text
    for kind, key in shelf.entries.all_keys():
        name = kind.removeprefix("text-")
        kept = store.text(name, key) if name in TAKEN else None
        if kept is not None:
            yield name, key, kept


def _checked(path: Path) -> Iterator[tuple[str, str, str]]:
    lines = _lines(path)
    head = next(lines, None)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise UsageError(f"{path} is no export of a cache; make one with `agentcompile cache export FILE`")
    if head.get("schema") != serial.SCHEMA:
        raise UsageError(f"{path} has schema {head.get('schema')!r}, this version {__version__} reads schema {serial.SCHEMA}; "
                         "export it again with this version")
    count = 0
    for number, line in enumerate(lines, 2):
        if isinstance(line, dict) and "end" in line:
            if line["end"] != count:
                raise UsageError(f"{path} ends after {count} of {line['end']!r} entries; copy it whole or export it again")
            return
        yield _entry(line, number, path)
        count += 1
    raise UsageError(f"{path} is cut off after {count} entries; copy it whole or export it again")


def _entry(line: Any, number: int, path: Path) -> tuple[str, str, str]:
    values = [line.get(name) if isinstance(line, dict) else None for name in ("kind", "key", "text", "sha256")]
    if not all(isinstance(value, str) for value in values):
        raise UsageError(f"line {number} of {path} is no entry; export it again")
    kind, key, text, total = map(str, values)
    check_name("kind", kind), check_name("key", key)
    if total != _sum(kind, key, text):
        raise UsageError(f"line {number} of {path} was changed after it was exported: its hash is another one; export it again")
    if kind == RECORDS and serial.loads(text, TuningRecord).key != key:
        raise UsageError(f"line {number} of {path} names the record of another key; export it again")
    return kind, key, text


def _lines(path: Path) -> Iterator[Any]:
    try:
        with gzip.open(path, "rb") as file:
            for _ in range(MAX_LINES):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_LINE_BYTES:
                    raise UsageError(f"{path} has a line of more than {MAX_LINE_BYTES >> 20} MiB; it is no export of a cache")
                yield json.loads(line)
    except (EOFError, zlib.error, ValueError, RecursionError) as exc:
        raise UsageError(f"{path} is damaged ({exc}); copy it whole or export it again") from exc
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror or exc}") from exc
    raise UsageError(f"{path} has more than {MAX_LINES} lines; it is no export of a cache")


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"


def _sum(kind: str, key: str, text: str) -> str:
    return hashlib.sha256("\0".join((kind, key, text)).encode(errors="surrogatepass")).hexdigest()
