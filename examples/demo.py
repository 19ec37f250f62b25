"""The main job, shown end to end: `make demo`.

Without a GPU it compiles Qwen3-1.7B's real configuration and the bundled tiny model for sm_90, checks generated kernels by
running them on the CPU emulator, and lets the tiny model speak through the bundle that was written. With a GPU it compiles
for that GPU and prints tokens per second before and after. The exit code is 0 only if everything that it claims held.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for torch's memory: on a processor small ones take a third of the time
ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny_model"
QWEN3 = ROOT / "benchmarks" / "configs" / "qwen3-1.7b"
PROMPT = "When an exception"
LARGE_GPU_BYTES = 16 << 30  # below this the tiny model stands in for Qwen3-1.7B


class DemoError(Exception):
    """Something that the demo claims did not hold."""


@contextmanager
def part(title: str) -> Iterator[None]:
    """Announce a part, and say how long it took."""
    print(f"\n== {title}", flush=True)
    began = time.monotonic()
    yield
    print(f"   ({time.monotonic() - began:.1f} s)", flush=True)


def compile_model(what: Path, folder: Path, *, dtype: str, budget_s: float, budget_plans: int, target: str | None, rounds: int = 1,
                  **options: Any) -> Any:
    """Compile with a store of its own, so that every figure shown is of this run."""
    from agentcompile_core import api
    from agentcompile_core.cli.progress import Progress
    from agentcompile_core.configuration import Config
    from agentcompile_core.store import Store

    config = Config(budget_s=budget_s, budget_plans=budget_plans, rounds=rounds)
    return api.compile(str(what), dtype=dtype, target=target, config=config, store=Store(folder / "store"),
                       report=Progress(stream=sys.stdout), **options)


def build_unvalidated(compiled: Any) -> list[str]:
    """Build, for the target, the first schedule of every match of the planner's favourite covers that no evidence exists for.

    Returns a line per kernel. They are built to show that they build; nothing selects them.

    Raises:
        DemoError: one does not build.
    """
    from agentcompile_core.installation import building
    from agentcompile_core.plugin_api import Step
    from agentcompile_core.runtime.sources import source_of

    found, ctx = [], compiled.context
    backend = building.builder(ctx)
    if backend is None or backend.name != "cuda":
        raise DemoError("the cuda backend cannot build here; `agentcompile doctor` says what is missing")
    judged = {(r.signature, r.step.match_id) for r in compiled.compilation.records}
    for region, space in zip(compiled.compilation.regions, compiled.compilation.spaces, strict=True):
        for match_id in min(space.covers, key=lambda cover: cover.rank).matches:
            if (space.signature, match_id) in judged:
                continue
            match, first = region.match_by_id[match_id], space.spaces_of(match_id)[0]
            step = Step(match_id=match_id, implementation=first.implementation, origin=first.origin, schedule=first.space.points[0])
            kernel = building.build_one(source_of(step, match, ctx.catalog, ctx.target), backend, ctx)
            if kernel is None:
                raise DemoError(f"{step} does not build for {ctx.target.arch}: {ctx.failures[-1]}")
            operands = sum(o.spec.nbytes for o in match.operands)
            found.append(f"{match.label} (operands of {operands >> 20} MiB): {kernel.resources.registers} registers, "
                         f"{kernel.resources.shared_bytes} bytes of shared memory")
    return found


def statistics_table(found: dict[str, tuple[dict[str, Any], int]]) -> str:
    """Pipeline statistics of several models side by side; the number is of kernels built without validation."""
    from agentcompile_core.report import table

    rows = (("IR nodes", "nodes"), ("regions", "regions"), ("after merging equal ones", "merged_regions"), ("plans (covers)", "plans"),
            ("candidates in the space", "candidates"), ("lowered", "lowered"), ("built", "built"), ("validated", "validated"),
            ("selected steps", "selected"), ("failures", "failures"))
    cells = [(title, *(s[key] for s, _ in found.values())) for title, key in rows]
    cells.append(("built only, not validated in this run", *(extra for _, extra in found.values())))
    cells.append(("bundle: files / signatures", *(f"{s['files']} / {s['signatures']}" for s, _ in found.values())))
    cells.append(("seconds", *(f"{sum(s['seconds'].values()):.0f}" for s, _ in found.values())))
    return table([tuple(str(c) for c in row) for row in cells], ("", *found))


def kernels_per_token(compiled: Any) -> int:
    """Generated steps of the decode program; framework segments are not counted."""
    from agentcompile_core.plugin_api import Program

    program: Program = compiled.session.bound("decode").program
    return sum(1 for segment in program.segments if segment.step is not None)


def check_same_tokens(kernels: Any, framework: Any, prompt: str, count: int) -> list[int]:
    """Generate ``count`` tokens through generated kernels and on the framework.

    Raises:
        DemoError: no kernel would run, or the tokens differ.
    """
    if kernels_per_token(kernels) == 0:
        raise DemoError(f"the decode program holds no generated kernel: {'; '.join(kernels.notes)}")
    if kernels_per_token(framework) != 0:
        raise DemoError("the program to compare with runs generated kernels itself")
    ids = framework.tokenizer(prompt, return_tensors="pt").input_ids
    mine = kernels.generate(ids, count, eos_token_id=None)[0, ids.shape[1]:].tolist()
    theirs = framework.generate(ids, count, eos_token_id=None)[0, ids.shape[1]:].tolist()
    if mine != theirs or len(mine) != count:
        raise DemoError(f"tokens through generated kernels {mine} differ from the framework's {theirs}")
    return mine


def speak(loaded: Any, prompt: str, count: int) -> str:
    """Text of the loaded bundle's program.

    Raises:
        DemoError: it is empty or runs in circles.
    """
    ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
    out = loaded.generate(ids, count, eos_token_id=loaded.tokenizer.eos_token_id)[0]
    check_sense(loaded.tokenizer.decode(out[ids.shape[1]:], skip_special_tokens=True))
    return str(loaded.tokenizer.decode(out, skip_special_tokens=True))


def check_sense(text: str) -> None:
    """Refuse text that no trained model writes: too few words, or the same ones over and over.

    Raises:
        DemoError: that is the case.
    """
    words = re.findall(r"[A-Za-z]{2,}", text)
    triples = list(zip(words, words[1:], words[2:], strict=False))
    if len(words) < 10 or len(set(words)) < len(words) / 3 or len(set(triples)) < len(triples) / 2:
        raise DemoError(f"the generated text makes no sense: {text!r}")


def without_gpu(options: argparse.Namespace, folder: Path) -> None:
    """Everything that can be shown and checked without a GPU."""
    from agentcompile_core import api

    with part("Qwen3-1.7B, real configuration, no weights: captured, planned, lowered, built for sm_90, validated where emulation can"):
        qwen3 = compile_model(QWEN3, folder, dtype="float16", budget_s=options.budget_s, budget_plans=12, target=options.target,
                              device="cpu", meta=True)
        built_only = build_unvalidated(qwen3)
        for line in built_only:  # too large to emulate, or out of time
            print(f"   built for {qwen3.context.target.arch}, not validated: {line}")
    with part("tiny model (trained), fp32: the same, then bound to its emulated kernels"):
        tiny = compile_model(TINY, folder, dtype="float32", budget_s=3 * options.budget_s, budget_plans=12, target=options.target,
                             device="cpu", run_on="emulation")
        bundle = tiny.save(options.out)
    found = {"Qwen3-1.7B": (qwen3.statistics, len(built_only)), "tiny model": (tiny.statistics, len(build_unvalidated(tiny)))}
    print("\n" + statistics_table(found))
    loaded = api.load(bundle, str(TINY), device="cpu", run_on="framework")
    with part(f"{options.tokens} tokens of the tiny model through its generated CUDA kernels, emulated on the CPU"):
        tokens = check_same_tokens(tiny, loaded, PROMPT, options.tokens)
        print(f"   {kernels_per_token(tiny)} generated kernels per token; tokens {tokens}, equal to the framework's")
    with part(f"text from the bundle {bundle}, loaded without tuning"):
        print(f"   {speak(loaded, PROMPT, 60)!r}")
    print("\nNot measured, since there is no GPU here: kernel times, selection by speed, tokens per second. All kernels are provisional:\n"
          "they are validated by emulation and will not be launched on a GPU before they are measured there.")


def with_gpu(options: argparse.Namespace, folder: Path) -> None:
    """Compile for the GPU here; tokens per second before and after."""
    import torch

    from agentcompile_core import api
    from agentcompile_core.report import bench

    large = torch.cuda.get_device_properties(0).total_memory >= LARGE_GPU_BYTES
    what, dtype, name = (QWEN3, "float16", "Qwen3-1.7B, random weights, fp16") if large else (TINY, "float16", "tiny model, fp16")
    with part(f"{name}: compiled for {torch.cuda.get_device_name()}"):
        model = compile_model(what, folder, dtype=dtype, budget_s=150.0, budget_plans=400, target=None, rounds=2,
                              random_weights=0 if large else None)
        model.context.close()
    with part("tokens per second, 128 tokens after a prompt of 128, batch 1, greedy"):
        rows = bench.compare(model, prompt=128, new_tokens=128, repetitions=3, baselines=("eager",))
        speed = {row["system"]: 1e3 / row["step_ms"] for row in rows}
        print(f"   before (transformers, eager): {speed['eager']:8.1f} tokens/s")
        print(f"   after (agentcompile):         {speed['agentcompile']:8.1f} tokens/s")
        if speed["agentcompile"] <= speed["eager"]:
            raise DemoError("the compiled model is not faster")
    statistics = {name.split(",")[0]: (model.statistics, 0)}
    del model
    torch.cuda.empty_cache()
    with part("tiny model (trained), fp32: compiled, bundled, loaded"):
        tiny = compile_model(TINY, folder, dtype="float32", budget_s=150.0, budget_plans=100, target=None, rounds=2)
        bundle = tiny.save(options.out)
        tiny.context.close()
        loaded, framework = (api.load(bundle, str(TINY), run_on=run_on) for run_on in ("auto", "framework"))
        tokens = check_same_tokens(loaded, framework, PROMPT, max(64, options.tokens))
        print(f"   {len(tokens)} tokens through {kernels_per_token(loaded)} generated kernels per token, equal to the framework's")
        print(f"   {speak(loaded, PROMPT, 60)!r}")
    statistics["tiny model"] = (tiny.statistics, 0)
    print("\n" + statistics_table(statistics))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 only if everything held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200", help="GPU to build for where there is none (default: h200, which is sm_90)")
    parser.add_argument("--tokens", type=int, default=12, help="tokens to generate through emulated kernels (default: 12)")
    parser.add_argument("--budget-s", type=float, default=90.0, help="seconds of emulated validation for Qwen3-1.7B (default: 90)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo" / "tiny_model.bundle", help="folder of the tiny model's bundle")
    options = parser.parse_args(arguments)
    import torch

    from agentcompile_core.plugin_api import AgentCompileError

    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            (with_gpu if torch.cuda.is_available() else without_gpu)(options, Path(scratch))
    except (DemoError, AgentCompileError) as exc:
        print(f"\nthe demo FAILED: {exc}", file=sys.stderr)
        return 1
    print(f"\nthe demo held everything it claims, in {time.monotonic() - began:.0f} s. Next: agentcompile explain {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
