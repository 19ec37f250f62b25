"""Ranges of positions: a step is chosen again where more is cached, and a session takes the program that serves where it stands."""

import json
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chain import selected

from agentcompile_core.budget import Budget
from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import UsageError, VerificationError
from agentcompile_core.installation.program_check import difference
from agentcompile_core.ir import ranges, serial
from agentcompile_core.ir.candidate import Kernel
from agentcompile_core.ir.decisions import ChainTrial, Decisions, choices_of
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.ir.selection import Basis
from agentcompile_core.pipeline import programs_of
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.report import selection_text
from agentcompile_core.report.audit import audit
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
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
        assert start < ranges.middle(start, capacity) < end


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
                             from_position=self.from_position and max(self.from_position, question.earlier[0]))
        return json.loads(serial.dumps(answer))


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
    assert [question.earlier for question in worker.asked] == [(1024, 1536, 2048), (4096,)]
    everything = (*first, *later.selections)
    assert ranges.starts_of(everything) == (0, begins, 4096) == (0, *(log.start for log in later.logs))
    assert [grid_of(everything, p) for p in (begins, 4095, 4096)] == [{16}, {16}, {8}]
    before = {x.step for s in ranges.selected_from(everything, begins - 1).values() for x in s.steps}
    assert before == {x.step for s in first for x in s.steps}


@pytest.mark.parametrize("from_position", [CONTEXT - 1, CONTEXT // 4 * 3 + 1])
def test_what_wins_near_the_end_of_the_cache_alone_is_worth_no_program(planned: Any, from_position: int) -> None:
    _, _, later, _ = chosen(planned, lambda position: 16, from_position=from_position)
    assert later.selections == () == later.logs


def test_attention_alone_is_chosen_again_further_on(planned: Any) -> None:
    first, _, later, worker = chosen(planned, lambda position: 16 if position < 4096 else 8)
    starts = ranges.starts(CONTEXT)
    assert starts == (1024, 4096)
    assert [q.position for q in worker.asked] == [ranges.middle(start, CONTEXT) for start in starts]
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


def test_each_range_has_a_program_of_its_steps_and_a_bundle_keeps_it(planned: Any) -> None:
    _, graphs, regions, _ = planned
    first, _, later, _ = chosen(planned, lambda position: 16 if position < 4096 else 8)
    everything = (*first, *later.selections)
    programs = programs_of(graphs, regions, everything)
    assert {n for n in programs if n.startswith("decode")} == {"decode", "decode_from_1024", "decode_from_4096"}
    for name, program in programs.items():
        assert program.name == name
        if program.graph.name == "decode":
            steps = {x.step for s in ranges.selected_from(everything, program.start).values() for x in s.steps}
            assert {segment.step for segment in program.segments if segment.step} == steps
        stored = serial.unstructure(program) | {"graph": program.graph.name}
        assert bundle_reader._program(json.loads(json.dumps(stored)), graphs) == program


@pytest.mark.parametrize(("name", "start"), [("decode", -1), ("decode", CONTEXT), ("decode", 1 << 40), ("prefill_32", 5)])
def test_a_program_that_begins_where_none_can_is_refused(planned: Any, name: str, start: int) -> None:
    graph = next(g for g in planned[1].graphs if g.name == name)
    stored = serial.unstructure(framework_program(graph)) | {"graph": name, "start": start}
    with pytest.raises(UsageError, match=f"a program for '{name}' from position {start} on, which it cannot have"):
        bundle_reader._program(json.loads(json.dumps(stored)), planned[1])


def decisions_of(planned: Any, later: Any, evidence: Any) -> Decisions:
    places = tuple(range(len(evidence.records)))
    return Decisions(margin=0.02, advisor="heuristic", validators=(), regions=choices_of(planned[3]), places=places, ranges=later.logs)


def about_ranges(made: Any) -> list[str]:
    return [p for d in made if "from position" in d.subject or d.kind == "program" for p in d.problems]


def test_the_audit_makes_the_choice_of_each_range_again(planned: Any) -> None:
    _, graphs, regions, _ = planned
    first, evidence, later, _ = chosen(planned, lambda position: 16 if position < 4096 else 8)
    everything = (*first, *later.selections)
    decisions, programs = decisions_of(planned, later, evidence), programs_of(graphs, regions, everything)
    assert about_ranges(audit(everything, evidence.records, decisions, programs)) == []
    # A choice that no trial led to, one that nobody asked for, and a program that runs another range's steps.
    moved = tuple(evolve(s, start=1024) if s.start == 4096 else s for s in everything if s.start != 1024)
    assert about_ranges(audit(moved, evidence.records, decisions, {}))
    assert about_ranges(audit(everything, evidence.records, evolve(decisions, ranges=()), {}))
    swapped = {**programs, "decode_from_4096": evolve(programs["decode"], start=4096)}
    assert any("which was not selected" in p for p in about_ranges(audit(everything, evidence.records, decisions, swapped)))


def test_a_program_that_is_missing_or_lacks_steps_is_told(planned: Any) -> None:
    _, graphs, regions, _ = planned
    first, evidence, later, _ = chosen(planned, lambda position: 16 if position < 4096 else 8)
    everything = (*first, *later.selections)
    decisions, programs = decisions_of(planned, later, evidence), programs_of(graphs, regions, everything)
    without = {name: p for name, p in programs.items() if name != "decode_from_4096"}
    emptied = {**without, "decode_from_4096": evolve(framework_program(graphs.graphs[0]), start=4096)}
    assert "there is no such program" in about_ranges(audit(everything, evidence.records, decisions, without))
    assert any("which was selected" in p for p in about_ranges(audit(everything, evidence.records, decisions, emptied)))


@pytest.mark.parametrize("change", ["twice", "missing", "more", "later selections", "negative"])
def test_a_bundle_has_the_programs_of_its_selections_and_no_others(planned: Any, change: str) -> None:
    _, graphs, regions, _ = planned
    first, _, later, _ = chosen(planned, lambda position: 16 if position < 4096 else 8)
    selections, programs = (*first, *later.selections), programs_of(graphs, regions, (*first, *later.selections))
    items = [json.loads(json.dumps(serial.unstructure(p) | {"graph": p.graph.name})) for p in programs.values()]
    manifest = SimpleNamespace(target=planned[0].target)
    assert bundle_reader._programs(items, graphs, selections, manifest) == programs  # type: ignore[arg-type]
    if change == "twice":
        items.append(items[0])
    elif change == "missing":
        items = [item for item in items if item["start"] != 4096]
    elif change == "more":
        selections = first
    else:
        selections = (*selections, evolve(first[0], start=-5 if change == "negative" else 16384))
    with pytest.raises(UsageError, match="the bundle has"):
        bundle_reader._programs(items, graphs, selections, manifest)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None)).eval()


