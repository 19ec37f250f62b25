"""Greedy generation of full-size models with random weights: ours, eager and torch.compile, alternating on one GPU.

Writes decode.json, pipeline.json, accuracy.json and compile_time.json under benchmarks/results/<gpu>/, one model per call:

    python benchmarks/decode.py qwen3-1.7b --input 128 --output 128
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness

from agentcompile_core import api
from agentcompile_core.cli.progress import Progress
from agentcompile_core.configuration import Config
from agentcompile_core.report import bench
from agentcompile_core.report.accounting import accounting, step_bytes
from agentcompile_core.store import Store


def compiled_model(name: str, options: argparse.Namespace, store: Store) -> tuple[Any, float]:
    """Compile, and the seconds of the compile() call without loading weights."""
    config = Config(advisor=options.advisor, budget_s=options.budget_s, budget_plans=options.budget_plans, rounds=options.rounds)
    model = api.compile(str(harness.CONFIGS / name), dtype=options.dtype, max_context=options.context, config=config, store=store,
                        report=Progress(log=options.log), random_weights=True)
    spent = sum(seconds for stage, seconds in model.compilation.seconds if stage != "load")
    return model, spent


def decode_rows(name: str, model: Any, options: argparse.Namespace, ceiling_gbps: float) -> list[dict[str, Any]]:
    """Rows of decode.json: one per system."""
    baselines = tuple(b for b in options.baselines.split(",") if b)
    rows = bench.compare(model, prompt=options.input, new_tokens=options.output, repetitions=options.repetitions, baselines=baselines)
    middle = options.input + options.output // 2
    moved = step_bytes(model.graphs, middle)
    for row in rows:
        row |= {"model": name, "dtype": model.graphs.kv.dtype.value, "workload": f"{options.input}/{options.output}", "estimated": False,
                "floor_step_ms": moved / ceiling_gbps / 1e6, "bandwidth_share": moved / (row["step_ms"] * ceiling_gbps * 1e6)}
    return rows


def accuracy_row(name: str, model: Any, positions: int) -> dict[str, Any] | None:
    """Teacher-forced logits of ours and of the framework's half precision, both against the same weights in fp32 with TF32 off.

    None where the weights in fp32 do not fit beside the model.
    """
    if 2.2 * model.graphs.model.parameter_bytes > torch.cuda.mem_get_info()[0]:
        return None
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    tokens = bench.random_prompt(model.graphs.model.vocab_size, positions, seed=7)
    ours = model.session.teacher_forced(tokens).float().cpu()
    module = model.loaded.module
    with torch.inference_mode():
        framework = module(tokens.cuda()).logits[0].float().cpu()
        reference = _fp32_logits(module, tokens)
    mine, theirs = (ours - reference).abs(), (framework - reference).abs()

    def rms(error: torch.Tensor) -> float:
        return float(error.double().pow(2).mean().sqrt())

    def p999(error: torch.Tensor) -> float:
        return float(error.flatten().double().kthvalue(int(0.999 * error.numel())).values)

    agree = (ours.argmax(-1) == reference.argmax(-1)).float().mean()
    return {"model": name, "dtype": model.graphs.kv.dtype.value, "positions": positions, "rms_ratio": rms(mine) / rms(theirs),
            "p999_ratio": p999(mine) / p999(theirs), "rms_error": rms(mine), "framework_rms_error": rms(theirs),
            "greedy_agreement": float(agree)}


def _fp32_logits(module: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the same weights in fp32: the model is built again and filled, since converting in place would lose the narrow ones."""
    with torch.device("cuda"):  # where billions of initial values take no time
        wide = type(module)(module.config).to(dtype=torch.float32).eval()
    with torch.no_grad():
        for to, of in zip(wide.parameters(), module.parameters(), strict=True):
            to.copy_(of)
    logits = wide(tokens.cuda()).logits[0].float().cpu()
    del wide
    gc.collect()
    torch.cuda.empty_cache()
    return logits


def pipeline_row(name: str, model: Any) -> dict[str, Any]:
    """Row of pipeline.json."""
    found = model.statistics
    program = model.compilation.programs["decode"]
    low_high = found.pop("selected_us") or [0.0, 0.0]
    return {"model": name, **found, "selected_us_min": low_high[0], "selected_us_max": low_high[1], "accounting": accounting(program),
            "chain_us": model.compilation.step_us[0], "chain_framework_us": model.compilation.step_us[1]}


def memory_row(model: Any, empty_bytes: int) -> dict[str, Any]:
    """Device memory beyond one copy of the weights and the KV cache, while generating."""
    ids = bench.random_prompt(model.graphs.model.vocab_size, 128, seed=3)
    bench.generate_exactly(model, ids, 16)
    torch.cuda.synchronize()
    weights, kv = model.graphs.model.parameter_bytes, model.graphs.kv.nbytes
    return {"extra_memory_bytes": harness.used_bytes() - empty_bytes - weights - kv, "weight_bytes": weights, "kv_bytes": kv}


def main() -> int:
    """Measure one model and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=harness.MODELS)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--baselines", default="eager,torch_compile")
    parser.add_argument("--advisor", default="heuristic")
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--budget-plans", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--log")
    parser.add_argument("--commit")
    parser.add_argument("--bundle", type=Path, help="also write the bundle here")
    parser.add_argument("--warm", action="store_true", help="compile once more from the store, and time it")
    parser.add_argument("--cache", type=Path, help="the store to compile into, kept; default: a new one, removed afterwards")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "h200")
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    empty = harness.used_bytes()
    ceiling = harness.read_ceiling_gbps()
    torch.cuda.empty_cache()
    print(f"read ceiling {ceiling:.0f} GB/s", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        store = Store(options.cache or Path(scratch))
        model, cold_s = compiled_model(options.model, options, store)
        print(json.dumps(model.statistics, indent=1), flush=True)
        if options.bundle:
            model.save(options.bundle)
        model.context.close()
        if model.graphs.kv is None:
            raise SystemExit(f"{options.model} was not captured, so there is nothing of ours to time: {'; '.join(model.notes)}")
        torch.cuda.empty_cache()
        memory = memory_row(model, empty)
        print(json.dumps(memory), flush=True)
        rows = decode_rows(options.model, model, options, ceiling)
        for row in rows:
            print(f"{row['system']:>14}: {row['e2e_ms']:9.1f} ms, prefill {row['prefill_ms']:7.2f}, {row['step_ms']:7.3f} ms/token, "
                  f"{row['speedup']:5.2f}x, {row['bandwidth_share']:.0%} of bandwidth", flush=True)
        accuracy = accuracy_row(options.model, model, options.positions)
        print(json.dumps(accuracy), flush=True)
        harness.write_results("memory", [{"model": options.model, **memory}], ceiling, options.out, options.commit)
        harness.write_results("decode", rows, ceiling, options.out, options.commit)
        harness.write_results("pipeline", [pipeline_row(options.model, model)], ceiling, options.out, options.commit)
        if accuracy is not None:
            harness.write_results("accuracy", [accuracy], ceiling, options.out, options.commit)
        times: dict[str, Any] = {"model": options.model, "cold_s": cold_s, "warm_s": None}
        if options.warm:
            del model
            gc.collect()
            torch.cuda.empty_cache()
            began = time.monotonic()
            again, warm_s = compiled_model(options.model, options, store)
            times |= {"warm_s": warm_s, "warm_with_loading_s": time.monotonic() - began, "warm_stages_s": dict(again.compilation.seconds)}
        print(json.dumps(times), flush=True)
        harness.write_results("compile_time", [times], ceiling, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
