"""benchmarks/capacities.py: what is bound at another capacity are the selected schedules, made for its graphs, and nothing else."""

import argparse
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from capture_models import CONTEXT, SIZES, tiny
from test_chain import planned, selected  # noqa: F401  (planned is a fixture)

from agentcompile_core import compile
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.pipeline import programs_of
from agentcompile_core.runtime.sources import source_of
from agentcompile_core.stages import analyze, capture

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
pytestmark = pytest.mark.usefixtures("shared_captures")
SMALLER = 128


@pytest.fixture
def capacities(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("capacities", "steps", "harness", "full_models", "prefill", "step_tables", "markdown_table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("capacities")


def regions_at(ctx: Any, capacity: int) -> tuple[Any, tuple[Any, ...]]:
    frontend = ctx.catalog.find("agentcompile_frontends", "huggingface")
    loaded = frontend.load(TINY, {"dtype": "float32", "device": "cpu", "meta": True})
    graphs = capture.run(loaded, Workload(dtype=DType.F32, max_context=capacity, prefill_chunks=(32,)), ctx, frontend=frontend)
    return graphs, tuple(region for one in analyze.run(graphs, ctx) for region in one.regions)


def test_the_same_schedules_are_made_for_a_smaller_cache(capacities: Any, planned: Any) -> None:  # noqa: F811
    ctx, _, regions, _ = planned
    first, _ = selected(planned)
    graphs, smaller = regions_at(ctx, SMALLER)
    later = tuple(evolve(s, start=64) for s in first)
    found = capacities.lowered_for(smaller, (*first, *later), regions, ctx.catalog, ctx.target)
    assert [[x.step for x in s.steps] for s in found] == [[x.step for x in s.steps] for s in first]
    assert {s.signature for s in found} <= {r.signature for r in smaller}
    for selection in found:
        region = next(r for r in smaller if r.signature == selection.signature)
        assert all(x.source == source_of(x.step, region.match_by_id[x.step.match_id], ctx.catalog, ctx.target) for x in selection.steps)
    program = programs_of(graphs, smaller, found)["decode"]
    assert all(segment.step is not None for segment in program.segments) and program.verify()
    assert {s.signature for s in found} != {s.signature for s in first}, "what reads the cache is another region"


def test_graphs_that_are_cut_differently_are_no_comparison(capacities: Any, planned: Any) -> None:  # noqa: F811
    ctx, _, regions, _ = planned
    first, _ = selected(planned)
    _, smaller = regions_at(ctx, SMALLER)
    with pytest.raises(SystemExit, match="cut differently at the other capacity"):
        capacities.lowered_for(smaller[1:], first, regions, ctx.catalog, ctx.target)
    without = tuple(evolve(region, matches=()) for region in smaller)
    with pytest.raises(SystemExit, match="cut differently at the other capacity"):
        capacities.lowered_for(without, first, regions, ctx.catalog, ctx.target)


def test_both_caches_take_turns(capacities: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is timed as often as the other, and the row says which is which."""
    model = compile(tiny("qwen3", SIZES), max_context=CONTEXT, run_on="framework", origins=(), validators=())
    other = compile(tiny("qwen3", SIZES), max_context=CONTEXT // 2, run_on="framework", origins=(), validators=()).session
    turns: list[Any] = []

    def sample(session: Any, program: str, position: int) -> float:
        turns.append(session)
        assert program == "decode" and position == 3
        return 8.0 if session is other else 10.0

    monkeypatch.setattr(capacities, "bound_at", lambda model, capacity: other)
    monkeypatch.setattr(capacities, "sample_us", sample)
    monkeypatch.setattr(capacities, "STEPS", 1)
    options = argparse.Namespace(model="tiny", dtype="float32", context=CONTEXT, positions=[3], repetitions=4)
    row, = capacities.rows_of(model, CONTEXT // 2, options)
    assert (row["us"], row["us_context"], row["capacity"], row["repetitions"]) == (8.0, 10.0, CONTEXT // 2, 4)
    assert len(turns) == 12 and turns.count(other) == 6 and turns[0] is model.session and turns[2] is other
    tables = importlib.import_module("step_tables")
    assert "| 8.0 | 0.0 | 48 | 10.0 | 25.0% | 4 |".replace("48", str(CONTEXT)) in tables.capacities({"rows": [row]})


def test_a_model_is_bound_at_another_capacity_over_its_own_weights(capacities: Any) -> None:
    """Without kernels too: the session of the smaller cache gives the tokens of the larger one, and has no copy of the weights."""
    import torch

    model = compile(tiny("qwen3", SIZES), max_context=CONTEXT, run_on="framework", origins=(), validators=())
    bare = SimpleNamespace(context=model.context, loaded=model.loaded, graphs=model.graphs, session=model.session,
                           compilation=evolve(model.compilation, selections=(), kernels={}))
    session = capacities.bound_at(bare, CONTEXT // 2)
    prompt = torch.arange(3, 8).view(1, -1)
    assert torch.equal(session.generate(prompt, 6), model.session.generate(prompt, 6))
    assert session._weights is model.session._weights and session.kv.capacity == CONTEXT // 2
