"""Faults: each is injected, and the results say whether it was detected, what the user saw and that nothing was lost.

``make faults`` injects every one that needs no GPU; ``make faults TIER=device`` those that need one. Exit code 1 where a row is not green.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "tests")]


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=("host", "device"), default="host")
    parser.add_argument("--only", default="", help="faults whose area or name holds this text; nothing is written")
    parser.add_argument("--out", type=Path, help="folder of faults.json (default: results/cpu, results/h200 for the device tier)")
    parser.add_argument("--commit", help="where there is no git here")
    options = parser.parse_args()
    os.environ["AGENTCOMPILE_CONFIG"] = ""
    import harness
    from faults import registry

    chosen = [f for f in registry.load().values() if f.tier == options.tier and (options.only in f.area or options.only in f.name)]
    rows = []
    for one in chosen:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            rows.append(registry.result(one, Path(folder)))
        row = rows[-1]
        state = "ok " if row["detected"] else "BAD"
        print(f"{state} {row['seconds']:6.1f} s  {row['area']}: {row['fault']}: {row['seen'][:160]}", flush=True)
    bad = [row["fault"] for row in rows if not row["detected"]]
    print(f"{len(rows)} faults, {len(bad)} not met{': ' if bad else ''}{', '.join(bad)}")
    if not options.only:
        out = options.out or ROOT / "results" / ("cpu" if options.tier == "host" else "h200")
        where = harness.machine() if options.tier == "device" else {"processors": os.cpu_count()}
        document = {"schema": 1, **where, "commit": harness.commit(options.commit), "date": time.strftime("%Y-%m-%d"),
                    "versions": harness.versions(), "rows": rows}
        out.mkdir(parents=True, exist_ok=True)
        (out / "faults.json").write_text(json.dumps(document, indent=1) + "\n")
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
