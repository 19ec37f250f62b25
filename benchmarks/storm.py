"""The storm: writers and compiles killed with SIGKILL at random moments. Nothing read may be wrong, nothing committed lost, nothing left.

``make storm`` is the whole of it; the tests run a small one. Exit code 1 where a row is not clean.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "tests")]
CLEAN = ("wrong_reads", "lost", "left", "wrong_answers", "processes")


def rows(seconds: float, kills: int, seed: int) -> list[dict[str, Any]]:
    """Both storms, in a folder of their own, with temporary files beside them."""
    from faults import storm_compiles, storm_writers

    found = []
    for storm, amount in ((storm_compiles.storm, kills), (storm_writers.storm, seconds)):  # forks first: nothing was computed yet
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            (root / "tmp").mkdir()
            before, tempfile.tempdir, os.environ["TMPDIR"] = tempfile.tempdir, str(root / "tmp"), str(root / "tmp")
            try:
                found.append(storm(root, amount, seed))
            finally:
                tempfile.tempdir = before
                del os.environ["TMPDIR"]
    return found


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the four writers")
    parser.add_argument("--kills", type=int, default=200, help="compiles to kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "cpu")
    parser.add_argument("--commit", help="where there is no git here")
    options = parser.parse_args()
    import harness

    found = rows(options.seconds, options.kills, options.seed)
    clean = all(not row.get(name) for row in found for name in CLEAN)
    document = {"schema": 1, "commit": harness.commit(options.commit), "date": time.strftime("%Y-%m-%d"), "versions": harness.versions(),
                "processors": os.cpu_count(), "seed": options.seed, "clean": clean, "rows": found}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "storm.json").write_text(json.dumps(document, indent=1) + "\n")
    for row in found:
        print(json.dumps(row))
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
