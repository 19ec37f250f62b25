"""The chain's judge takes no step with which the whole step stops doing its work, however fast it is, and finds out which one it is."""

import statistics
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import PRESETS
from attrs import evolve
from select_cases import FAMILY, MATCH, context, step

from agentcompile_core.errors import Cause
from agentcompile_core.ir.decisions import CHAIN_MARGIN
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.plan import Cover, Fusion
from agentcompile_core.ir.region import Instance, Region
from agentcompile_core.ir.selection import Basis, SelectedStep, Selection
from agentcompile_core.stages.select import chain
from agentcompile_core.testing import doubles
from agentcompile_core.worker import captured, judge
from agentcompile_core.worker.chain_question import Alternative, ChainAnswer, ChainQuestion


class Eager(captured.Variant):
    """A variant without a device: runs step by step, and takes as long as its kernels say that they do."""

    def __init__(self, bound: Any, states: Any, backend: Any) -> None:
        super().__init__(bound, states)
        self.run_first()

    def replay(self) -> None:
        self._bound.run()

    def settle(self) -> None:
        pass

    def sample_us(self) -> float:
        for _ in range(captured.MOST_REPLAYS):
            self.replay()
        us = [float(x.schedule["us"]) for s in self._bound.program.segments if (x := s.step) is not None]
        return sum(us) if us else doubles.FRAMEWORK_US


def selected(behaviour: str, us: float) -> SelectedStep:
    return SelectedStep(step=step(behaviour, us), label="elementwise", nodes=("add",), source=doubles.fake_source(behaviour, us),
                        basis=Basis.MEASURED)


def answered(monkeypatch: pytest.MonkeyPatch, first: SelectedStep, *others: SelectedStep) -> ChainAnswer:
    """What the judge says of an addition that ``first`` does, with ``others`` as alternatives."""
    monkeypatch.setattr(judge, "CapturedVariant", Eager)
    match, graph = doubles.fake_match()
    region = Region(name="addition", signature="s1", graph=graph, matches=(match,), instances=(
        Instance(nodes=(("add", "add"),), values=tuple((v.name, v.name) for v in graph.values)),))
    selection = Selection(signature="s1", region="addition", cover=Cover(matches=(MATCH,), fusion=Fusion.FULL, rank=0), steps=(first,))
    question = ChainQuestion(
        graph=graph, regions=(region,), selections=(selection,), target=PRESETS["h200"], backend="fake", position=0,
        margin=CHAIN_MARGIN * 0.01, budget_s=60.0,
        alternatives=tuple(Alternative(signature="s1", match_id=MATCH, selected=s) for s in others))
    ctx = context()
    return judge.Judge(question, ctx.backend, ctx.catalog, lambda phase: None).sweep()


def steps(answer: ChainAnswer) -> list[Any]:
    return [x.step for s in answer.selections for x in s.steps]


def test_a_faster_kernel_that_stops_working_is_no_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, stops, fast = selected("honest", 5.0), selected("stops", 1.0), selected("honest", 3.0)
    found = answered(monkeypatch, honest, stops, fast)
    assert steps(found) == [fast.step] and found.us == statistics.median([3.0])
    assert [(match, what) for _, match, what, _ in found.refused] == [(MATCH, str(stops.step))] * len(found.refused) and found.refused
    assert "after it was timed inside the captured chain, its result has NaN or infinities elsewhere" in found.refused[0][3]


@pytest.mark.parametrize("behaviour", ["stops", "lies"])
def test_a_step_that_the_chain_starts_with_is_taken_out(behaviour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = answered(monkeypatch, selected(behaviour, 1.0))
    assert steps(found) == [] and found.us == doubles.FRAMEWORK_US
    assert [r[:3] for r in found.refused] == [("s1", MATCH, str(step(behaviour, 1.0)))]


def test_honest_steps_are_refused_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answered(monkeypatch, selected("honest", 5.0), selected("honest", 3.0))
    assert found.refused == () and found.accepted == 1 and steps(found) == [step("honest", 3.0)]


def test_what_was_refused_is_told_and_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = selected("stops", 1.0)
    answer = answered(monkeypatch, stops)
    ctx = evolve(context())
    _, graph = doubles.fake_match()
    old = (Selection(signature="s1", region="addition", cover=Cover(matches=(MATCH,), fusion=Fusion.FULL, rank=0), steps=(stops,)),)
    monkeypatch.setattr(chain, "_stored", lambda question, found, ctx: answer)
    (new,), _ = chain.run(graph, (), old, Evaluated(), ctx)
    assert new.basis is Basis.FALLBACK and "its result has NaN" in dict(new.fallback_reasons)[MATCH]
    (failure,) = ctx.failures
    assert (failure.cause, failure.plugin, failure.subject) == (Cause.TOLERANCE, FAMILY, str(stops.step))


def test_variants_are_timed_where_the_judge_says_and_made_again_there() -> None:
    position, rows = torch.tensor([5]), torch.ones(4)
    states = captured.States({captured.POSITION: position, "kv.key.0": rows}, 3)
    states.stand_at(2)
    position.fill_(9)
    states.reset()
    assert int(position) == 2
    rows.zero_()
    states.as_made()
    assert int(position) == 2 and bool((rows == 1).all())
