"""kernels.json: one row per operator, shape and type, of one commit only."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from operator_claims import KEY, claims, name_of

Row = dict[str, Any]


def summary(rows: Sequence[Row]) -> str:
    """The claims in lines, with the rows that miss them."""
    lines = [f"{held} of {count}: {text}" + "".join(f"\n    not: {name}" for name in missed) for text, held, count, missed in claims(rows)]
    wrong = [f"{name_of(row)}: {row['why']}" for row in rows if row["why"]]
    return "\n".join([*lines, *(f"without a kernel: {one}" for one in wrong)])


def key_of(row: Row) -> tuple[str, ...]:
    """What a row is known by."""
    return tuple(row[name] for name in KEY)


def known(out: Path, commit: str) -> dict[tuple[str, ...], Row]:
    """The rows of this commit that are there already and hold a time."""
    path = out / "kernels.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {key_of(row): row for row in rows if row["commit"] == commit and not row["why"]}


def write(row: Row, out: Path, commit: str, head: Row) -> Path:
    """Add one row to ``<out>/kernels.json``; rows of other commits go. ``head``: machine and ceilings of this process."""
    path = out / "kernels.json"
    with harness.alone(path):
        date = time.strftime("%Y-%m-%d")
        ceilings = {name: head[name] for name in ("read_ceiling_gbps", "copy_ceiling_gbps")}
        stamp = {"commit": commit, "date": date, "gpu_uuid": head["gpu_uuid"], **ceilings}
        rows = {**known(out, commit), key_of(row): {**row, **stamp}}
        document = {"schema": 1, **head, "versions": harness.versions(), "commit": commit, "date": date,
                    "rows": [rows[key] for key in sorted(rows)]}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(document, indent=1) + "\n")
        fresh.replace(path)
    return path
