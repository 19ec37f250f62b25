"""Times decode attention as the product runs it: norm of Q and K, RoPE, append, attention over the cache and its merge in one step.

    python benchmarks/attention.py                                          # Qwen3's shape, fp16, 512, 2048, 8192 and 32768 positions
    python benchmarks/attention.py --shape 32x4x128 --dtype bfloat16 --lengths 192,512 --all

The caches of one run are others than those of the run before it, together more than twice the L2, so that K and V come from memory.
Every schedule of the family is checked against the framework first; the fastest right one of each length is the row of
attention.json, beside the fastest of each way to merge, the framework's own operators and the bytes of K and V over the time.
Medians of captured graphs; with ordinary edges no step begins before the one in front of it has ended, else it begins early and
waits, as in the product's chain.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import torch
from agentcompile_rules_transformers.kinds import KINDS
from agentcompile_rules_transformers.testing import attention_case
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_templates_cuda_attention import AttentionFamily
from attrs import frozen

from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.plugin_api import Case, DType, Graph, Match, StepSource, Target
from agentcompile_core.worker.operands import make_inputs

sys.path.insert(0, str(Path(__file__).parent))
import harness

KIND = next(kind for kind in KINDS if kind.name == "attention")
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}  # of the largest element
REPETITIONS, LEAST_RUNS = 9, 24
PROCESSES = 8  # that build kernels
Tensors = dict[str, torch.Tensor]


@frozen(kw_only=True, eq=False)
class Problem:
    """One length: the match, copies of its operands that differ in their caches, and the framework's result."""

    match: Match
    graph: Graph
    copies: tuple[Tensors, ...]
    wanted: torch.Tensor
    cache_bytes: int  # of the positions that are attended

    def values(self, number: int) -> Tensors:
        """One copy by the names of the graph."""
        found = {}
        for operand in self.match.operands:
            if operand.name in self.copies[number]:
                sizes = [self.graph.spec(name).numel for name in operand.values]
                parts = self.copies[number][operand.name].reshape(-1).split(sizes)
                found |= {name: part.view(self.graph.spec(name).shape) for name, part in zip(operand.values, parts, strict=True)}
        return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="16x8x128", help="heads of Q x heads of K and V x channels (default: %(default)s)")
    made.add_argument("--norm", default="rms", help="of Q and K: rms, rms_one_plus, none (default: %(default)s)")
    made.add_argument("--dtype", default="float16", choices=sorted(TOLERANCE))
    made.add_argument("--lengths", default="512,2048,8192,32768", help="attended positions, by commas (default: %(default)s)")
    made.add_argument("--capacity", type=int, default=40960)
    made.add_argument("--points", type=int, default=64, help="schedules of each length at most (default: %(default)s)")
    made.add_argument("--all", action="store_true", help="print a line per schedule as well")
    made.add_argument("--commit")
    made.add_argument("--out", type=Path, help="folder of results (default: benchmarks/results/, by the name of the GPU)")
    return made


def problem(options: argparse.Namespace, length: int, l2_bytes: int) -> Problem:
    """Operands whose caches hold ``length - 1`` positions, as often as twice the L2 asks for."""
    heads, kv_heads, head_dim = (int(size) for size in options.shape.split("x"))
    match, graph = attention_case(heads=(heads, kv_heads), head_dim=head_dim, capacity=max(options.capacity, length), rope=options.norm,
                                  dtype=DType(options.dtype))
    first = make_inputs(match, KIND, Case(family="normal", seed=1, position=length - 1), "cuda")
    first |= {name: first[name].nan_to_num(0.0) for name in ("k_cache", "v_cache")}  # as a session's; NaN is for kernels that read too far
    cache_bytes = 2 * kv_heads * head_dim * length * getattr(torch, options.dtype).itemsize
    copies = [first]
    for _ in range(math.ceil(2 * l2_bytes / cache_bytes)):
        copies.append({name: tensor.clone() if name.endswith("_cache") else tensor for name, tensor in first.items()})
    found = Problem(match=match, graph=graph, copies=tuple(copies), wanted=torch.empty(0), cache_bytes=cache_bytes)
    wanted = compile_nodes(graph, device="cuda").run({name: tensor.clone() for name, tensor in found.values(0).items()})
    return Problem(match=match, graph=graph, copies=tuple(copies), wanted=wanted[graph.outputs[0]].reshape(-1), cache_bytes=cache_bytes)


