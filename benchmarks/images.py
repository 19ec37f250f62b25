"""One image and some tokens as a prompt: ours and eager, in turns on one GPU.

HuggingFace's own model reads the prompt in both; behind it ours makes the tokens by compiled steps, captured into graphs, and eager by
its own forward. Random weights, and drawn numbers for pixels. Writes images.json under benchmarks/results/<gpu>/, one model per call:

    python benchmarks/images.py qwen2.5-vl-3b --grid 32x48
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness
from covered.composite import image_prompt
from full_models import add_options, compiled_here

from agentcompile_core.report import bench
from agentcompile_core.report.accounting import step_bytes


def grid_of(text: str) -> tuple[int, int]:
    """``32x48``: rows and columns of patches.

    Raises:
        SystemExit: it is no such size.
    """
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 and int(part) % 2 == 0 for part in parts):
        raise SystemExit(f"--grid {text}: allowed are two even numbers of patches, such as 32x48")
    return int(parts[0]), int(parts[1])


def systems_of(model: Any, prompt: dict[str, torch.Tensor]) -> dict[str, Callable[[int], Any]]:
    """What is timed, by name; each is called with the number of new tokens."""
    more = {name: one for name, one in prompt.items() if name not in ("input_ids", "attention_mask")}
    return {"eager": bench.framework(model.loaded.module, prompt["input_ids"], 0, "eager", **more),
            "agentcompile": lambda count: model.generate(**prompt, max_new_tokens=count, eos_token_id=None, do_sample=False)}


def rows_of(model: Any, options: argparse.Namespace, ceiling: float) -> list[dict[str, Any]]:
    """Rows of images.json."""
    prompt = image_prompt(model.loaded.module, grid=options.grid)
    length = prompt["input_ids"].shape[1]
    moved = step_bytes(model.graphs, length + options.output // 2)
    times = bench.alternate(systems_of(model, prompt), options.output, options.repetitions)
    if any("without kernels" in note for note in model.notes):
        raise SystemExit(f"{options.model} made no token by compiled steps: {'; '.join(model.notes)}")
    rows = [{"model": options.model, "dtype": options.dtype, "workload": f"{length}/{options.output}", "prompt": length,
             "floor_step_ms": moved / ceiling / 1e6, **row} for row in bench.rows_of(times, options.output)]
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def main() -> int:
    """Measure one model and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, budget_s=60.0)
    parser.add_argument("--grid", type=grid_of, default="32x48", help="patches of the image, where any size goes; default: %(default)s")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    with compiled_here(options) as (model, _, ceiling):
        harness.write_results("images", rows_of(model, options, ceiling), ceiling, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
