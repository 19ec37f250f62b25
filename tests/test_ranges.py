"""Ranges of positions: a step is chosen again where more is cached, and begins where it wins."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agentcompile_cuda_kit.targets import preset
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chain import selected

from agentcompile_core.budget import Budget
from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir import ranges, serial
from agentcompile_core.ir.candidate import Kernel
from agentcompile_core.ir.decisions import ChainTrial
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.ir.selection import Basis
from agentcompile_core.pipeline import programs_of
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.report import selection_text
from agentcompile_core.stages import analyze, capture, plan
from agentcompile_core.stages.select import chain
from agentcompile_core.stages.select import ranges as later_ranges
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.worker.chain_question import ChainAnswer, ChainQuestion, replaced
from agentcompile_core.worker.neighbours import NEAR, in_order

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
CONTEXT = 8192
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=200)


@SETTINGS
@given(st.integers(1, 1 << 20))
def test_ranges_follow_each_other_and_are_judged_inside(capacity: int) -> None:
    starts = ranges.starts(capacity)
    assert list(starts) == sorted(set(starts)) and all(start < capacity for start in starts)
    assert bool(starts) == (capacity >= ranges.FIRST * ranges.LEAST)
    for start, end in zip(starts, (*starts[1:], capacity), strict=False):
        assert start < ranges.inside(start, capacity) < end
    assert [ranges.inside(start, capacity) for start in starts[:-1]] == [(a + b) // 2 for a, b in pairwise(starts)]
    assert not starts or ranges.inside(starts[-1], capacity) >= (starts[-1] + capacity) // 2, "requests end where a cache ends"


@SETTINGS
@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_a_range_may_begin_anywhere_within_half_of_its_position(start: int, end: int) -> None:
    found = ranges.beginnings(start, end)
    begins = ranges.beginning(start, 0, end)
    assert begins is None or (begins == found[0] and begins * ranges.WORTH <= end)
    assert begins is not None or not found or found[0] * ranges.WORTH > end
    assert list(found) == sorted(set(found)) and all(start <= position < end for position in found)
    assert set(ranges.starts(end)) <= set(ranges.beginnings(0, end))
    assert all(after <= 1.5 * before for before, after in pairwise(found))
    assert not found or found[0] <= max(ranges.FIRST, 1.5 * start)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    shape = json.loads((TINY / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(shape))
    ctx = Context(catalog=load_catalog(), target=preset("h200"), config=Config(), store=Store(None))
    frontend = ctx.catalog.find("agentcompile_frontends", "huggingface")
    loaded = frontend.load(folder, {"dtype": "float32", "device": "cpu", "meta": True})
    graphs = capture.run(loaded, Workload(dtype=DType.F32, max_context=CONTEXT, prefill_chunks=(32,)), ctx, frontend=frontend)
    analyses = analyze.run(graphs, ctx)
    return ctx, graphs, analyses[0].regions, plan.run(analyses, ctx)


class Worker:
    """Answers as a chain on a device would for which attention is fastest with ``blocks(position)`` blocks."""

    def __init__(self, blocks: Any, from_position: int = 0) -> None:
        self.blocks, self.from_position, self.asked = blocks, from_position, list[ChainQuestion]()

    def call(self, function: str, argument: object, **_: object) -> object:
        question = serial.structure(json.loads(json.dumps(argument)), ChainQuestion)
        self.asked.append(question)
        held, trials = question.selections, []
        wanted = self.blocks(question.position)
        for option in question.alternatives:
            wins = option.selected is not None and option.selected.source.launches[0].grid[0] == wanted
            step = option.selected.step if option.selected else None
            trials.append(ChainTrial(signature=option.signature, match_id=option.match_id, step=step,
                                     ratio=0.5 if wins else 1.5, taken=wins))
            held = replaced(held, option) if wins else held
        answer = ChainAnswer(selections=held, us=9.0, first_us=9.5, framework_us=0.0, tried=len(trials), accepted=1, trials=tuple(trials),
                             earlier=self.compared(question.earlier) if self.from_position else ())
        return json.loads(serial.dumps(answer))

    def compared(self, earlier: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
        """What won is slower in front of ``from_position``."""
        last = max((position for position in earlier if position < self.from_position), default=0)
        return tuple((position, 1.001 if position > last else 1.01) for position in reversed(earlier) if position >= last)


def chosen(planned: Any, blocks: Any, budget_s: float = 60.0, trials: Any = lambda first, evidence: (),
           store: Store | None = None, from_position: int = 0) -> tuple[Any, ...]:
    """The first selections, evidence, what is selected later, and the worker. ``budget_s``: what is left when it begins; ``from_position``:
    from where on what is fastest at a position holds before it."""
    ctx, graphs, _, plans = planned
    first, evidence = selected(planned, points=16)
    first = tuple(evolve(s, basis=Basis.CHAIN, steps=tuple(evolve(x, basis=Basis.CHAIN) for x in s.steps)) for s in first)
    digests = {c.source.digest for c in evidence.candidates}
    kernels = {d: Kernel(digest=d, backend="fake", arch="sm_90a", binary=b"\x00", sha256="s", compiler="c") for d in digests}
    worker = Worker(blocks, from_position)
    ctx = evolve(ctx, backend=doubles.FakeBackend(), store=store or Store(None), worker=worker, budget=Budget(budget_s))
    ctx.budget.start()
    return first, evidence, later_ranges.later(graphs.graphs[0], plans, first, evolve(evidence, kernels=kernels), ctx,
                                               trials(first, evidence)), worker


@pytest.mark.parametrize("grid, shared_kib, in_flight_kib, on_an_sm_kib", [
    ((132, 1, 1), 64, 132 * 64, 64), ((264, 1, 1), 64, 264 * 64, 128), ((16, 8, 1), 68, 128 * 68, 68), ((8, 8, 1), 130, 64 * 130, 130),
    ((1000, 1, 1), 64, 3 * 132 * 64, 3 * 64), ((500, 1, 1), 0, 0, 0)])
def test_what_blocks_hold_is_of_those_that_are_there_at_a_time(grid: tuple[int, int, int], shared_kib: int, in_flight_kib: int,
                                                              on_an_sm_kib: int) -> None:
    """An H200 has 132 SMs of 228 KiB."""
    source = SimpleNamespace(launches=(SimpleNamespace(grid=grid, shared_bytes=shared_kib << 10),))
    found: Any = SimpleNamespace(source=lambda record: source)
    record: Any = None
    assert later_ranges._in_flight(record, found, preset("h200")) == in_flight_kib << 10
    assert later_ranges._on_an_sm(record, found, preset("h200")) == on_an_sm_kib << 10


@SETTINGS
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3), st.sampled_from([0, 1 << 10, 1 << 16])), min_size=1, max_size=40))
def test_what_has_most_in_flight_is_tried_early_whatever_it_takes_alone(launches: list[tuple[int, int, int]]) -> None:
    """In turns with what is fastest alone at few positions, of which every way to cut the work has its place first."""
    sources = {number: SimpleNamespace(launches=(SimpleNamespace(grid=(grid, 8, 1), block=(32 * block, 1, 1), shared_bytes=shared),))
               for number, (grid, block, shared) in enumerate(launches)}  # the numbers are the records, fastest first
    found: Any = SimpleNamespace(source=sources.get)
    records: list[Any] = list(sources)
    order: list[Any] = later_ranges._ways(records, found, preset("h200"))
    assert len(order) == len(set(order)) == min(len(launches), later_ranges.MOST_PER_STEP) and order[0] == 0
    in_flight = {number: 8 * launch[0] * launch[2] for number, launch in enumerate(launches)}  # all of them are there at once
    for turn in range(later_ranges.MOST_PER_STEP // 2):
        met = order[: 2 * turn + 2]
        most = sorted((n for n in in_flight if in_flight[n]), key=lambda n: -in_flight[n])[: turn + 1]
        cuts = list(dict.fromkeys((grid, block) for grid, block, _ in launches))[: turn + 1]
        assert set(most) <= set(met) and {launches[number][:2] for number in met} >= set(cuts)


def grid_of(selections: Any, position: int) -> set[int]:
    held = ranges.selected_from(selections, position).values()
    return {x.source.launches[0].grid[0] for s in held for x in s.steps if x.step.match_id.startswith("attention")}


def test_matches_that_read_the_cache_are_named_before_anything_is_measured(planned: Any) -> None:
    """They are those of the chain's questions later on, and more: whatever reads it may be selected."""
    _, graphs, _, plans = planned
    graph = graphs.graphs[0]
    named = later_ranges.places(graph, plans)
    assert named and all(match.startswith("attention") for _, match in named)
    worker = chosen(planned, lambda position: 16)[3]
    assert {(a.signature, a.match_id) for q in worker.asked for a in q.alternatives} <= named
    short = evolve(graph, values=tuple(evolve(v, spec=evolve(v.spec, shape=(v.spec.shape[0], 512, *v.spec.shape[2:])))
                                       if v.source.startswith("kv.") else v for v in graph.values))
    assert later_ranges.places(short, plans) == later_ranges.places(None, plans) == frozenset()


