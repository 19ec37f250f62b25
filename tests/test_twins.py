"""Equal matches of several regions: what is found out of one holds for the others, and nothing holds for what only looks alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve
from capture_models import WINDOWED, WORKLOAD, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from select_cases import FAMILY, context, plan, step

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.baseline import FRAMEWORK
from agentcompile_core.ir.candidate import Candidate
from agentcompile_core.ir.graph import DType, Graph, Ref, map_refs
from agentcompile_core.ir.region import Instance, Match, Region
from agentcompile_core.ir.verdict import Case, InputFamily, Trial
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.events import CandidateFinished
from agentcompile_core.stages import analyze, lower, validate
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.validate.computation import computation_of, twin_of
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Worker

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, database=None)
Pair = tuple[Match, Graph]


def renamed(pair: Pair, suffix: str) -> Pair:
    """The same match of the same graph under other names."""
    match, graph = pair
    names = {value.name: value.name + suffix for value in graph.values}
    nodes = tuple(evolve(n, name=n.name + suffix, args=tuple(map_refs(a, names) for a in n.args),
                         mutates=tuple(names[m] for m in n.mutates),
                         outputs=tuple(names[o] for o in n.outputs)) for n in graph.nodes)
    other = evolve(graph, name=graph.name + suffix, values=tuple(evolve(v, name=names[v.name]) for v in graph.values), nodes=nodes,
                   inputs=tuple(names[i] for i in graph.inputs), outputs=tuple(names[o] for o in graph.outputs))
    operands = tuple(evolve(o, values=tuple(names[v] for v in o.values)) for o in match.operands)
    return evolve(match, nodes=tuple(n + suffix for n in match.nodes), operands=operands), other


def region(signature: str, suffix: str) -> Region:
    match, graph = renamed(doubles.fake_match(), suffix)
    nodes = tuple((n.name, n.name) for n in graph.nodes)
    return Region(name=signature, signature=signature, graph=graph, instances=(Instance(nodes=nodes, values=()),), matches=(match,))


def planned(signature: str, suffix: str, *behaviours: tuple[str, float]) -> Any:
    """The plan of a region of its own, with candidates that behave so."""
    of = region(signature, suffix)
    match = of.matches[0].id
    ordered = plan(*(step(behaviour, us, match_id=match) for behaviour, us in behaviours))
    covers = tuple(evolve(c, matches=(match,) if c.matches else ()) for c in ordered.plan.space.covers)
    space = evolve(ordered.plan.space, signature=signature, covers=covers)
    summary = evolve(ordered.plan.summary, signature=signature)
    return evolve(ordered, plan=evolve(ordered.plan, region=of, space=space, summary=summary),
                  record=evolve(ordered.record, signature=signature))


def searched(ordered: tuple[Any, ...], folder: Path) -> tuple[Any, list[tuple[str, str]]]:
    """What a search found, and what was evaluated, by region and behaviour."""
    seen: list[Any] = []
    with Worker(catalog="agentcompile_core.testing.doubles:catalog") as worker:
        ctx = evolve(context(worker), store=Store(folder))
        ctx = evolve(ctx, catalog=ctx.catalog.for_one_run(seen.append))
        found = validate.run(lower.run(ordered, ctx), ordered, 60.0, ctx)
    done = [e.record for e in seen if isinstance(e, CandidateFinished) and not e.cached]
    return found, [(r.signature, str(r.step.schedule["behave"])) for r in done]


def test_one_of_them_is_evaluated_and_all_have_the_record(tmp_path: Path) -> None:
    """Also of what fails, and of what fails for a reason of the moment, which the next run tries once more."""
    behaviours = (("honest", 5.0), ("wrong", 3.0), ("raises", 4.0))
    ordered = tuple(planned(signature, suffix, *behaviours) for signature, suffix in (("s1", ""), ("s2", "_7"), ("s3", "_other")))
    found, evaluated = searched(ordered, tmp_path)
    assert sorted(behaviour for _, behaviour in evaluated) == ["honest", "raises", "wrong"]
    by_signature = {s: {r.step.schedule["behave"]: r for r in found.records if r.signature == s and r.step.implementation == FAMILY}
                    for s in ("s1", "s2", "s3")}
    for behaviour, _ in behaviours:
        first, *others = (records[behaviour] for records in by_signature.values())
        assert len({r.key for r in (first, *others)}) == 3
        for other in others:
            assert (other.measurement, other.verdict, other.failure) == (first.measurement, first.verdict, first.failure)
    baselines = {r.signature: r.measurement for r in found.records if r.step.implementation == FRAMEWORK}
    assert len(baselines) == 3 and len(set(baselines.values())) == 1
    for record in found.records:  # each says of whom it is
        nodes = next(one.plan.region for one in ordered if one.signature == record.signature).matches
        assert record.step.match_id in {match.id for match in nodes}
    again, evaluated = searched(ordered, tmp_path)
    assert {behaviour for _, behaviour in evaluated} == {"raises"} and len(evaluated) == 1
    assert {(r.signature, r.step) for r in again.records if r.passed} == {(r.signature, r.step) for r in found.records if r.passed}


def test_a_run_of_one_region_alone_finds_what_its_twin_left(tmp_path: Path) -> None:
    both = tuple(planned(signature, suffix, ("honest", 5.0)) for signature, suffix in (("s1", ""), ("s2", "_7")))
    searched(both, tmp_path)
    for one in both:
        found, evaluated = searched((one,), tmp_path)
        assert not evaluated and [r.signature for r in found.records if r.usable and r.step.implementation == FAMILY] == [one.signature]


def test_where_nothing_is_timed_one_that_passes_settles_its_twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubles.FakeBackend, "clock", False)
    ordered = tuple(planned(signature, suffix, ("honest", 5.0), ("honest", 6.0)) for signature, suffix in (("s1", ""), ("s2", "_7")))
    found, _ = searched(ordered, tmp_path)
    assert {r.signature for r in found.records if r.passed} == {"s1", "s2"}


CHANGES: dict[str, Callable[[Trial], Trial]] = {
    "an attribute": lambda t: evolve(t, match=evolve(t.match, attributes=(*t.match.attributes, ("more", 1)))),
    "a type": lambda t: evolve(t, graph=evolve(t.graph, values=tuple(
        evolve(v, spec=evolve(v.spec, dtype=DType.F16)) for v in t.graph.values))),
    "an operator": lambda t: evolve(t, graph=evolve(t.graph, nodes=tuple(evolve(n, op="aten.mul.Tensor") for n in t.graph.nodes))),
    "what is read": lambda t: evolve(t, graph=evolve(t.graph, nodes=tuple(evolve(n, args=(Ref("a"), Ref("a"))) for n in t.graph.nodes))),
    "which operand is which": lambda t: evolve(t, match=evolve(t.match, operands=tuple(
        evolve(o, values={"in0": ("b",), "in1": ("a",)}.get(o.name, o.values)) for o in t.match.operands))),
    "the source": lambda t: evolve(t, source=doubles.fake_source("honest", 6.0)),
    "its launches": lambda t: evolve(t, source=evolve(t.source, launches=tuple(evolve(x, grid=(7, 1, 1)) for x in t.source.launches))),
    "the target": lambda t: evolve(t, target=PRESETS["h200"]),
    "a case": lambda t: evolve(t, cases=(*t.cases, Case(family=InputFamily.NORMAL, seed=3))),
    "the position of a case": lambda t: evolve(t, cases=tuple(evolve(c, position=5) for c in t.cases)),
}


def twin(trial: Trial, implementation: str = FAMILY) -> str:
    made = step("honest", match_id=trial.match.id)
    candidate = Candidate(signature="s1", step=evolve(made, implementation=implementation), source=trial.source)
    return twin_of(candidate, trial, computation_of(trial.match, trial.graph))


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_in_anything_but_names_and_seeds_is_no_twin(change: str) -> None:
    trial = doubles.fake_trial("honest")
    assert twin(CHANGES[change](trial)) != twin(trial)
    assert twin(trial, "doubles/other") != twin(trial)


@SETTINGS
@given(suffix=st.text("abc_0123456789", min_size=1, max_size=6), seed=st.integers(0, 1 << 20))
def test_names_and_seeds_make_no_difference(suffix: str, seed: int) -> None:
    trial = doubles.fake_trial("honest")
    match, graph = renamed((trial.match, trial.graph), suffix)
    cases = tuple(evolve(case, seed=seed + number, weights_seed=seed) for number, case in enumerate(trial.cases))
    assert twin(evolve(trial, match=match, graph=graph, cases=cases)) == twin(trial)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_layers_that_differ_in_their_window_share_every_other_match(model_type: str) -> None:
    """With the same sources, since what a family makes of a match knows no names."""
    types = ["sliding_attention", "full_attention"]
    graphs = capture_language_model(tiny(model_type, {**WINDOWED, "layer_types": types}), model_type, WORKLOAD)
    ctx = Context(catalog=load_catalog(), target=PRESETS["h200"], config=Config(), store=Store(None))
    one, other = (r for r in analyze.run(graphs, ctx)[0].regions if r.name.startswith("layer"))
    mine, others = ({computation_of(m, r.graph.sub(m.nodes, m.id)): (m, r) for m in r.matches} for r in (one, other))
    alone = {m.kind for form, (m, _) in (*mine.items(), *others.items()) if (form in mine) != (form in others)}
    assert alone == {"attention"} and len(mine.keys() & others.keys()) >= 8
    family = next(f for f in ctx.catalog.template_families.values() if f.name == "gemv")
    served = [(a, b) for form in mine.keys() & others.keys() for a, b in ((mine[form][0], others[form][0]),)
              if a.kind == "linear" and family.accepts(a, ctx.target) is True]
    for a, b in served:
        point = family.space(a, ctx.target).points[0]
        assert family.lower(a, point, ctx.target) == family.lower(b, point, ctx.target)
    assert served
