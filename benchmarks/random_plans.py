"""Random plans for each of the six architectures: drawn over all families, planned, lowered, and built without a GPU.

300 plans per target, drawn by seed: random kinds, shapes, types, ragged and unaligned sizes, and a random schedule of whoever serves
them. What a rule or a family refuses is counted by its reason, and something else is drawn; what fails to be lowered or built is a
mistake of the planner. Several processes build at once:

    python benchmarks/random_plans.py --jobs 32                          # all six targets; writes random_plans.json
    python benchmarks/random_plans.py --count 30 --targets h200,a100     # a sample; writes nothing
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
from random_planning import plans, results

PLANS = 300


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--count", type=int, default=PLANS, help="plans of each target (default: %(default)s)")
    made.add_argument("--first", type=int, default=0, help="number of the first plan (default: %(default)s)")
    made.add_argument("--targets", default=",".join(plans.TARGETS), help="presets, by commas (default: %(default)s)")
    made.add_argument("--families", default="", help="only these, by commas; default: every installed one")
    made.add_argument("--seed", type=int, default=8)
    made.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes (default: %(default)s)")
    made.add_argument("--seconds", type=float, default=7200.0, help="no plan is waited for after this time (default: %(default)s)")
    made.add_argument("--commit")
    made.add_argument("--out", type=Path, help="folder of random_plans.json; default: benchmarks/results/cpu where the run is complete")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Draw, build, print, write; 1 where anything failed or was left out."""
    options = parser().parse_args(arguments)
    targets = [name for name in options.targets.split(",") if name]
    unknown = sorted(set(targets) - set(plans.TARGETS))
    if unknown or not targets or options.count < 1 or options.jobs < 1:
        parser().error(f"--targets is {options.targets!r}; allowed: {', '.join(plans.TARGETS)}; --count and --jobs are at least 1")
    commit = harness.commit(options.commit)
    families = tuple(name for name in options.families.split(",") if name)
    numbers = range(options.first, options.first + options.count)
    jobs = [(name, number, options.seed) for number in numbers for name in targets]
    rows = run(jobs, families, options)
    print(results.summary(rows), flush=True)
    missing = plans.undrawn(rows, families)
    if missing:
        print(f"no plan is of {', '.join(missing)}", file=sys.stderr)
    whole = not families and not options.first and options.count >= PLANS and targets == list(plans.TARGETS)
    complete = whole and len(rows) == len(jobs) and not missing
    if options.out or complete:
        print(results.write(rows, options.out or harness.RESULTS / "cpu", commit, options.seed))
    return 0 if len(rows) == len(jobs) and results.is_clean(rows) and not (missing and whole) else 1


def run(jobs: list[tuple[str, int, int]], families: tuple[str, ...], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all jobs that end in time, in the order of the jobs; a plan whose process fails has a row that says so."""
    began, found = time.monotonic(), {}
    context = multiprocessing.get_context("spawn")  # compilers are children with pipes of their own
    with ProcessPoolExecutor(options.jobs, mp_context=context, initializer=plans.prepare, initargs=(families,)) as pool:
        waiting = {pool.submit(plans.of_process, job): job for job in jobs}
        try:
            for done in as_completed(waiting, timeout=options.seconds):
                row = found[waiting[done]] = _row(done, waiting[done])
                if row["outcome"] not in ("built", "refused") or row.get("spill_bytes"):
                    print(results.line(row), flush=True)
        except TimeoutError:
            print(f"{len(jobs) - len(found)} plans were not reached within {time.monotonic() - began:.0f} s", file=sys.stderr)
            pool.shutdown(wait=False, cancel_futures=True)
    return [found[job] for job in jobs if job in found]


def _row(done: "Future[dict[str, Any]]", job: tuple[str, int, int]) -> dict[str, Any]:
    try:
        return done.result()
    except Exception as error:
        return {"target": job[0], "arch": "", "index": job[1], "drawn": "", "family": "", "shapes": "", "refused": [], "lowered": False,
                "outcome": "failed", "why": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    sys.exit(main())