@settings(derandomize=True, database=None, deadline=None, max_examples=20)
@given(data=st.data())
def test_steps_beside_attention_are_asked_again_by_what_came_close(planned: Any, data: st.DataObject) -> None:
    """Of the steps in front of attention and behind it those that lost least, those that leave most room, at most a few, and themselves;
    of no others any."""
    ratios: dict[Any, float] = {}

    def trials(first: Any, evidence: Any) -> tuple[ChainTrial, ...]:
        for record in evidence.records:
            if record.usable and (record.signature, record.step) not in ratios:
                ratios[record.signature, record.step] = data.draw(st.sampled_from((0.0, 0.99, 1.001, 1.01, 1.02, NEAR, 1.2)))
        return tuple(ChainTrial(signature=s, match_id=step.match_id, step=step, ratio=ratio) for (s, step), ratio in ratios.items())

    first, evidence, later, worker = chosen(planned, lambda position: 16 if position < 4096 else 8, trials=trials)
    held = {(r.signature, r.step): later_ranges._on_an_sm(r, evidence, preset("h200")) for r in evidence.records if r.usable}
    regions = {plan.region.signature: plan.region for plan in planned[3]}
    for question in worker.asked:
        asked = {(a.signature, a.match_id, a.selected.step) for a in question.alternatives if not a.match_id.startswith("attention")}
        for selection in first:
            steps = [x.step for x in in_order(selection, regions[selection.signature])]
            read = {n for n, step in enumerate(steps) if step.match_id.startswith("attention")}
            for n, step in enumerate(steps):
                mine = {x for s, m, x in asked if s == selection.signature and m == step.match_id}
                if n in read:
                    continue
                near = {x: r for (s, x), r in ratios.items() if s == selection.signature and x.match_id == step.match_id and 0.0 < r < NEAR}
                if not {n - 1, n + 1} & read or not near:
                    assert not mine
                    continue
                found, half = mine & near.keys(), later_ranges.MOST_PER_NEIGHBOUR // 2
                assert step in mine and mine <= {step, *near} and min(len(near), 2 * half) <= len(mine) <= 2 * half + 1
                assert sorted(near[x] for x in found)[:half] == sorted(near.values())[:half]
                assert min(held[selection.signature, x] for x in found) == min(held[selection.signature, x] for x in near)
    assert later.selections


