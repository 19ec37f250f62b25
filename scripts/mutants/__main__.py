"""Make mutants of every kernel family and of the device library, and judge them as candidates are judged.

    PYTHONPATH=scripts python -m mutants [--count 300] [--seed 1] [--out benchmarks/results/cpu/mutants.json]

What was judged before under the same checks is not judged again (``--cache``). Exit code 0 where every wrong mutant was
refused, every other one is shown to be right, and these are few; 1 where not.
"""

import argparse
import sys
import time
from pathlib import Path

from agentcompile_core.plugin_api import default_root

from .equivalence import CASES, proven
from .judging import Asked, Cache, Finding, judged
from .planning import sampled
from .results import document, shortcomings, table, write

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "cpu" / "mutants.json"


def main() -> int:
    """Judge, say what was found, write the results."""
    arguments = _arguments()
    began = time.monotonic()

    def report(finding: Finding) -> None:
        why = finding.message or ", ".join((*finding.other_bits_on, *finding.no_effect_on))
        print(f"{time.monotonic() - began:7.1f} {finding.outcome:12} {finding.by:12} {finding.subject:20} {finding.file}:{finding.line} "
              f"{finding.operator} {finding.id} | {finding.before} | {finding.after} | {why[:110]}", flush=True)

    cached = Cache(arguments.cache or (default_root() or Path(".")) / "mutants")
    asked = Asked(seed=arguments.seed, processes=arguments.processes, trust_kills=arguments.trust_kills)
    mutants = sampled(arguments.count, arguments.seed)
    found = judged(mutants, asked, cached, report)
    found = document(proven(found, mutants, cached, asked, arguments.cases, lambda text: print(text, flush=True)), asked, arguments.commit)
    write(arguments.out, found)
    print(table({**found["by_class"], "all": found["total"]}), table(found["by_family"]), sep="\n\n")
    said = shortcomings(found)
    print("\n".join(said))
    return int(bool(said))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=360, help="mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="workers (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=CASES, help="random cases that a proven mutant must agree on (default: %(default)s)")
    parser.add_argument("--commit", help="where there is no git here")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the results file (default: that of the repository)")
    parser.add_argument("--cache", type=Path, help="folder of what was judged before (default: in the cache of AgentCompile)")
    parser.add_argument("--trust-kills", action="store_true", help="do not judge again what earlier versions of the checks refused")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
