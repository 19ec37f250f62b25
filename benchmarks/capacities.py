"""The same schedules bound in caches of several capacities: what a decode step costs where only the capacity differs.

The model is compiled for the largest one; for each smaller one it is captured again, the selected steps are lowered for those graphs with
the schedules that they have, and both programs of the first range run in turns over the same weights. Writes capacities.json:

    python benchmarks/capacities.py qwen3-1.7b --context 24576 --capacities 8192
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))
import harness
from full_models import add_options, compiled_here
from steps import STEPS, sample_us

from agentcompile_core import pipeline
from agentcompile_core.installation.building import built
from agentcompile_core.installation.install import Runnable, install
from agentcompile_core.ir.graph import GraphSet, Workload
from agentcompile_core.ir.region import Region
from agentcompile_core.ir.selection import Selection
from agentcompile_core.ir.target import Target
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.report import bench
from agentcompile_core.runtime.holding import hold
from agentcompile_core.runtime.sources import source_of
from agentcompile_core.stages import analyze


def lowered_for(regions: tuple[Region, ...], selections: tuple[Selection, ...], of: tuple[Region, ...], catalog: Catalog,
                target: Target) -> tuple[Selection, ...]:
    """``selections`` of the regions ``of``, for ``regions`` of graphs that differ in the cache's capacity alone: the same steps with the
    same schedules, their sources made for those graphs. Those of later ranges are left out.

    Raises:
        SystemExit: the graphs are not cut alike, so that there is nothing to compare.
    """
    known = {tuple(sorted(region.instances[0].node.values())): region for region in regions}
    places = {region.signature: tuple(sorted(region.instances[0].node.values())) for region in of}
    found = []
    for selection in (s for s in selections if not s.start):
        region = known.get(places[selection.signature])
        if region is None or any(x.step.match_id not in region.match_by_id for x in selection.steps):
            raise SystemExit(f"the region {selection.region} is cut differently at the other capacity")
        steps = tuple(evolve(x, source=x.source and source_of(x.step, region.match_by_id[x.step.match_id], catalog, target))
                      for x in selection.steps)
        found.append(evolve(selection, signature=region.signature, region=region.name, steps=steps))
    return tuple(found)


def bound_at(model: Any, capacity: int) -> Any:
    """A session with a cache of ``capacity`` positions that runs the model's own schedules over its weights.

    Raises:
        SystemExit: the model is not captured there, or its kernels are not what runs.
    """
    ctx, compilation = model.context, model.compilation
    workload: Workload = evolve(model.graphs.workload, max_context=capacity)
    frontend = pipeline.frontend_for(model.loaded.module, ctx)
    graphs: GraphSet = pipeline.captured(model.loaded, frontend, workload, ctx, ())
    if graphs.kv is None:
        raise SystemExit(f"not captured at a capacity of {capacity}: {graphs.eager_reason}")
    regions = tuple(region for one in analyze.run(graphs, ctx) for region in one.regions)
    selections = lowered_for(regions, compilation.selections, compilation.regions, ctx.catalog, ctx.target)
    programs = pipeline.programs_of(graphs, regions, selections)
    what = Runnable(graphs=graphs, programs=programs, kernels=built(programs, compilation.kernels, ctx))
    session, notes = install(model.loaded, what, str(model.session.device), "auto", ctx, model.session._weights)
    lost = [note for note in notes if "on the framework's operators" in note]
    if lost:
        raise SystemExit(f"not bound at a capacity of {capacity}: {lost[0]}")
    return session


def rows_of(model: Any, capacity: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per position: microseconds of a step by the first range's program, bound in both caches."""
    sessions = {options.context: model.session, capacity: bound_at(model, capacity)}
    rows = []
    with torch.inference_mode():
        for session in sessions.values():
            hold(session.kv, max(options.positions) + STEPS)
        for position in options.positions:
            samples: dict[int, list[float]] = {capacity: [] for capacity in sessions}
            for turn in range(options.repetitions + 2):
                for size, session in list(sessions.items())[:: -1 if turn % 2 else 1]:
                    with session.exclusive():
                        found = sample_us(session, session.decode_program(0), position)
                    if turn >= 2:
                        samples[size].append(found)
            rows.append({"model": options.model, "dtype": options.dtype, "workload": f"{position} of {capacity}",
                         "context": options.context, "capacity": capacity, "position": position,
                         "us": statistics.median(samples[capacity]), "us_context": statistics.median(samples[options.context]),
                         "spread_us": bench.spread(samples[capacity]), "repetitions": options.repetitions})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Measure one model and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, budget_s=60.0)
    parser.add_argument("--context", type=int, default=24576)
    parser.add_argument("--capacities", default="8192", help="smaller ones, by commas")
    parser.add_argument("--positions", default="192,2048")
    parser.add_argument("--repetitions", type=int, default=30)
    options = parser.parse_args()
    capacities = [int(text) for text in options.capacities.split(",")]
    options.positions = [int(text) for text in options.positions.split(",")]
    if not max(options.positions) + 2 * STEPS < min(capacities) <= max(capacities) < options.context:
        parser.error(f"positions must lie within the capacities ({options.capacities}), and those below --context {options.context}")
    with compiled_here(options) as (model, seconds, ceiling):
        print(f"compiled in {seconds:.1f} s; read ceiling {ceiling:.0f} GB/s; notes: {'; '.join(model.notes) or 'none'}", flush=True)
        rows = [row for capacity in capacities for row in rows_of(model, capacity, options)]
        harness.write_results("capacities", rows, max(ceiling, harness.read_ceiling_gbps()), options.out, options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