@pytest.mark.parametrize("from_position, begins", [(0, 1024), (1024, 1024), (1537, 2048), (2560, 3072)])
def test_a_range_begins_where_what_was_chosen_for_it_wins(planned: Any, from_position: int, begins: int) -> None:
    """Before that the steps of the range before it go on."""
    first, _, later, worker = chosen(planned, lambda position: 16 if position < 4096 else 8, from_position=from_position)
    assert [question.earlier for question in worker.asked] == [(1024, 1536, 2048), (4096, 6144)]
    everything = (*first, *later.selections)
    assert ranges.starts_of(everything) == (0, begins, 4096) == (0, *(log.start for log in later.logs))
    assert [grid_of(everything, p) for p in (begins, 4095, 4096)] == [{16}, {16}, {8}]
    before = {x.step for s in ranges.selected_from(everything, begins - 1).values() for x in s.steps}
    assert before == {x.step for s in first for x in s.steps}


def test_what_wins_near_the_end_of_the_cache_alone_is_worth_no_program(planned: Any) -> None:
    _, _, later, worker = chosen(planned, lambda position: 16 if position > 4096 else 0, from_position=CONTEXT - 1)
    assert len(worker.asked) == 2 and later.selections == () and [log.trials and log.earlier for log in later.logs] == [((2048, 1.01),)]


def test_attention_alone_is_chosen_again_further_on(planned: Any) -> None:
    first, _, later, worker = chosen(planned, lambda position: 16 if position < 4096 else 8)
    starts = ranges.starts(CONTEXT)
    assert starts == (1024, 4096)
    assert [q.position for q in worker.asked] == [ranges.inside(start, CONTEXT) for start in starts]
    assert not any(q.with_framework for q in worker.asked)
    matches = {a.match_id for q in worker.asked for a in q.alternatives}
    assert all(match.startswith("attention") for match in matches) and matches
    everything = (*first, *later.selections)
    assert [grid_of(everything, p) for p in (1024, 4095, 4096, CONTEXT)] == [{16}, {16}, {8}, {8}]
    for start in starts:  # nothing but attention has changed
        for signature, selection in ranges.selected_from(everything, start).items():
            before = {x.step for s in first if s.signature == signature for x in s.steps}
            assert all(x.step.match_id.startswith("attention") for x in selection.steps if x.step not in before)
            assert all("faster at position" in x.reason for x in selection.steps if x.step not in before)
    assert "from position 4096 on" in selection_text(later.selections[-1])


def test_where_the_same_wins_everywhere_there_is_one_program(planned: Any) -> None:
    first, _, later, worker = chosen(planned, lambda position: 0)
    assert len(worker.asked) == 2 and later.selections == () and len(later.logs) == 2
    _, graphs, regions, _ = planned
    assert set(programs_of(graphs, regions, first)) == {g.name for g in graphs.graphs}


def test_without_time_nothing_is_asked(planned: Any) -> None:
    _, _, later, worker = chosen(planned, lambda position: 16, budget_s=0.5)
    assert not worker.asked and later == later_ranges.Later()


def test_a_model_without_a_cache_has_no_ranges(planned: Any) -> None:
    graph = evolve(planned[1].graphs[0], values=tuple(v for v in planned[1].graphs[0].values if not v.source.startswith("kv.")))
    assert chain.capacity_of(graph) == 0 and not later_ranges.possible(graph) and not later_ranges.possible(None)
