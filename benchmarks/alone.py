"""One results file of what `decode.py MODEL --baselines= --warm` wrote into a folder about models in either type, all at one commit.

    python benchmarks/decode.py qwen3-1.7b --baselines= --warm --budget-s 40 --repetitions 3 --out FOLDER
    python benchmarks/decode.py llama-3.1-8b --dtype bfloat16 --baselines= --warm --budget-s 40 --repetitions 3 --out FOLDER
    python benchmarks/alone.py FOLDER --out benchmarks/results/h200    # writes alone.json
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

FILES = {  # what is taken of each file beside decode.json
    "accuracy": ("positions", "rms_ratio", "p999_ratio"),
    "compile_time": ("cold_s", "warm_s"),
    "memory": ("extra_memory_bytes", "weight_bytes", "kv_bytes"),
}
LATE = ("compile_time",)  # what a command that was cut off behind its other rows has not written: that stays open
TYPES = ("", "_bf16")


def merged(folder: Path) -> dict[str, Any]:
    """The document of alone.json.

    Raises:
        SystemExit: a file or a model's row is missing, or rows are of several commits.
    """
    heads, rows = [], []
    for suffix in TYPES:
        if not (folder / f"decode{suffix}.json").exists():
            continue
        decode, *others = (_read(folder / f"{name}{suffix}.json") for name in ("decode", *FILES))
        heads.append(decode)
        for row in (row for row in decode["rows"] if row["system"] == "agentcompile"):
            found = [next((r for r in other["rows"] if r["model"] == row["model"]), None) for other in others]
            for name, beside in zip(FILES, found, strict=True):
                if beside is None and name not in LATE:
                    raise SystemExit(f"{folder}: {name}{suffix}.json has no row of {row['model']}; run decode.py with --warm")
                row |= {key: beside[key] if beside is not None else None for key in FILES[name]}
                _check_commit(folder, row, beside or row)
            rows.append(row)
    if not rows:
        raise SystemExit(f"{folder}: no decode.json in it; write it by decode.py --out {folder}")
    for row in rows:
        _check_commit(folder, rows[0], row)
    newest = max(heads, key=lambda head: str(head["date"]))
    return {**newest, "read_ceiling_gbps": max(row["read_ceiling_gbps"] for row in rows), "rows": rows}


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise SystemExit(f"{path} is missing; run decode.py with --warm")
    return dict(json.loads(path.read_text()))


def _check_commit(folder: Path, one: dict[str, Any], other: dict[str, Any]) -> None:
    if one["commit"] != other["commit"]:
        raise SystemExit(f"{folder}: rows of {one['model']} at {one['commit'][:10]} and of {other['model']} at {other['commit'][:10]}; "
                         "measure all of them at one commit")


def main() -> int:
    """Merge the files of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    options = parser.parse_args()
    text = json.dumps(merged(options.folder), indent=1) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "alone.json").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