@pytest.fixture(scope="module")
def graphs(model: Any) -> Any:
    from agentcompile_core.stages.capture.language_model import capture_language_model

    return capture_language_model(model, "tiny", Workload(dtype=DType.F32, max_context=40, prefill_chunks=(4, 8)))


@settings(derandomize=True, database=None, deadline=None, max_examples=25)
@given(starts=st.lists(st.integers(1, 39), max_size=3, unique=True), length=st.integers(1, 30), count=st.integers(1, 9),
       sampled=st.booleans())
def test_every_step_runs_in_the_program_of_its_position(model: Any, graphs: Any, starts: list[int], length: int, count: int,
                                                         sampled: bool) -> None:
    from agentcompile_core.runtime.generation.on_scores import alone
    from agentcompile_core.runtime.sampling import Pick

    base = {g.name: framework_program(g) for g in graphs.graphs}
    programs = {**base, **{p.name: p for p in (evolve(base["decode"], start=start) for start in starts)}}
    session = Session(graphs, programs, WeightStore(model, "cpu"), Executables(device="cpu"),
                      kv_state=PlainKVCache().allocate(graphs.kv, "cpu"), decode=PythonLoop())
    ran: list[tuple[str, int]] = []
    for name in [n for n in programs if n.startswith("decode")]:
        step = session.step(name)
        session._steps[name] = lambda name=name, step=step: ran.append((name, int(session.position))) or step()
    prompt = torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.inference_mode():
        if sampled:
            pick = Pick(processors=lambda ids, scores: scores, stops=lambda ids, scores: torch.tensor([False]),
                        alone=alone([], frozenset()))
            found = list(session.picking(prompt, count, pick))
        else:
            found = list(session.greedy(prompt, count, frozenset(), False))
        wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)[0, length:].tolist()
    assert found == wanted
    bounds = [0, *sorted(starts)]
    serving = ["decode" if start == 0 else f"decode_from_{start}" for start in bounds]
    assert ran == [(serving[bisect_right(bounds, position) - 1], position) for position in range(length, length + count - 1)]


@pytest.mark.parametrize("start", [2, 20, 38])
@pytest.mark.parametrize("wrong", [False, True])
def test_a_later_program_is_compared_before_it_serves(model: Any, graphs: Any, start: int, wrong: bool) -> None:
    base = {g.name: framework_program(g) for g in graphs.graphs}
    graph = base["decode"].graph
    q = [v for v in graph.values if v.source.endswith("q_proj.weight")]
    swapped = {q[0].name: q[1].source, q[1].name: q[0].source} if wrong else {}
    later = evolve(graph, values=tuple(evolve(v, source=swapped.get(v.name, v.source)) for v in graph.values))
    weights = WeightStore(model, "cpu")
    programs = {**base, f"decode_from_{start}": evolve(framework_program(later), start=start)}
    session = Session(graphs, programs, weights, Executables(device="cpu"), kv_state=PlainKVCache().allocate(graphs.kv, "cpu"),
                      decode=PythonLoop())
    found = difference(session, programs, weights, None)  # type: ignore[arg-type]
    assert (f"(decode_from_{start})" in found) is wrong and bool(found) is wrong


def test_one_graph_says_how_tokens_are_made(graphs: Any) -> None:
    decode = next(g for g in graphs.graphs if g.name == "decode")
    with pytest.raises(VerificationError, match="decode, another are all decode steps"):
        evolve(graphs, graphs=(*graphs.graphs, evolve(decode, name="another"))).verify()
    with pytest.raises(VerificationError, match="two graphs are called 'decode'"):
        evolve(graphs, graphs=(*graphs.graphs, decode)).verify()


def test_the_framework_has_one_program_for_all_positions() -> None:
    installed = SimpleNamespace(programs={"decode": SimpleNamespace(graph=SimpleNamespace(name="decode", nodes=())),
                                          "decode_from_1024": SimpleNamespace(graph=SimpleNamespace(name="decode", nodes=()))})
    assert set(bundle_reader.on_framework(installed)) == {"decode"}  # type: ignore[arg-type]


def test_a_model_without_a_cache_has_no_ranges(planned: Any) -> None:
    graph = evolve(planned[1].graphs[0], values=tuple(v for v in planned[1].graphs[0].values if not v.source.startswith("kv.")))
    assert chain.capacity_of(graph) == 0 and not later_ranges.possible(graph) and not later_ranges.possible(None)