def prepared(given: Problem, source: StepSource, backend: CudaBackend, target: Target,
             pdl: bool) -> tuple[Callable[[int], None], torch.Tensor]:
    """What runs one schedule on a stream, over the copies in turns; and its result. ``pdl``: steps begin early."""
    handle = loaded(source, backend, target)
    parts = {w.name: torch.zeros(w.nbytes, device="cuda", dtype=torch.uint8) for w in source.workspaces}
    out = torch.full_like(given.wanted, float("nan"))
    runs = []
    for copy in given.copies:
        tensors = {**copy, **parts, "out": out}
        runs.append([backend.prepare_launch(handle, launch, [tensors[a.operand].data_ptr() if a.operand else a.value
                                                             for a in launch.arguments], pdl=pdl or index > 0)
                     for index, launch in enumerate(source.launches)])
    turn = count()

    def run(stream: int, kept: object = parts) -> None:
        for launch in runs[next(turn) % len(runs)]:
            launch(stream)

    return run, out


@functools.cache
def loaded(source: StepSource, backend: CudaBackend, target: Target) -> Any:
    """The kernels of a schedule, which are the same at every length."""
    return backend.load(backend.build(source, target))


def framework(given: Problem) -> Callable[[int], None]:
    """The graph on the framework's own operators, over the copies in turns."""
    nodes, values, turn = compile_nodes(given.graph, device="cuda"), [given.values(i) for i in range(len(given.copies))], count()
    return lambda stream: nodes.run(dict(values[next(turn) % len(values)])) and None


def microseconds(backend: CudaBackend, run: Callable[[int], None], copies: int) -> float | None:
    """The median of a run; None where it cannot be captured."""
    times = backend.time(run, repetitions=REPETITIONS, runs_per_repetition=max(copies, LEAST_RUNS))
    return sorted(times)[len(times) // 2] if isinstance(times, tuple) else None


def measured(options: argparse.Namespace, length: int, backend: CudaBackend, target: Target) -> dict[str, Any]:
    """The row of one length.

    Raises:
        SystemExit: a schedule is wrong.
    """
    given = problem(options, length, target.l2_bytes)
    found = []
    points = AttentionFamily().space(given.match, target).points[: options.points]
    sources = [AttentionFamily().lower(given.match, schedule, target) for schedule in points]
    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(lambda source: loaded(source, backend, target), sources))
    for schedule, source in zip(points, sources, strict=True):
        run, out = prepared(given, source, backend, target, True)
        run(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        error = float((out.float() - given.wanted.float()).abs().max() / given.wanted.float().abs().max())
        if not error <= TOLERANCE[options.dtype]:
            raise SystemExit(f"{options.shape} at {length} positions: {schedule} is off by {error:.1e} of the largest element")
        apart, _ = prepared(given, source, backend, target, False)
        us, ordinary = (microseconds(backend, one, len(given.copies)) for one in (run, apart))
        if us is not None and ordinary is not None:
            found.append((us, ordinary, dict(schedule.items)))
            if options.all:
                print(f"  {us:8.2f} us, {ordinary:8.2f} with ordinary edges {dict(schedule.items)}", flush=True)
    us, ordinary, schedule = min(found, key=lambda one: one[0])
    by_merge = {merge: min(one[0] for one in found if one[2]["merge"] == merge) for merge in sorted({one[2]["merge"] for one in found})}
    return {"model": options.shape, "workload": f"{length} {options.dtype}", "shape": options.shape, "norm": options.norm,
            "dtype": options.dtype, "system": "agentcompile", "length": length, "capacity": options.capacity, "us": us,
            "us_ordinary_edges": ordinary, "us_by_merge": by_merge, "schedule": schedule, "schedules": len(found),
            "framework_us": microseconds(backend, framework(given), len(given.copies)), "kv_bytes": given.cache_bytes,
            "gbps": given.cache_bytes / us / 1e3}


def main() -> int:
    """Measure every length and write the rows."""
    options = parser().parse_args()
    options.out = options.out or harness.gpu_folder()
    backend = CudaBackend()
    target = backend.live_target()
    if target is None:
        raise SystemExit("no CUDA device that a preset describes; run this on a GPU machine")
    ceiling, rows = harness.read_ceiling_gbps(), []
    for length in (int(text) for text in options.lengths.split(",")):
        rows.append(measured(options, length, backend, target))
        torch.cuda.empty_cache()
        row = rows[-1]
        times = f"{row['us']:.2f} us ({row['us_ordinary_edges']:.2f}), {row['gbps']:.0f} GB/s of K and V"
        theirs = row["framework_us"] or math.nan
        ways = ", ".join(f"{merge} {us:.2f}" for merge, us in row["us_by_merge"].items())
        print(f"{options.shape} {options.dtype} at {length}: {times}, framework {theirs:.1f} us; best by merge {ways}; {row['schedule']}",
              flush=True)
    harness.write_results("attention", rows, ceiling, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
