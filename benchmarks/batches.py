"""Batches of equal prompts: steps that read the weights once for all rows, beside row after row and eager's batch, in turns on one GPU.

Writes batches.json under benchmarks/results/<gpu>/, one model per call:

    python benchmarks/batches.py qwen3-1.7b --rows 2,4,8
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
from full_models import add_options, compiled_here

from agentcompile_core.report import bench
from agentcompile_core.runtime.rows import SIZES


def rows_asked(text: str) -> tuple[int, ...]:
    """``2,4,8``: how many rows.

    Raises:
        SystemExit: a part is no number of rows that one step may have.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and 1 < int(part) <= SIZES[-1] for part in parts):
        raise SystemExit(f"--rows {text}: allowed are numbers from 2 to {SIZES[-1]}, by commas, such as 2,4,8")
    return tuple(map(int, parts))


def systems_of(model: Any, ids: torch.Tensor, eager: bool) -> dict[str, Callable[[int], Any]]:
    """What is timed, by name; each is called with the number of new tokens of each row of ``ids``."""

    def by_session(when: str) -> Callable[[int], Any]:
        def run(count: int) -> Any:
            model.session.rows.when = when
            return model.generate(ids, count, eos_token_id=None, attention_mask=torch.ones_like(ids))

        return run

    found = {"together": by_session("measured"), "one by one": by_session("never")}
    if eager:
        found["eager"] = bench.framework(model.loaded.module, ids, 0, "eager")
    return found


def rows_of(model: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of batches.json."""
    rows, session = [], model.session
    for count in options.rows:
        known = session.rows.notes
        ids = torch.cat([bench.random_prompt(model.graphs.model.vocab_size, options.input, row) for row in range(count)])
        times = bench.alternate(systems_of(model, ids, options.eager), options.output, options.repetitions)
        key = next(size for size in SIZES if size >= count), session.decode_program(options.input + options.output // 2)
        taken, why = session.rows.seconds.get(key), [note for note in session.rows.notes if note not in known]
        together_us, single_us = (1e6 * one for one in taken) if taken else (0.0, 0.0)
        for row in bench.rows_of(times, options.output):
            del row["speedup"]
            rows.append({"model": options.model, "dtype": options.dtype, "workload": f"{count} x {options.input}/{options.output}",
                         "batch": count, "together_us": together_us, "single_us": single_us, "why": "; ".join(why),
                         **row})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Measure one model and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, budget_s=60.0)
    parser.add_argument("--rows", type=rows_asked, default="2,4,8", help="of a batch, by commas; default: %(default)s")
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--no-eager", dest="eager", action="store_false", help="leave transformers' own loop out")
    options = parser.parse_args()
    with compiled_here(options) as (model, _, ceiling):
        harness.write_results("batches", rows_of(model, options), ceiling, options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
