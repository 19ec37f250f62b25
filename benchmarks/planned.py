"""Plans the decode step of transformers' types at their real sizes, without weights, building nothing; writes planned.json.

The default configuration of each type's class, in bfloat16 on the meta device, is captured and planned for a preset target:

    python benchmarks/planned.py                       # make planned
    python benchmarks/planned.py --only llama,mixtral
    python benchmarks/planned.py --all --shard 3/16    # the longer list; shards may share --out
"""

import argparse
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
import harness
from covered import models, plans
from covered.judge import TooLong
from covered.sweep import shard

BAR = 0.97  # of the bytes of a decode step
Row = dict[str, Any]


def main() -> int:
    """Plan every type of the list, write planned.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="types, by commas")
    parser.add_argument("--all", action="store_true", help="every type that is known to be made tiny, not only those of the list")
    parser.add_argument("--shard", default="1/1", help="only this part of them, such as 2/8; shards may share --out")
    parser.add_argument("--target", default="cuda/h200", help="preset target to plan for")
    parser.add_argument("--seconds", type=float, default=7200.0, help="no other one is begun after this time")
    parser.add_argument("--item-seconds", type=int, default=300)
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "cpu", help="folder of planned.json")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    options.commit = harness.commit(options.commit)  # what is planned, whatever is committed meanwhile
    rows = run(chosen(options), options)
    print(f"{sum(row['share'] >= BAR for row in rows)} of {len(rows)} planned with at least {BAR:.0%} of their decode bytes; "
          f"{options.out / 'planned.json'}")
    return 0


def chosen(options: argparse.Namespace) -> list[str]:
    """The types of this shard."""
    asked = [name for name in options.only.split(",") if name]
    names = [name for name in models.covered(options.all or bool(asked)) if name in asked or not asked]
    number, count = shard(options.shard)
    return names[number - 1::count]


def run(names: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """One row per type, written as soon as it is known, until the time is over."""
    began, ctx, rows = time.monotonic(), plans.context(options.target), []
    signal.signal(signal.SIGALRM, _too_long)
    for name in names:
        if time.monotonic() - began > options.seconds:
            break
        signal.alarm(options.item_seconds)
        row = plans.row_of(name, ctx)
        signal.alarm(0)
        gc.collect()
        rows.append(row)
        write([row], options.out, options.commit)
        left = ", ".join(f"{count} {op}" for op, count in row.get("framework_operators", {}).items())
        print(f"{name:24} {row['share']:7.2%} {row['seconds']:6.1f} s {row['reason'] or left}", flush=True)
    return rows


def _too_long(*_: Any) -> None:
    raise TooLong("its time is over")


def write(rows: Sequence[Row], out: Path, given_commit: str | None) -> Path:
    """Write ``<out>/planned.json`` and return its path; rows of types that were not planned now are kept."""
    path = out / "planned.json"
    with harness.alone(path):
        stamp = {"commit": harness.commit(given_commit), "date": time.strftime("%Y-%m-%d"), "gpu_uuid": "none"}
        names = {row["name"] for row in rows}
        kept = [row for row in json.loads(path.read_text())["rows"] if row["name"] not in names] if path.exists() else []
        found = sorted([*kept, *({**row, **stamp} for row in rows)], key=lambda row: str(row["name"]))
        document = {"schema": 1, "gpu": "no GPU, planned only", "driver": "none", "versions": harness.versions(), **stamp,
                    "bar": BAR, "planned": sum(row["share"] >= BAR for row in found), "rows": found}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(document, indent=1) + "\n")
        fresh.replace(path)
    return path


if __name__ == "__main__":
    sys.exit(main())
