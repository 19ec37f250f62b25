"""coverage.json: its rows, its head, and what it says in one line."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

Row = dict[str, Any]
ON_CPU = {"gpu": "no GPU, generated kernels on the emulator", "gpu_uuid": "none", "driver": "none"}


def write(rows: Sequence[Row], out: Path, options: Any) -> Path:
    """Write ``<out>/coverage.json`` and return its path; rows of what was not judged now are kept.

    Every row says at which commit and when it was judged, on a GPU also on which one.
    """
    path = out / "coverage.json"
    with harness.alone(path):
        return _write(path, rows, options)


def _write(path: Path, rows: Sequence[Row], options: Any) -> Path:
    here = harness.machine() if options.device == "cuda" else dict(ON_CPU)
    stamp = {"commit": harness.commit(options.commit), "date": time.strftime("%Y-%m-%d"), "gpu_uuid": here["gpu_uuid"]}
    new = [{**row, **stamp} for row in rows]
    judged = {(row["kind"], row["name"]) for row in new}
    kept = [row for row in json.loads(path.read_text())["rows"] if (row["kind"], row["name"]) not in judged] if path.exists() else []
    found = sorted(kept + new, key=lambda row: (row["kind"], row["name"], row["order"]))
    document = {"schema": 1, **here, "versions": harness.versions(), "commit": stamp["commit"], "date": stamp["date"],
                "counts": counts(found), "rows": found}
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(document, indent=1) + "\n")
    fresh.replace(path)
    return path


def counts(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """How many rows have which outcome, by kind and order."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        outcomes = found.setdefault(f"{row['kind']}s, order {row['order']}", dict.fromkeys(("ok", "wrong", "raised"), 0))
        outcomes[row["outcome"]] += 1
    return found


def not_run(rows: Sequence[Row], chosen: Sequence[tuple[str, str]]) -> list[str]:
    """What was not judged in both orders."""
    judged = Counter((row["kind"], row["name"]) for row in rows)
    return [f"{kind} {name}" for kind, name in chosen if judged[kind, name] < 2]


def is_clean(rows: Sequence[Row], chosen: Sequence[tuple[str, str]]) -> bool:
    """Whether everything was judged in both orders and is right."""
    return bool(rows) and all(row["outcome"] == "ok" for row in rows) and not not_run(rows, chosen)


def summary(rows: Sequence[Row], chosen: Sequence[tuple[str, str]]) -> str:
    """The counts, and how many were not run."""
    parts = [f"{what}: {', '.join(f'{n} {outcome}' for outcome, n in found.items())}" for what, found in counts(rows).items()]
    left = not_run(rows, chosen)
    return "; ".join(parts) + (f"; {len(left)} not run in both orders" if left else "")
