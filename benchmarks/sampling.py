"""Drawn tokens: what a token costs where it is the most likely one, and where it is drawn, chosen on the device or by the host.

Writes sampling.json under benchmarks/results/<gpu>/, one model per call. All systems take turns in one process, with one prompt:

    python benchmarks/sampling.py qwen3-1.7b --settings "temperature=0.6,top_k=20,top_p=0.95;top_k=0"
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness
from full_models import add_options, compiled_here

from agentcompile_core.report import bench
from agentcompile_core.runtime.generation.step_model import StepModel


def settings_of(text: str) -> dict[str, float | int]:
    """``temperature=0.6,top_k=20``: fields of GenerationConfig by name.

    Raises:
        SystemExit: a part is no name and number.
    """
    found: dict[str, float | int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        try:
            found[name] = int(value) if value.isdigit() else float(value)
        except ValueError:
            raise SystemExit(f"--settings {part}: allowed are names and numbers by commas, such as temperature=0.6,top_k=20") from None
    return found


@contextmanager
def by_host() -> Iterator[None]:
    """The host looks at the logits of every step, as it does under processors that the device does not know."""
    with mock.patch.object(StepModel, "_alone", lambda self, processors, criteria: None):
        yield


def systems_of(model: Any, ids: torch.Tensor, settings: dict[str, float | int], eager: bool) -> dict[str, Callable[[int], Any]]:
    """What is timed, by name; each is called with the number of new tokens."""
    drawn = {"do_sample": True, "eos_token_id": None, "attention_mask": ids.new_ones(ids.shape), **settings}

    def chosen_by_host(count: int) -> Any:
        with by_host():
            return model.generate(ids, count, **drawn)

    found: dict[str, Callable[[int], Any]] = {
        "most likely": lambda count: bench.generate_exactly(model, ids, count), "drawn": lambda count: model.generate(ids, count, **drawn),
        "drawn, by host": chosen_by_host}
    if eager:
        module, given = model.loaded.module, ids.cuda()
        of_module = {**drawn, "attention_mask": torch.ones_like(given), "pad_token_id": 0, "disable_compile": True}

        def by_module(count: int) -> Any:
            with torch.inference_mode():
                return module.generate(given, max_new_tokens=count, min_new_tokens=count, **of_module)

        found["drawn, eager"] = by_module
    return found


def rows_of(model: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of sampling.json."""
    ids = bench.random_prompt(model.graphs.model.vocab_size, options.input, 0)
    rows = []
    for text in options.settings.split(";"):
        settings = settings_of(text)
        times = bench.alternate(systems_of(model, ids, settings, options.eager), options.output, options.repetitions)
        for row in bench.rows_of(times, options.output):
            del row["speedup"]
            named = ",".join(f"{name}={value}" for name, value in settings.items())
            rows.append({"model": options.model, "dtype": options.dtype, "workload": f"{options.input}/{options.output}, {named}",
                         "vocabulary": model.graphs.model.vocab_size, "settings": named, **row})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Measure one model and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, budget_s=60.0)
    parser.add_argument("--settings", default="temperature=0.6,top_k=20,top_p=0.95;top_k=0",
                        help="fields by commas, requests by semicolons")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--no-eager", dest="eager", action="store_false", help="leave transformers' own loop out")
    options = parser.parse_args()
    for text in options.settings.split(";"):
        settings_of(text)
    with compiled_here(options) as (model, _, ceiling):
        harness.write_results("sampling", rows_of(model, options), ceiling, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
