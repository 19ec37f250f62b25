"""Times single operators: the kernel that the compiler selects beside eager, torch.compile and cuBLAS, with cold caches.

GEMV at batch 1 over every projection of nine models, norms, softmax, pointwise and reductions on rows by columns, products of
matrices. Each operator is a module of its own that goes through the compiler (validated, selected by time); then all contenders
are timed by one clock (operators/clock.py). Rows are written as they come, those of this commit are not measured again, and
several GPUs take a part each:

    python benchmarks/single_operators.py                                                     # writes kernels.json below benchmarks/results
    CUDA_VISIBLE_DEVICES=1 python benchmarks/single_operators.py --shard 2/2 --seconds 460    # beside --shard 1/2 on GPU 0
    python benchmarks/single_operators.py --device cpu                 # a few elements on the emulator; writes nothing
"""

import argparse
import gc
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness
from operators import clock, compiling, contenders, results
from operators.cases import Case, cases
from paired_ratio import paired_ratio

BUDGET_S = {"head": 12.0, "gemv": 5.0, "gemm": 20.0}
PLANS = 16
OTHERS_S = 4.0  # the spaces of rows are small
LARGE_BYTES, LARGE_S = 64 << 20, 7.0  # of which one candidate is checked and timed in a second
CPU_S, CPU_PLANS = 120.0, 2
ON_CPU = {"gpu": "no GPU, generated kernels on the emulator", "gpu_uuid": "none", "driver": "none", "read_ceiling_gbps": 0.0,
          "copy_ceiling_gbps": 0.0}
