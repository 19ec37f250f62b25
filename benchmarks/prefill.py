"""First tokens: how long prompts of several lengths take, in one model compiled for a long context; and what memory that takes.

Writes prefill.json under benchmarks/results/<gpu>/, one model and context per call:

    python benchmarks/prefill.py qwen3-1.7b --context 24576 --lengths 128,512,2048,8192,20480
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness
from full_models import check_captured
from prefill_parts import parts_ms

from agentcompile_core import api
from agentcompile_core.cli.progress import Progress
from agentcompile_core.configuration import Config
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.report import bench
from agentcompile_core.runtime.holding import held_bytes
from agentcompile_core.store import Store

REST_S = 1.0  # before each call that is timed alone


def lengths_of(text: str, context: int) -> tuple[int, ...]:
    """Prompt lengths from a list by commas.

    Raises:
        SystemExit: one is no number, or leaves no room for a token in the context.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and 0 < int(part) < context for part in parts):
        raise SystemExit(f"--lengths {text}: allowed are numbers from 1 to {context - 1}, by commas")
    return tuple(int(part) for part in parts)


def compiled_model(name: str, options: argparse.Namespace, store: Store) -> Any:
    """Compiled with little search: the decode step has no part in what is timed."""
    config = Config(budget_s=options.budget_s, budget_plans=options.budget_plans, rounds=1, prefill=options.prefill)
    chunks = tuple(int(size) for size in (getattr(options, "chunks", None) or "").split(",") if size)
    workload = Workload(dtype=DType(options.dtype), max_context=options.context, prefill_chunks=chunks) if chunks else None
    asked = {} if workload else {"dtype": options.dtype, "max_context": options.context}
    return api.compile(str(harness.CONFIGS / name), workload, config=config, store=store, report=Progress(log=options.log),
                       random_weights=True, **asked)


def ours(model: Any, ids: torch.Tensor) -> Callable[[], Any]:
    """Our prompt programs up to the first token, which is left on the device."""
    session = model.session

    def run() -> Any:
        with session.exclusive(), torch.inference_mode():
            return session.prefill(ids)

    return run


def eager(model: Any, ids: torch.Tensor) -> Callable[[], Any]:
    """The module's own forward over the whole prompt at once, with its own growing cache; one row of logits."""
    module, given = model.loaded.module, ids.cuda()

    def run() -> Any:
        with torch.inference_mode():
            return module(given, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    return run


def served(backend: Any) -> dict[str, list[str]]:
    """What the backend's libraries and kernels of rows serve, and what was refused."""
    attending = backend._attending
    calls = {"own": attending._over, "flash": attending._flash, "cudnn": attending._cudnn}
    tried = {**{(name, kind): used for name, kinds in calls.items() for kind, used in kinds.items()}, **backend._rows._served}
    return {word: [" ".join(map(str, key)) for key, used in tried.items() if used is wanted]
            for word, wanted in (("used", True), ("refused", False))}


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds of one call, until the device is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def times_of(systems: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, list[float]]:
    """Milliseconds by system, alternating, behind two calls each that are not counted."""
    for run in systems.values():
        timed(run)
        timed(run)
    found: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(repetitions):
        for name, run in systems.items():
            found[name].append(timed(run))
    return found


def rested_ms(run: Callable[[], Any], repetitions: int) -> float:
    """The median of calls with a pause before each: what one request takes of a GPU that does nothing else, whose clock no earlier
    work holds down."""
    times = []
    for _ in range(repetitions):
        time.sleep(REST_S)
        times.append(timed(run))
    return statistics.median(times)


def spread(samples: list[float]) -> float:
    """Half of the distance from the 10th to the 90th percentile."""
    low, *_, high = statistics.quantiles(samples, n=10) if len(samples) > 1 else (samples[0], samples[0])
    return (high - low) / 2


def rows_of(name: str, model: Any, options: argparse.Namespace, empty_bytes: int, ceiling_gbps: float) -> list[dict[str, Any]]:
    """Rows of prefill.json, shortest prompt first. Memory is read before anything of the framework's own forward runs."""
    prompts = {n: bench.random_prompt(model.graphs.model.vocab_size, n, seed=n) for n in lengths_of(options.lengths, options.context)}
    beyond: dict[int, int] = {}
    for length, ids in sorted(prompts.items()):
        ours(model, ids)()
        torch.cuda.synchronize()
        beyond[length] = harness.used_bytes() - empty_bytes - model.graphs.model.parameter_bytes - held_bytes(model.session.kv)
    rows = []
    for length, ids in sorted(prompts.items()):
        systems = {"ours": ours(model, ids), **({"eager": eager(model, ids)} if options.eager else {})}
        found = times_of(systems, options.repetitions)
        rows.append({
            "model": name, "dtype": model.graphs.kv.dtype.value, "context": options.context, "length": length,
            "workload": f"{length} of {options.context}{'' if options.prefill == 'live' else ', ' + options.prefill}",
            "prefill": options.prefill, "ms": statistics.median(found["ours"]), "spread_ms": spread(found["ours"]),
            "rested_ms": rested_ms(systems["ours"], options.repetitions),
            "eager_ms": statistics.median(found["eager"]) if options.eager else None, "repetitions": options.repetitions,
            "parts_ms": parts_ms(model, length, ceiling_gbps) if options.parts else None,
            "extra_memory_bytes": beyond[length]})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def print_profile(model: Any, length: int) -> None:
    """The kernels that one prompt spends most time in."""
    run = ours(model, bench.random_prompt(model.graphs.model.vocab_size, length, seed=length))
    timed(run)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        timed(run)
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=90), flush=True)


def main() -> int:
    """Measure one model at one context and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=harness.MODELS)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--context", type=int, default=24576)
    parser.add_argument("--lengths", default="128,512,2048,8192,20480")
    parser.add_argument("--prefill", default="live", choices=("live", "capacity"))
    parser.add_argument("--chunks", help="sizes of chunks by commas, for comparison; default: those that compile chooses")
    parser.add_argument("--eager", action="store_true", help="time the module's own forward too")
    parser.add_argument("--parts", action="store_true", help="time the products and the attention of each prompt alone, by libraries")
    parser.add_argument("--profile", type=int, metavar="LENGTH", help="print the kernels of one prompt of that length; write nothing")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--budget-s", type=float, default=20.0)
    parser.add_argument("--budget-plans", type=int, default=40)
    parser.add_argument("--log")
    parser.add_argument("--commit")
    parser.add_argument("--cache", type=Path, help="the store to compile into, kept; default: a new one, removed afterwards")
    parser.add_argument("--out", type=Path, help="folder of results (default: benchmarks/results/, by the name of the GPU)")
    options = parser.parse_args()
    options.out = options.out or harness.gpu_folder()
    lengths_of(options.lengths, options.context)
    torch.zeros(1, device="cuda")
    ceiling = harness.read_ceiling_gbps()
    torch.cuda.empty_cache()
    empty = harness.used_bytes()
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        model = compiled_model(options.model, options, Store(options.cache or Path(scratch)))
        model.context.close()
        check_captured(options.model, model)
        torch.cuda.empty_cache()
        uncaptured = {name: step.reason for name, step in model.session._steps.items() if getattr(step, "reason", "")}
        print(f"compiled in {time.monotonic() - began:.1f} s; graphs that were not captured: {uncaptured or 'none'}", flush=True)
        print(f"libraries and kernels: {served(model.session._executables.backend)}", flush=True)
        if options.profile:
            print_profile(model, options.profile)
            return 0
        rows = rows_of(options.model, model, options, empty, ceiling)
        harness.write_results("prefill", rows, ceiling, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
