"""Faults: each is injected, and the results say whether it was detected, what the user saw and that nothing was lost.

``make faults`` injects every one that needs no GPU; ``make faults TIER=device`` those that need one. Exit code 1 where a row is not green.
"""

import argparse
import fcntl
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "tests")]


def save(row: dict[str, Any], out: Path, head: dict[str, Any], names: set[str]) -> None:
    """Put one row into ``faults.json`` in place of its older one, beside those of other processes; rows of no fault any more go."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "faults.json"
    with open(out / ".faults.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = json.loads(path.read_text())["rows"] if path.exists() else []
        rows = {one["fault"]: one for one in (*kept, {**row, "commit": head["commit"], "date": head["date"]}) if one["fault"] in names}
        order = sorted(rows.values(), key=lambda one: (one["area"], one["fault"]))
        fresh = out / ".faults.new"
        fresh.write_text(json.dumps({**head, "rows": order}, indent=1) + "\n")
        fresh.replace(path)


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=("host", "device"), default="host")
    parser.add_argument("--only", default="", help="faults whose area or name holds one of these texts, comma separated")
    parser.add_argument("--missing", action="store_true", help="only faults that have no green row yet")
    parser.add_argument("--out", type=Path, help="folder of faults.json (default: results/cpu, for the device tier by the name of the GPU)")
    parser.add_argument("--commit", help="where there is no git here")
    options = parser.parse_args()
    os.environ["AGENTCOMPILE_CONFIG"] = ""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it, and so would its children
    import harness
    from faults import registry

    out = options.out or (ROOT / "results" / "cpu" if options.tier == "host" else harness.gpu_folder())
    where = harness.machine() if options.tier == "device" else {"processors": os.cpu_count()}
    head = {"schema": 1, **where, "commit": harness.commit(options.commit), "date": time.strftime("%Y-%m-%d"),
            "versions": harness.versions()}
    tier = {name: one for name, one in registry.load().items() if one.tier == options.tier}
    path = out / "faults.json"
    known = json.loads(path.read_text())["rows"] if options.missing and path.exists() else []
    green = {row["fault"] for row in known if row["detected"]}
    words = options.only.split(",")
    chosen = [one for one in tier.values() if one.name not in green and any(word in one.area or word in one.name for word in words)]
    bad = []
    for one in chosen:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            row = registry.result(one, Path(folder))
        save(row, out, head, set(tier))
        bad += [] if row["detected"] else [one.name]
        state = "ok " if row["detected"] else "BAD"
        print(f"{state} {row['seconds']:6.1f} s  {row['area']}: {row['fault']}: {row['seen'][:160]}", flush=True)
    print(f"{len(chosen)} faults, {len(bad)} not met{': ' if bad else ''}{', '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