PEERS = ("eager", "eager_fused", "torch_compile", "torch_compile_autotune")
OFF = 2.0  # times the framework's own error, and the rounding of the result, at the most
Row = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    made.add_argument("--only", default="", help="families, operators or shapes, by commas: gemv,rms_norm,4096x4096")
    made.add_argument("--shard", default="1/1", help="only this part of them, such as 1/2; shards may share --out and --cache")
    made.add_argument("--seconds", type=float, default=1800.0, help="no other operator is begun after this time (default: %(default)s)")
    made.add_argument("--budget-s", type=float, help="search budget of each; default: GEMV 5 s, heads 12 s, products 20 s, "
                      "others 4 s, from 64 MiB on 7 s")
    made.add_argument("--budget-plans", type=int, help=f"candidates of each operator (default: {PLANS}, on the CPU {CPU_PLANS})")
    made.add_argument("--again", action="store_true", help="measure rows of this commit again")
    made.add_argument("--no-autotune", action="store_true", help="products without torch.compile's max-autotune, which takes long")
    made.add_argument("--cache", type=Path, help="folder of kernels and timings; default: none is kept")
    made.add_argument("--commit")
    made.add_argument("--out", type=Path, help="folder of kernels.json; default: that of the GPU below benchmarks/results, on the CPU none")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure what is not there yet, print every row and the claims; 1 where a row is wrong or was not reached."""
    options = parser().parse_args(arguments)
    commit = harness.commit(options.commit)
    out = options.out or (None if options.device == "cpu" else harness.gpu_folder())
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    chosen = wanted(options)
    there = {} if out is None or options.again else results.known(out, commit)
    left = [case for case in chosen if case.key not in there]
    rows = measure_all(left, options, out, commit) if left else []
    print(results.summary([*there.values(), *rows]), flush=True)
    reached = len(rows) == len(left)
    print(f"{len(rows)} rows measured, {len(there)} there already, {len(left) - len(rows)} not reached", flush=True)
    return 0 if reached and not any(row.get("why") for row in rows) else 1


def wanted(options: argparse.Namespace) -> list[Case]:
    """The cases that are asked for, those of this shard."""
    names = {name for name in options.only.split(",") if name}
    found = [case for case in cases(small=options.device == "cpu") if not names or names & {case.family, case.op, case.shape}]
    number, count = harness.shard(options.shard)
    return found[number - 1::count]


def measure_all(left: list[Case], options: argparse.Namespace, out: Path | None, commit: str) -> list[Row]:
    """The rows of cases in order, until the time is over; each is written when it is there."""
    began = time.monotonic()
    head = ON_CPU if options.device == "cpu" else {**harness.machine(), "read_ceiling_gbps": harness.read_ceiling_gbps(),
                                                   "copy_ceiling_gbps": clock.copy_ceiling_gbps()}
    bench = compiling.Bench(options.device, options.cache, options.budget_plans or (CPU_PLANS if options.device == "cpu" else PLANS))
    rows: list[Row] = []
    try:
        for case in left:
            if time.monotonic() - began > options.seconds:
                break
            row = row_of(case, bench, head, options)
            rows.append(row)
            print(line(row), flush=True)
            if out is not None:
                results.write(row, out, commit, head)
            if row["why"] and bench.backend.is_lost():
                print("the device is lost; run it again, it goes on behind the last row", file=sys.stderr)
                break
            gc.collect()  # programs hold device memory, and hold themselves in circles
            if options.device == "cuda":
                torch.cuda.empty_cache()
    finally:
        bench.close()
    return rows


def row_of(case: Case, bench: compiling.Bench, head: Row, options: argparse.Namespace) -> Row:
    """One row; what keeps it from being measured stands in ``why``."""
    began = time.monotonic()
    family, op, shape, dtype = case.key
    ceiling = head["read_ceiling_gbps" if case.reads_only else "copy_ceiling_gbps"]
    row = {"family": family, "op": op, "shape": shape, "dtype": dtype, "names": list(case.names), "bytes": case.nbytes,
           "flops": case.flops, "floor_us": case.nbytes / ceiling / 1e3 if ceiling else 0.0, "why": ""}
    try:
        with torch.no_grad():
            row |= timed(case, bench, options)
        row["share"] = row["floor_us"] / row["us"]
    except Exception as exc:  # one operator says what happened, the others go on
        traceback.print_exc(limit=-4)
        row |= {"why": f"{type(exc).__name__}: {' '.join(str(exc).split())[:400]}", "us": None, "share": 0.0}
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def timed(case: Case, bench: compiling.Bench, options: argparse.Namespace) -> Row:
    """Times of ours and of all peers, whose results are compared first.

    Raises:
        ValueError: the selected kernel's result is wrong.
    """
    module, inputs = case.made(bench.device)
    others_s = LARGE_S if case.nbytes >= LARGE_BYTES else OTHERS_S
    budget_s = options.budget_s or (CPU_S if options.device == "cpu" else BUDGET_S.get(case.op, BUDGET_S.get(case.family, others_s)))
    chosen, paths = bench.chosen(case, module, inputs, budget_s)
    l2_bytes = bench.context.target.l2_bytes if options.device == "cuda" else clock.CPU_L2_BYTES
    made = contenders.copies(case, inputs, tuple(p.data for p in module.parameters()), clock.copies_of(case.nbytes, l2_bytes))
    runs: dict[str, list[clock.Run]] = {}
    programs = {f"path_{path}": compiling.bound(other, module, made.operands) for path, other in paths.items()}
    programs["ours"] = compiling.bound(chosen, module, made.operands)
    for name, bound in programs.items():
        runs[name] = [one.run for one in bound]
    found = errors_of(case, made, programs)
    runs |= contenders.peers(case, made, not options.no_autotune)
    times = clock.measured(runs, bench.backend, l2_bytes)
    return {**chosen.facts, **found, **columns(times, paths), "copies": len(made.operands)}


def errors_of(case: Case, made: contenders.Copies, programs: dict[str, Any]) -> Row:
    """The errors of ours and of the framework, over outputs that were poisoned before.

    Raises:
        ValueError: ours is off by more than twice the framework's own error and the rounding of the result.
    """
    results_of = {"eager": case.function(*made.operands[0])}
    for name, bound in programs.items():
        bound[-1].poison()
        bound[-1].run()
        results_of[name] = bound[-1].output(0)
    if results_of["eager"].is_cuda:
        torch.cuda.synchronize()
    found = contenders.errors(case, made.operands[0], results_of)
    allowed = OFF * max(found["eager"], torch.finfo(case.dtype).eps)
    wrong = {name: error for name, error in found.items() if not error <= allowed}
    if wrong:
        raise ValueError(f"wrong results: {wrong}; the framework's error is {found['eager']:.2e}, allowed is {allowed:.2e}")
    return {"error": found["ours"], "eager_error": found["eager"]}


def columns(times: dict[str, clock.Timing | str], paths: dict[str, compiling.Chosen]) -> Row:
    """Times as the columns of a row.

    Raises:
        ValueError: ours could not be timed.
    """
    ours = times["ours"]
    if isinstance(ours, str):
        raise ValueError(f"the selected kernel cannot be timed: {ours}")
    row: Row = {"us": ours.us, "spread_us": ours.spread_us, "not_timed": {n: t for n, t in times.items() if isinstance(t, str)}}
    good = {name: timing for name, timing in times.items() if isinstance(timing, clock.Timing)}
    calls = {name: timing for name, timing in good.items() if name.startswith("cublas_")}
    peers = {name: timing for name, timing in good.items() if name in PEERS}
    if calls:
        fastest = min(calls, key=lambda name: calls[name].us)
        peers["cublas"] = calls[fastest]
        row |= {"cublas_call": fastest, "cublas_calls_us": {name: timing.us for name, timing in calls.items()}}
    for name, timing in peers.items():
        row |= {f"{name}_us": timing.us, f"{name}_spread_us": timing.spread_us}
        if len(ours.samples_us) == len(timing.samples_us) > 1:
            row[f"{name}_upper"] = sum(paired_ratio(ours.samples_us, timing.samples_us))
    best = min(peers, key=lambda name: peers[name].us)
    other = {path: {**chosen.facts, "us": good[f"path_{path}"].us} for path, chosen in paths.items() if f"path_{path}" in good}
    return {**row, "baseline": best, "baseline_us": peers[best].us, "ratio": peers[best].us / ours.us, "paths": other}


def line(row: Row) -> str:
    """One row in words."""
    name = " ".join(row[key] for key in results.KEY)
    if row["why"]:
        return f"{name}: {row['why']} ({row['seconds']} s)"
    others = ", ".join(f"{peer} {row[f'{peer}_us']:.2f}" for peer in (*PEERS, "cublas")
                       if f"{peer}_us" in row)
    paths = "".join(f", path {path} {facts['us']:.2f}" for path, facts in row["paths"].items())
    return (f"{name}: {row['us']:.2f} us, {row['share']:.0%} of the ceiling; {others}{paths}; {row['schedule']} "
            f"({row['passed']} of {row['tried']} passed, {row['seconds']} s)")


if __name__ == "__main__":
    sys.exit(main())
