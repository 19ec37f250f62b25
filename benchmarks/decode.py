"""Greedy generation of full-size models with random weights: ours, eager and torch.compile, alternating on one GPU.

Writes decode.json, pipeline.json, accuracy.json, memory.json and compile_time.json under benchmarks/results/<gpu>/, one model per
call; of bfloat16 decode_bf16.json and so on:

    python benchmarks/decode.py qwen3-1.7b --input 128 --output 128
    python benchmarks/decode.py gemma-2-2b --dtype bfloat16 --baselines eager
"""

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness
from full_models import accuracy_row, add_options, check_captured, compiled_model, context_of, kept_or_passing
from new_process import command

from agentcompile_core.report import bench
from agentcompile_core.report.accounting import accounting, step_bytes
from agentcompile_core.runtime.holding import held_bytes


def decode_rows(name: str, model: Any, options: argparse.Namespace, ceiling_gbps: float) -> list[dict[str, Any]]:
    """Rows of decode.json: one per system."""
    baselines = tuple(b for b in options.baselines.split(",") if b)
    rows = bench.compare(model, prompt=options.input, new_tokens=options.output, repetitions=options.repetitions, baselines=baselines)
    middle = options.input + options.output // 2
    moved = step_bytes(model.graphs, middle)
    who = accounting(model.compilation.programs["decode"])
    of_ours = {"generated_share": who["share"].get("generated", 0.0), "generated_calls": who["calls"].get("generated", 0),
               "framework_operators": who["framework_operators"]}
    for row in rows:
        row |= {"model": name, "dtype": model.graphs.kv.dtype.value, "workload": f"{options.input}/{options.output}", "estimated": False,
                "floor_step_ms": moved / ceiling_gbps / 1e6, "bandwidth_share": moved / (row["step_ms"] * ceiling_gbps * 1e6)}
        row |= of_ours if row["system"] == "agentcompile" else {}
    return rows


def pipeline_row(name: str, model: Any) -> dict[str, Any]:
    """Row of pipeline.json."""
    found = model.statistics
    program = model.compilation.programs["decode"]
    low_high = found.pop("selected_us") or [0.0, 0.0]
    return {"model": name, **found, "selected_us_min": low_high[0], "selected_us_max": low_high[1], "accounting": accounting(program),
            "chain_us": model.compilation.step_us[0], "chain_framework_us": model.compilation.step_us[1]}


def memory_row(model: Any, empty_bytes: int) -> dict[str, Any]:
    """Device memory beyond one copy of the weights and the KV cache, behind a short request and one that nearly fills the cache: all that
    a session captures is there then."""
    context = model.session.max_context
    new = min(64, context // 4)
    for given in (min(128, context // 2), context - 3 * new):
        ids = bench.random_prompt(model.graphs.model.vocab_size, given, seed=3)
        bench.generate_exactly(model, ids, new)
    torch.cuda.synchronize()
    weights, kv = model.graphs.model.parameter_bytes, held_bytes(model.session.kv)
    return {"extra_memory_bytes": harness.used_bytes() - empty_bytes - weights - kv, "weight_bytes": weights, "kv_bytes": kv}


def warm_seconds(options: argparse.Namespace, store: Path) -> dict[str, Any]:
    """Seconds of the same compile from the store, in a process of its own."""
    asked = command(options, store)
    done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"warm_s": None, "warm_why": f"{' '.join(asked[1:3])} ended with {done.returncode}"}
    found = json.loads(done.stdout.splitlines()[-1])
    return {"warm_s": found["compile_s"], "warm_with_loading_s": found["load_s"] + found["compile_s"],
            "warm_first_token_s": found["to_first_token_s"], "warm_stages_s": found["stages"]}


def main() -> int:
    """Measure one model and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, budget_s=150.0)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--baselines", default="eager,torch_compile")
    parser.add_argument("--bundle", type=Path, help="also write the bundle here")
    parser.add_argument("--warm", action="store_true", help="compile once more from the store, in a new process, and time it")
    options = parser.parse_args()
    options.out = options.out or harness.gpu_folder()
    options.context = context_of(options.model, options.context)
    ceiling = harness.read_ceiling_gbps()
    torch.cuda.empty_cache()
    empty = harness.used_bytes()  # what measuring the ceiling leaves with the driver is not the model's
    print(f"read ceiling {ceiling:.0f} GB/s", flush=True)

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        of_type = "_bf16" if options.dtype == "bfloat16" else ""
        harness.write_results(name + of_type, rows, ceiling, options.out, options.commit)

    with kept_or_passing(options) as store:
        model, cold_s = compiled_model(options.model, options, store)
        print(json.dumps(model.statistics, indent=1), flush=True)
        if options.bundle:
            model.save(options.bundle)
        model.context.close()
        check_captured(options.model, model)
        torch.cuda.empty_cache()
        memory = memory_row(model, empty)
        print(json.dumps(memory), flush=True)
        rows = decode_rows(options.model, model, options, ceiling)
        for row in rows:
            print(f"{row['system']:>14}: {row['e2e_ms']:9.1f} ms, prefill {row['prefill_ms']:7.2f}, {row['step_ms']:7.3f} ms/token, "
                  f"{row['speedup']:5.2f}x, {row['bandwidth_share']:.0%} of bandwidth", flush=True)
        accuracy = accuracy_row(options.model, model, options.positions)
        print(json.dumps(accuracy), flush=True)
        write("memory", [{"model": options.model, **memory}])
        write("decode", rows)
        write("pipeline", [pipeline_row(options.model, model)])
        if accuracy is not None:
            write("accuracy", [accuracy])
        times: dict[str, Any] = {"model": options.model, "cold_s": cold_s, "warm_s": None}
        if options.warm:
            del model
            gc.collect()
            torch.cuda.empty_cache()
            times |= warm_seconds(options, store.root)
        print(json.dumps(times), flush=True)
        write("compile_time", [times])
    return 0


if __name__ == "__main__":
    sys.exit(main())
