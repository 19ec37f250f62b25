"""random_plans.json: its rows, its head, and what it says in a few lines."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

Row = dict[str, Any]
COUNTED = ("planned", "lowered", "built", "refused", "failed")


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many plans were made, lowered and built, how many were refused late or failed, and how many draws were refused before a plan."""
    outcomes = Counter(row["outcome"] for row in rows)
    return {"planned": len(rows), "lowered": sum(row["lowered"] for row in rows), "built": outcomes["built"],
            "refused": outcomes["refused"], "failed": outcomes["failed"], "refused_draws": sum(len(row["refused"]) for row in rows)}


def by(rows: Sequence[Row], column: str) -> dict[str, list[Row]]:
    """Rows by what stands in ``column``, in the order in which they come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[column], []).append(row)
    return found


def reasons(rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    """Who refused draws, with which reason (numbers left out), and how often; the most frequent first."""
    found = Counter((who, "".join("#" if letter.isdigit() else letter for letter in why)) for row in rows for who, why in row["refused"])
    merged: Counter[tuple[str, str]] = Counter()
    for (who, why), count in found.items():
        while "##" in why:
            why = why.replace("##", "#")
        merged[who, why] += count
    return [(who, why, count) for (who, why), count in merged.most_common()]


def is_clean(rows: Sequence[Row]) -> bool:
    """Whether every plan was built or refused with a reason, and no more were built than lowered."""
    found = counts(rows)
    return all(row["outcome"] == "built" or (row["outcome"] == "refused" and row["why"]) for row in rows) \
        and found["built"] <= found["lowered"]


def line(row: Row) -> str:
    """One row in words."""
    used = f", {row['registers']} of {row['registers_cap']} registers, {row['spill_bytes']} bytes spilled" if "registers" in row else ""
    what = f"{row['target']} {row['index']} {row['family']} [{row['shapes']}] {row.get('schedule', '')}"
    return f"{row['outcome']}: {what}{used} {row['why']}"


def summary(rows: Sequence[Row]) -> str:
    """The counts by target, and who spills."""
    lines = []
    for target, some in by(rows, "target").items():
        found = counts(some)
        lines.append(f"{target}: " + ", ".join(f"{found[name]} {name}" for name in COUNTED)
                     + f"; {found['refused_draws']} draws were refused with a reason before")
    spilling = Counter((row["family"], row["risk"]) for row in rows if row.get("spill_bytes"))
    said = ", ".join(f"{count} plans of {family}, of {risk} risk" for (family, risk), count in spilling.most_common())
    lines.append(f"spills: {said or 'none'}")
    return "\n".join(lines)


def write(rows: Sequence[Row], out: Path, commit: str, seed: int) -> Path:
    """Write ``<out>/random_plans.json`` and return its path."""
    path = out / "random_plans.json"
    stamp = {"commit": commit, "date": time.strftime("%Y-%m-%d")}
    compiler = next((row["compiler"] for row in rows if row.get("compiler")), "none")
    document = {"schema": 1, "versions": {**harness.versions(), "compiler": compiler}, **stamp, "seed": seed,
                "counts": {target: counts(some) for target, some in by(rows, "target").items()},
                "reasons": [list(reason) for reason in reasons(rows)],
                "rows": [{key: value for key, value in row.items() if key not in ("refused", "compiler")} for row in rows]}
    with harness.alone(path):
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(document, indent=None, separators=(",", ":")).replace('{"target"', '\n{"target"') + "\n")
        fresh.replace(path)
    return path
