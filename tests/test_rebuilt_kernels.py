"""A kernel of a bundle that is made again here is judged as a candidate is, on the nodes that it would replace, before it runs."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from faults import cheap
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core import pipeline
from agentcompile_core.installation import trust
from agentcompile_core.installation.claims import claims_of
from agentcompile_core.ir.graph import ValueKind
from agentcompile_core.ir.plan import Schedule
from agentcompile_core.ir.verdict import Rejudged
from agentcompile_core.plugin.events import SearchStarted, StageFinished
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.stages import emit
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles

A, B = torch.randn(100), torch.randn(100)
MADE_AGAIN, NOT_VALIDATED = "and validated here", "made again here and not validated"


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """An honest compile of somebody else: what was compiled, its model and its store."""
    folder = tmp_path_factory.mktemp("author")
    model = cheap.module(folder)
    return cheap.compiled(model, Store(folder / "store"), workers=cheap.HERE), model, folder / "store"


def with_behaviour(made: Any, behaviour: str, folder: Path, us: float = 5.0) -> Path:
    """The bundle with another schedule of the same family in the place of the honest one, everything in it made to agree."""
    compilation = made.compilation
    (name, program), = compilation.programs.items()
    source = doubles.fake_source(behaviour, us)

    def changed(segment: Any) -> Any:
        step = evolve(segment.step, schedule=Schedule({"behave": behaviour, "us": us}))
        return evolve(segment, step=step, source=source.key)

    programs = {name: evolve(program, sources=(source,), segments=tuple(changed(s) if s.step else s for s in program.segments))}
    kernel = doubles.FakeBackend().build(source, made.context.target)
    emit.write(pipeline.emitted(evolve(compilation, programs=programs, kernels={source.digest: kernel}), made.context), folder)
    return folder


def steps(model: Any) -> int:
    return sum(1 for s in model.session.program.segments if s.step)


def test_it_is_validated_once_per_user(author: tuple[Any, Path, Path], judged: list[Any], tmp_path: Path) -> None:
    made, model, _ = author
    bundle, seen = made.save(tmp_path / "b"), []
    for expected in (1, 1):
        found = cheap.loaded(bundle, model, Store(tmp_path / "mine"), workers=cheap.HERE, report=seen.append)
        assert steps(found) == 1 and torch.equal(found(A, B), A + B) and MADE_AGAIN in found.notes[0]
        assert len(judged) == expected, "what the store holds a passing record for is not validated again"
    assert judged[0].time and judged[0].validators == ("simple",) and len(judged[0].trial.cases) > 10
    assert [(e.total, e.cached) for e in seen if isinstance(e, SearchStarted)] == [(1, 0), (1, 1)]
    assert [dict(e.facts) for e in seen if isinstance(e, StageFinished) and e.stage == "validate"] == [{"records": 1, "passed": 1}] * 2


def test_the_evidence_of_an_own_compile_counts(author: tuple[Any, Path, Path], judged: list[Any], tmp_path: Path) -> None:
    """The same trial under the same names: a user who has validated this kernel, and not built this binary, does not do it again."""
    made, model, store = author
    shutil.copytree(store, tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine" / "v1" / "known")
    found = cheap.loaded(made.save(tmp_path / "b"), model, Store(tmp_path / "mine"), workers=cheap.HERE)
    assert steps(found) == 1 and MADE_AGAIN in found.notes[0] and judged == []


@pytest.mark.parametrize("behaviour", ["outside", "lies", "lazy", "caches"])
def test_what_does_not_pass_never_runs(author: tuple[Any, Path, Path], tmp_path: Path, behaviour: str) -> None:
    """They are right the first time, which is all that the look at an installed program sees. More of them: tests/faults/bundles.py."""
    made, model, _ = author
    bundle = with_behaviour(made, behaviour, tmp_path / "b")
    found = cheap.loaded(bundle, model, Store(None), workers=cheap.HERE, family=cheap.Family("honest", behaviour))
    assert steps(found) == 0
    (note,) = found.notes
    assert NOT_VALIDATED in note and f"behave={behaviour}" in note and "\n" not in note
    assert all(torch.equal(found(A, B), A + B) for _ in range(20))


def test_without_time_for_it_it_does_not_run(author: tuple[Any, Path, Path], judged: list[Any], tmp_path: Path) -> None:
    made, model, _ = author
    found = cheap.loaded(made.save(tmp_path / "b"), model, Store(None), workers=cheap.HERE, budget_s=1e-6)
    assert steps(found) == 0 and judged == [] and torch.equal(found(A, B), A + B)
    assert NOT_VALIDATED in found.notes[0] and "within the budget of 1e-06 s (budget_s)" in found.notes[0]


def test_a_validator_of_winners_that_is_configured_is_asked_too(author: tuple[Any, Path, Path], tmp_path: Path) -> None:
    made, model, _ = author
    for refuses in (False, True):
        validator = doubles.PickyValidator()
        plugin = ("picky", cheap.offers(validators=validator))
        if refuses:
            bundle = with_behaviour(made, "honest", tmp_path / "fast", us=3.0)
        else:
            bundle = made.save(tmp_path / "b")
        found = cheap.loaded(bundle, model, Store(None), workers=cheap.HERE, extra=(plugin,), validators=("simple", "picky"))
        assert steps(found) == (not refuses) and ("a race that only this validator sees" in found.notes[0]) == refuses


# ---- what a step claims to compute


@pytest.fixture(scope="module")
def decode(tiny_bundle: Path) -> tuple[Any, Any]:
    """The tiny model's decode program, and its target."""
    installed = bundle_reader.read(tiny_bundle)
    return installed.programs["decode"], installed.manifest.target


