"""What a bundle tells beside what runs: which failures were recorded, what was tried and what was not, and what was decided from."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from attrs import evolve, frozen

from ...errors import Failure
from ...ir import serial
from ...ir.bundle import Bundle, FileEntry
from ...ir.decisions import Decisions
from ...ir.search_log import Tried

FAILURES = "failures.json"
SEARCH = "search.json"
DECISIONS = "decisions.json"


@frozen(kw_only=True)
class Evidence:
    """The files, read; empty for a bundle that has none."""

    tried: tuple[Tried, ...] = ()
    failures: tuple[Failure, ...] = ()
    decisions: Decisions | None = None


def with_evidence(bundle: Bundle, tried: Iterable[Tried], failures: Iterable[Failure], decisions: Decisions | None) -> Bundle:
    """The bundle with ``failures.json``, ``search.json`` and ``decisions.json``. Tracebacks, which hold paths of here, stay here."""
    added = {FAILURES: serial.dumps([evolve(f, traceback="") for f in failures], indent=1).encode(),
             SEARCH: serial.dumps(list(tried)).encode()}
    if decisions is not None:
        added[DECISIONS] = serial.dumps(decisions).encode()
    files = tuple(sorted({**dict(bundle.files), **added}.items()))
    entries = tuple(FileEntry(path=path, sha256=hashlib.sha256(data).hexdigest()) for path, data in files)
    return evolve(bundle, files=files, manifest=evolve(bundle.manifest, files=entries))


def read(folder: Path) -> Evidence:
    """The evidence of a bundle whose hashes were verified.

    Raises:
        UsageError: a file is not what it should be.
    """
    def items(name: str) -> list[object]:
        path = folder / name
        found = serial.parse(path.read_text()) if path.is_file() else []
        return found if isinstance(found, list) else []

    path = folder / DECISIONS
    decisions = serial.loads(path.read_text(), Decisions) if path.is_file() else None
    return Evidence(decisions=decisions, tried=tuple(serial.structure(item, Tried) for item in items(SEARCH)),
                    failures=tuple(serial.structure(item, Failure) for item in items(FAILURES)))
