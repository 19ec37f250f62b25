"""The chain: cutting a model short keeps the work, alternatives are bounded and repeatable, the confidence bound is one."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from agentcompile_cuda_kit.targets import preset
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir import serial
from agentcompile_core.ir.candidate import Candidate, Kernel, Resources
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.graph import ValueKind
from agentcompile_core.ir.record import Measurement, TuningRecord
from agentcompile_core.ir.selection import Basis, SelectedStep, Selection
from agentcompile_core.ir.verdict import Outcome, Verdict
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.runtime.make_program import make_program
from agentcompile_core.runtime.sources import source_of
from agentcompile_core.stages import analyze, capture, plan
from agentcompile_core.stages.select import chain
from agentcompile_core.stages.select.cut import LAYERS, WEIGHTS_BYTES, cut, layers_needed
from agentcompile_core.store import Store, keys
from agentcompile_core.testing import doubles
from agentcompile_core.worker.captured import replays_of
from agentcompile_core.worker.chain_question import Alternative, ChainAnswer, ChainQuestion, holds, replaced
from agentcompile_core.worker.paired import lower_bound, upper_bound

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
pytestmark = pytest.mark.usefixtures("shared_captures")


@pytest.fixture(scope="module")
def planned():  # type: ignore[no-untyped-def]
    from agentcompile_core.ir.graph import DType, Workload

    ctx = Context(catalog=load_catalog(), target=preset("h200"), config=Config(), store=Store(None))
    frontend = ctx.catalog.find("agentcompile_frontends", "huggingface")
    loaded = frontend.load(TINY, {"dtype": "float32", "device": "cpu", "meta": True})
    graphs = capture.run(loaded, Workload(dtype=DType.F32, max_context=256, prefill_chunks=(32,)), ctx, frontend=frontend)
    analyses = analyze.run(graphs, ctx)
    return ctx, graphs, analyses[0].regions, plan.run(analyses, ctx)


def selected(planned, points: int = 1):  # type: ignore[no-untyped-def]
    """The favourite cover at its first schedules, and records of the first ``points`` of each as if they had been timed."""
    ctx, _, _, plans = planned
    selections, records, candidates = [], [], []
    for region, space in ((one.region, one.space) for one in plans):
        cover = min(space.covers, key=lambda c: c.rank)
        steps = []
        for match_id in cover.matches:
            found = space.spaces_of(match_id)[0]
            for i, point in enumerate(found.space.points[:points]):
                from agentcompile_core.ir.plan import Step

                step = Step(match_id=match_id, implementation=found.implementation, origin=found.origin, schedule=point)
                source = source_of(step, region.match_by_id[match_id], ctx.catalog, ctx.target)
                candidates.append(Candidate(signature=region.signature, step=step, source=source))
                measured = Measurement(us=5.0 + i, spread_us=0.1, repetitions=5, floor_us=1.0)
                records.append(
                    TuningRecord(
                        key=f"{region.name}{match_id}{i}",
                        signature=region.signature,
                        step=step,
                        source_digest=source.digest,
                        verdict=Verdict(validator="numerics", outcome=Outcome.PASS),
                        measurement=measured,
                        resources=Resources(registers=32 * (i + 1)),
                    )
                )
                if i == 0:
                    match = region.match_by_id[match_id]
                    steps.append(
                        SelectedStep(
                            step=step,
                            label=match.label,
                            nodes=match.nodes,
                            source=source,
                            basis=Basis.MEASURED,
                            measurement=measured,
                            baseline=Measurement(us=4.0, spread_us=0.1, repetitions=5),
                        )
                    )
        selections.append(Selection(signature=region.signature, region=region.name, cover=cover, steps=tuple(steps), basis=Basis.MEASURED))
    return tuple(selections), Evaluated(candidates=tuple(candidates), records=tuple(records))


def test_a_cut_model_has_fewer_layers_and_the_same_work_per_layer(planned) -> None:  # type: ignore[no-untyped-def]
    _, graphs, regions, _ = planned
    graph = graphs.graphs[0]
    short, short_regions = cut(graph, regions, 2)
    assert {n.layer for n in short.nodes} == {-1, 0, 1}
    assert [len(r.instances) for r in short_regions] == [len(r.instances) if len(r.instances) == 1 else 2 for r in regions]
    selections, _ = selected(planned)
    program = make_program(short, short_regions, {s.signature: s for s in selections})
    assert program.verify() and all(s.step is not None for s in program.segments)
    assert len(program.segments) == sum(len(s.steps) * len(r.instances) for s, r in zip(selections, short_regions, strict=True))


def test_all_layers_of_a_small_model_are_kept(planned) -> None:  # type: ignore[no-untyped-def]
    _, graphs, _, _ = planned
    assert layers_needed(graphs.graphs[0], preset("h200")) == layers_needed(graphs.graphs[0], preset("rtx3090")) == 5


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=80))
def test_layers_are_many_enough_to_be_judged_by_and_few_enough_for_the_memory(planned, layer_bytes: list[int]) -> None:  # type: ignore[no-untyped-def]
    """The chain of the first layers must speak for all of them: a chain of four put two choices 1.3 % apart at the same time."""
    weights = [SimpleNamespace(name=f"w{i}", kind=ValueKind.WEIGHT, spec=SimpleNamespace(nbytes=n)) for i, n in enumerate(layer_bytes)]
    nodes = [SimpleNamespace(layer=i, inputs=(w.name,)) for i, w in enumerate(weights)]
    graph = SimpleNamespace(nodes=nodes, by_name={w.name: w for w in weights})
    kept = layers_needed(graph, preset("h200"))  # type: ignore[arg-type]
    assert min(len(layer_bytes), LAYERS) <= kept <= len(layer_bytes)
    cold = 2 * preset("h200").l2_bytes
    assert kept == len(layer_bytes) or kept * max(layer_bytes) + max(layer_bytes) > cold
    assert kept <= max(LAYERS, -(-cold // min(layer_bytes))) or kept * max(layer_bytes) <= WEIGHTS_BYTES


def test_alternatives_are_bounded_diverse_and_equal_in_any_order_of_records(planned) -> None:  # type: ignore[no-untyped-def]
    ctx, _, regions, _ = planned
    selections, evidence = selected(planned, points=16)
    ties = tuple(sorted(evidence.records, key=lambda r: r.key))
    found = chain.alternatives_of(regions, selections, evidence, ctx)
    assert found == chain.alternatives_of(regions, selections, evolve(evidence, records=tuple(reversed(ties))), ctx)
    first, later = ([a for a in found if a.later is which] for which in (False, True))
    assert found == (*first, *later), "each step's first ones have their turn before any further one"
    per_match = Counter(a.place for a in first)
    assert max(per_match.values()) == chain.MOST_PER_STEP + 1
    assert max(Counter(a.place for a in later).values()) == 16 - chain.MOST_PER_STEP <= chain.MOST_LATER
    assert all(per_match[a.place] == chain.MOST_PER_STEP + 1 for a in later) and len({(a.place, a.step) for a in found}) == len(found)
    few = evolve(evidence, records=tuple(r for r in evidence.records if r.measurement is not None and r.measurement.us < 11.0))
    assert not any(a.later for a in chain.alternatives_of(regions, selections, few, ctx))
    # Every step here lost alone (4 us on the framework), so the chain may also take each of them out.
    assert sum(a.selected is None for a in found) == sum(len(s.steps) for s in selections)


def test_replacing_and_removing_a_step(planned) -> None:  # type: ignore[no-untyped-def]
    ctx, _, regions, _ = planned
    selections, evidence = selected(planned, points=2)
    for alternative in chain.alternatives_of(regions, selections, evidence, ctx):
        changed = replaced(selections, alternative)
        assert holds(changed, alternative)
        before, after = (sum(len(s.steps) for s in some) for some in (selections, changed))
        assert after == before - (alternative.selected is None)


def test_a_question_survives_json(planned) -> None:  # type: ignore[no-untyped-def]
    ctx, graphs, regions, _ = planned
    selections, evidence = selected(planned, points=2)
    question = ChainQuestion(
        graph=graphs.graphs[0],
        regions=regions,
        selections=selections,
        target=ctx.target,
        backend="cuda",
        position=64,
        alternatives=chain.alternatives_of(regions, selections, evidence, ctx),
        margin=0.01,
        budget_s=1.0,
    )
    assert serial.structure(json.loads(json.dumps(serial.unstructure(question))), ChainQuestion) == question


def test_noise_is_no_win_and_a_clear_win_is_one() -> None:
    assert upper_bound([0.99, 1.01, 0.98, 1.02, 1.0, 0.99, 1.01]) > 1.0
    assert upper_bound([0.95, 0.951, 0.949, 0.95, 0.952, 0.948, 0.95]) < 0.96
    assert upper_bound([0.5]) == float("inf")
    assert lower_bound([0.95, 0.951, 0.949, 0.95, 0.952, 0.948, 0.95]) > 0.94
    assert lower_bound([0.5]) == float("-inf")


def test_a_sample_lasts_about_as_long_for_every_step() -> None:
    assert [replays_of(us) for us in (0.0, 1.0, 300.0, 1000.0, 50_000.0)] == [12, 12, 10, 3, 3]


def test_an_alternative_says_what_it_is(planned) -> None:  # type: ignore[no-untyped-def]
    assert str(Alternative(signature="s", match_id="m", selected=None)) == "framework on m"


def test_the_judge_gets_every_kernel_that_was_validated_and_builds_none_again(planned) -> None:  # type: ignore[no-untyped-def]
    """Half of the kernels are handed in by validation, the others come from the store; a kernel of neither is not made up."""
    ctx, _, regions, _ = planned
    backend = doubles.FakeBackend()
    ctx = evolve(ctx, backend=backend, store=Store(None))
    selections, evidence = selected(planned, points=3)
    alternatives = chain.alternatives_of(regions, selections, evidence, ctx)
    steps = [*(s for one in selections for s in one.steps), *(a.selected for a in alternatives if a.selected)]
    sources = list({s.source.digest: s.source for s in steps}.values())
    made = {s.digest: Kernel(digest=s.digest, backend="fake", arch=ctx.target.arch, binary=s.digest.encode(), compiler="",
                             sha256=hashlib.sha256(s.digest.encode()).hexdigest()) for s in sources}
    for source in sources[1::2]:
        ctx.store.put_kernel(keys.kernel_key(source, ctx.target, backend), made.pop(source.digest))
    found = chain.kernels_of(selections, alternatives, evolve(evidence, kernels=made), ctx)
    assert {k.digest for k in found} == {s.digest for s in sources} and len(sources) > 10
    first = sources[0].digest
    without = chain.kernels_of(selections, alternatives, evolve(evidence, kernels={k: v for k, v in made.items() if k != first}), ctx)
    assert {k.digest for k in without} == {s.digest for s in sources[1:]}


def test_kernels_and_timings_are_no_part_of_what_an_answer_is_stored_under(planned) -> None:  # type: ignore[no-untyped-def]
    ctx, graphs, regions, _ = planned
    selections, evidence = selected(planned)
    kernel = Kernel(digest="d", backend="fake", arch="sm_90a", binary=b"one", sha256="s", compiler="c")
    question = ChainQuestion(graph=graphs.graphs[0], regions=regions, selections=selections, target=ctx.target, backend="cuda", position=64,
                             alternatives=chain.alternatives_of(regions, selections, evidence, ctx), margin=0.01, budget_s=1.0)
    key = keys.chain_key(chain.timeless(question), "here")
    assert key == keys.chain_key(chain.timeless(evolve(question, kernels=(kernel,), budget_s=9.0)), "here")
    assert key != keys.chain_key(chain.timeless(evolve(question, position=65)), "here")


def test_the_worker_is_asked_once_with_the_kernels_and_its_answer_is_used_again(planned) -> None:  # type: ignore[no-untyped-def]
    ctx, graphs, _, plans = planned
    selections, evidence = selected(planned, points=2)
    digests = {s.source.digest for one in selections for s in one.steps} | {c.source.digest for c in evidence.candidates}
    made = {d: Kernel(digest=d, backend="fake", arch="sm_90a", binary=b"\x00\xff", sha256="s", compiler="c") for d in digests}
    asked: list[ChainQuestion] = []

    def call(function: str, argument: object, **_: object) -> object:
        assert function == "agentcompile_core.worker.judge:judge"
        asked.append(serial.structure(json.loads(json.dumps(argument)), ChainQuestion))
        answer = ChainAnswer(selections=asked[-1].selections, us=9.0, first_us=9.5, framework_us=12.0, tried=0, accepted=0)
        return json.loads(serial.dumps(answer))

    ctx = evolve(ctx, backend=doubles.FakeBackend(), store=Store(None), worker=SimpleNamespace(call=call))
    first, answer = chain.run(graphs.graphs[0], plans, selections, evolve(evidence, kernels=made), ctx)
    again, same = chain.run(graphs.graphs[0], plans, selections, evidence, ctx)
    assert len(asked) == 1 and answer is not None and answer == same and first == again
    assert {k.digest for k in asked[0].kernels} == digests and all(k.binary == b"\x00\xff" for k in asked[0].kernels)
    assert {s.basis for s in first} == {Basis.CHAIN}