def claims(program: Any, target: Any) -> Any:
    return claims_of({"decode": program}, {s.key for s in program.sources}, target)


def test_equal_layers_are_one_claim_under_the_names_of_their_region(decode: tuple[Any, Any]) -> None:
    program, target = decode
    found = claims(program, target)
    launched = [s for s in program.segments if s.source]
    assert len(found) == len({(s.source, s.match.id) for s in launched}) < len(launched)
    assert sorted(place for claim in found for place in claim.places) == sorted(("decode", s.nodes) for s in launched)
    for claim in found:
        trial = claim.trial
        assert [n.name for n in trial.graph.nodes] and {n.name for n in trial.graph.nodes} == set(trial.match.nodes)
        outputs = {v for o in trial.match.operands if o.role.value == "output" for v in o.values}
        assert set(trial.graph.outputs) == outputs
        assert trial.graph == program.graph.sub(trial.match.nodes, trial.match.id, trial.graph.outputs), "the names of the first instance"


@settings(max_examples=10)
@given(data=st.data())
def test_a_step_that_is_moved_or_turned_is_a_claim_of_its_own(decode: tuple[Any, Any], data: st.DataObject) -> None:
    """Whatever one instance says of itself that the others do not, it is judged on its own nodes, and only it."""
    program, target = decode
    launched = [i for i, s in enumerate(program.segments) if s.source]
    before = claims(program, target)
    index = data.draw(st.sampled_from(launched), label="segment")
    segment = program.segments[index]
    what = data.draw(st.sampled_from(["operands", "schedule", "attribute", "operator"]), label="what")
    graph = program.graph
    if what == "operands":
        reads = [i for i, (name, values) in enumerate(segment.operands) if graph.kind_of(values[0]) is not ValueKind.STATE]
        one, other = data.draw(st.lists(st.sampled_from(reads), min_size=2, max_size=2, unique=True))
        operands = list(segment.operands)
        operands[one], operands[other] = (operands[one][0], operands[other][1]), (operands[other][0], operands[one][1])
        segment = evolve(segment, operands=tuple(operands))
    elif what == "schedule":
        segment = evolve(segment, step=evolve(segment.step, schedule=Schedule({"other": 1})))
    elif what == "attribute":
        segment = evolve(segment, match=evolve(segment.match, attributes=(*segment.match.attributes, ("other", 1))))
    else:
        name = data.draw(st.sampled_from(segment.nodes), label="node")
        graph = evolve(graph, nodes=tuple(evolve(n, op="aten.neg.default") if n.name == name else n for n in graph.nodes))
    changed = evolve(program, graph=graph, segments=(*program.segments[:index], segment, *program.segments[index + 1:]))
    after = claims(changed, target)
    place = ("decode", segment.nodes)
    alone = next(c for c in after if place in c.places)
    assert alone.places == (place,)
    shared = len(next(c for c in before if place in c.places).places) > 1
    assert len(after) == len(before) + shared


def test_only_the_segments_that_failed_go_to_the_framework(decode: tuple[Any, Any]) -> None:
    """Of instances that claim different things, those that pass keep their kernel."""
    from test_hostile_kernels import Emulation, context

    program, target = decode
    several = next(c for c in claims(program, target) if len(c.places) > 1)
    index = next(i for i, s in enumerate(program.segments) if ("decode", s.nodes) == several.places[-1])
    segment = program.segments[index]
    odd = evolve(segment, match=evolve(segment.match, attributes=(*segment.match.attributes, ("other", 1))))
    changed = evolve(program, segments=(*program.segments[:index], odd, *program.segments[index + 1:]))

    def judge(asked: Any, backend: Any, ctx: Any) -> Any:
        return [Rejudged(why="it {is} off" if trial.match.attribute("other", 0) else "") for _, trial in asked]

    found = trust.decide({"decode": changed}, {}, trust.Foreign(target=target, judge=judge), Emulation(), context(target))
    left = {s.nodes for s in found.programs["decode"].segments if s.source}
    assert left == {s.nodes for s in changed.segments if s.source} - {segment.nodes}
    assert [n for n in found.notes if NOT_VALIDATED in n] == [f"1 kernel of the bundle {NOT_VALIDATED}: the framework's operators run "
                                                              "instead (it {is} off)"]
