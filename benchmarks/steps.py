"""A decode step by how much is cached: with the program of its range of positions, and with that of the first range, in turns.

Writes steps.json under benchmarks/results/<gpu>/, one model and context per call:

    python benchmarks/steps.py qwen3-1.7b --context 24576 --positions 192,2048,8192,20480
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness
from full_models import add_options, compiled_here
from prefill import lengths_of

from agentcompile_core.report import bench
from agentcompile_core.report.accounting import step_bytes
from agentcompile_core.runtime.holding import hold

STEPS = 32  # per sample, one behind the other


def sample_us(session: Any, program: str, position: int) -> float:
    """Microseconds of one step, from the host's first enqueueing to the device's end of the last, over some steps."""
    step = session.step(program)
    session.position.fill_(position)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began.record()
    for _ in range(STEPS):
        step()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1e3 / STEPS


def attention_of(program: Any) -> str:
    """The schedules of the steps that read the cache, as they are told apart."""
    found = {str(s.step.schedule) for s in program.segments if s.step is not None and s.step.match_id.startswith("attention")}
    return "; ".join(sorted(found))


def rows_of(model: Any, options: argparse.Namespace, ceiling_gbps: float) -> list[dict[str, Any]]:
    """Rows of steps.json, shortest first."""
    session, rows = model.session, []
    with session.exclusive(), torch.inference_mode():
        hold(session.kv, max(lengths_of(options.positions, options.context)) + STEPS)
        for position in lengths_of(options.positions, options.context):
            names = {"us": session.decode_program(position), "us_first": session.decode_program(0)}
            samples: dict[str, list[float]] = {key: [] for key in names}
            for turn in range(options.repetitions + 2):
                for key, name in names.items():
                    found = sample_us(session, name, position)
                    if turn >= 2:
                        samples[key].append(found)
            moved = step_bytes(model.graphs, position + STEPS // 2)
            program = model.compilation.programs[names["us"]]
            rows.append({"model": options.model, "dtype": options.dtype, "workload": f"{position} of {options.context}",
                         "context": options.context, "position": position, "from_position": program.start,
                         **{key: statistics.median(times) for key, times in samples.items()}, "spread_us": bench.spread(samples["us"]),
                         "floor_us": moved / ceiling_gbps / 1e3, "attention": attention_of(program), "repetitions": options.repetitions})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Measure one model at one context and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, budget_s=150.0)
    parser.add_argument("--context", type=int, default=24576)
    parser.add_argument("--positions", default="192,2048,8192,20480")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--bundle", type=Path, help="also write the bundle here, whose decisions.json says what each range was chosen from")
    options = parser.parse_args()
    lengths_of(options.positions, options.context)
    with compiled_here(options) as (model, seconds, ceiling):
        print(f"compiled in {seconds:.1f} s; read ceiling {ceiling:.0f} GB/s; notes: {'; '.join(model.notes) or 'none'}", flush=True)
        if options.bundle:
            model.save(options.bundle)
        rows = rows_of(model, options, ceiling)
        harness.write_results("steps", rows, max(ceiling, harness.read_ceiling_gbps()), options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
