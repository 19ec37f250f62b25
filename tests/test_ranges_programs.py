"""Programs of ranges of positions: bundles and audits hold them to their selections, a session takes the one that serves."""

import json
from bisect import bisect_right
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ranges import CONTEXT, chosen
from test_ranges import planned as planned

from agentcompile_core.errors import UsageError, VerificationError
from agentcompile_core.installation.program_check import difference
from agentcompile_core.ir import ranges, serial
from agentcompile_core.ir.decisions import ChainLog, Decisions, choices_of
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.pipeline import programs_of
from agentcompile_core.report.audit import audit
from agentcompile_core.report.audit_chain import evidence_of, misplaced
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore


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


@pytest.mark.parametrize("from_position, begins", [(1, 1024), (1025, 1536), (2049, 3072)])
def test_the_audit_knows_where_each_range_begins(planned: Any, from_position: int, begins: int) -> None:
    first, evidence, later, _ = chosen(planned, lambda position: 16 if position < 4096 else 8, from_position=from_position)

    def told(start: int) -> list[Any]:
        moved = tuple(evolve(s, start=start) if s.start == begins else s for s in later.selections)
        logs = tuple(evolve(log, start=start) if log.start == begins else log for log in later.logs)
        return [d for d in audit((*first, *moved), evidence.records, decisions_of(planned, evolve(later, logs=logs), evidence), {})
                if f"from position {start} on" in d.subject and d.kind == "chain"]

    right = told(begins)
    assert right and not any(d.problems for d in right)
    assert all("judged at position 2560" in line for d in right for line in d.evidence if "judged" in line)
    assert any(f"{'1.010' if begins > 1024 else '1.001'} at" in line for d in right for line in d.evidence)
    for other in {1024, 1536, 2048, 3072} - {begins}:
        assert all(any("begin" in p for p in d.problems) for d in told(other))


@pytest.mark.parametrize("start, judged, earlier", [
    (1024, 2560, ()), (4096, 10240, ()), (1024, 2560, ((2048, 0.9), (1536, 1.003), (1024, 0.99))),
    (1536, 2560, ((2048, 0.9), (1536, 1.0), (1024, 1.1))),
    (3072, 2560, ((2048, 1.1),)), (4096, 10240, ((8192, 0.9), (6144, 0.9), (4096, 0.9))), (12288, 10240, ((8192, 1.1),))])
def test_where_a_range_begins_is_believed_where_it_follows(start: int, judged: int, earlier: tuple[tuple[int, float], ...]) -> None:
    assert not misplaced(ChainLog(started=(), start=start, judged=judged, earlier=earlier))
    for other in {1024, 1536, 2048, 3072, 4096, 6144, 12288} - {start, *((1024, 4096) if not earlier else ())}:
        assert misplaced(ChainLog(started=(), start=other, judged=judged, earlier=earlier))


@pytest.mark.parametrize("start, judged, earlier", [
    (3000, 2560, ()), (1024, 500, ()), (1024, 2560, ((1024, 0.9),)), (2048, 2560, ((2048, 0.9),)), (1024, 500, ((1024, 0.5),)),
    (1024, 2560, ((2048, -5.0), (1536, 0.9), (1024, 0.9))), (1024, 2560, ((2048, 1.1), (1536, 0.9), (1024, 0.9))),
    (1024, 2560, ((2048, float("nan")), (1536, 0.9), (1024, 0.9))), (1024, 2560, ((0, 1.0),)), (1024, -1, ((-7, 0.5), (-9, 2.0))),
    (1024, int("9" * 4300), ((1024, 2.0),)), (int("9" * 4300), int("9" * 4300), ()), (1024, 2560, ((int("9" * 4300), 2.0),))])
def test_where_a_range_begins_is_not_believed_else(start: int, judged: int, earlier: tuple[tuple[int, float], ...]) -> None:
    log = ChainLog(started=(), start=start, judged=judged, earlier=earlier)
    assert misplaced(log) and evidence_of(log)


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
