"""sweep.json and ablation.json: rows of one commit, from several commands; ratios are taken within one command only."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

Row = dict[str, Any]


def known(path: Path, commit: str, versions: dict[str, str]) -> list[Row]:
    """The rows that are there already.

    Raises:
        SystemExit: nobody says which commit this is, or the rows are of another commit, or of other versions of what is installed.
    """
    if commit == "unknown":
        raise SystemExit("which commit is this? there is no git here; name it by --commit, since rows of one commit fill one file")
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    others = sorted({row["commit"][:10] for row in document["rows"] if row["commit"] != commit})
    if others:
        raise SystemExit(f"{path} holds rows of commit {', '.join(others)} and this is {commit[:10]}; rows of one commit fill one file: "
                         "move it away, or name another folder by --out")
    differ = [f"{name} {old}" for name, old in document["versions"].items() if versions.get(name, old) != old]
    if differ:
        raise SystemExit(f"{path} holds rows made with {', '.join(differ)}, which are other versions than those here; "
                         "measure with the same ones, or name another folder by --out")
    return list(document["rows"])


def missing(rows: Sequence[Row], key: dict[str, str], systems: Sequence[str]) -> list[str]:
    """The systems that have no time yet for the model, type and workload of ``key``; a row that says why it has none is no time."""
    there = {row["system"] for row in rows if not row["why"] and all(row[name] == value for name, value in key.items())}
    return [system for system in systems if system not in there]


def add(rows: Sequence[Row], out: Path, name: str, ceiling_gbps: float, commit: str) -> Path:
    """Put rows of one command beside those that are there; each takes the place of what the same command said before, and of
    what was said instead of a time."""

    def stays(old: Row) -> bool:
        return not any(_same(old, new) and (old["run"] == new["run"] or old["why"]) for new in rows)

    return harness.write_results(name, list(rows), ceiling_gbps, out, commit, stays=stays)


def _same(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in ("model", "dtype", "workload", "system"))
