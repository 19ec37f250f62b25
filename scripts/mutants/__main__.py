"""Make mutants of every kernel family and judge them: how many wrong kernels would be eligible?

    PYTHONPATH=scripts python -m mutants [--count 320] [--seed 1] [--out benchmarks/results/cpu/mutants.json]

Exit code 0 where every mutant was refused or is shown to be equivalent, 1 where one is eligible.
"""

import argparse
import sys
import time
from pathlib import Path

from agentcompile_core.plugin_api import default_root

from .judging import Cache, Finding, judged
from .planning import sampled


def main() -> int:
    """Judge, say what was found, write the results."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=320)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=None)
    arguments = parser.parse_args()
    began = time.monotonic()

    def report(finding: Finding) -> None:
        print(f"{time.monotonic() - began:7.1f} {finding.outcome:12} {finding.by:12} {finding.subject:20} {finding.file}:{finding.line} "
              f"{finding.operator} | {finding.before} | {finding.after} | {finding.message[:110]}", flush=True)

    cached = Cache(arguments.cache or (default_root() or Path(".")) / "mutants")
    found = judged(sampled(arguments.count, arguments.seed), arguments.seed, cached, arguments.processes, report)
    return int(any(finding.outcome == "eligible" for finding in found))


if __name__ == "__main__":
    sys.exit(main())
