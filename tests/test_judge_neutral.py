"""The chain's judge asks its backend for everything: captures, waiting and time; what it judges is captured as it will run."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from select_cases import FAMILY, MATCH, region, step

from agentcompile_core.errors import Reject
from agentcompile_core.ir import serial
from agentcompile_core.ir.graph import Graph
from agentcompile_core.ir.plan import Cover, Fusion
from agentcompile_core.ir.region import Instance, Region
from agentcompile_core.ir.selection import Basis, SelectedStep, Selection
from agentcompile_core.testing import doubles
from agentcompile_core.testing.targets import FAKE
from agentcompile_core.worker import judge
from agentcompile_core.worker.captured import NotCapturable
from agentcompile_core.worker.chain_question import Alternative, ChainAnswer, ChainQuestion


class Device(doubles.ReplayingBackend):
    """A device that captures, with the clock of the doubles: what the last kernel says, or the framework's time."""

    lost = False

    def time_from_host(self, run: Callable[[int], None], *, repetitions: int, runs_per_repetition: int) -> tuple[float, ...]:
        return tuple(self.time(run, repetitions=repetitions, runs_per_repetition=runs_per_repetition))

    def is_lost(self) -> bool:
        return self.lost


def one_region() -> Region:
    found = region()
    return evolve(found, instances=(Instance(nodes=(("add", "add"),), values=tuple((v.name, v.name) for v in found.graph.values)),))


def chosen(behaviour: str, us: float) -> SelectedStep:
    return SelectedStep(step=step(behaviour, us), label="addition", nodes=("add",), source=doubles.fake_source(behaviour, us),
                        version=1, basis=Basis.CHAIN)


def question(*others: SelectedStep | None, first: SelectedStep) -> ChainQuestion:
    cover = Cover(matches=(MATCH,), fusion=Fusion.FULL, rank=0)
    selection = Selection(signature="s1", region="addition", cover=cover, steps=(first,), basis=Basis.MEASURED)
    graph: Graph = one_region().graph
    alternatives = tuple(Alternative(signature="s1", match_id=MATCH, selected=other) for other in others)
    return ChainQuestion(graph=graph, regions=(one_region(),), selections=(selection,), alternatives=alternatives, target=FAKE,
                               backend="fake", position=8, margin=0.005, budget_s=60.0)


def judged(asked: ChainQuestion, backend: Device) -> ChainAnswer:
    state: Any = SimpleNamespace(catalog=doubles.catalog(), backend=lambda name: backend)
    return serial.loads(serial.dumps(judge.judge(serial.parse(serial.dumps(asked)), state, lambda phase: None)), ChainAnswer)


def test_the_best_of_what_can_be_built_and_captured_wins_on_any_device() -> None:
    backend = Device()
    asked = question(chosen("no_build", 1.0), chosen("honest", 3.0), chosen("raises", 0.5), None, first=chosen("honest", 8.0))
    answer = judged(asked, backend)
    assert [s.step for s in answer.selections[0].steps] == [step("honest", 3.0)] and FAMILY in str(answer.selections[0].steps[0].step)
    assert answer.first_us == pytest.approx(8.0, rel=0.01) and answer.us == pytest.approx(3.0, rel=0.01)
    assert answer.framework_us == pytest.approx(doubles.FRAMEWORK_US, rel=0.01) and answer.accepted == 1
    assert len(set(map(id, backend.owners))) == len(backend.owners) > 2, "each variant owns its capture, and nothing else does"


def test_what_cannot_be_captured_is_no_answer_and_no_bar() -> None:
    with pytest.raises(NotCapturable, match="it asks the host"):
        judged(question(first=chosen("honest", 8.0)), Device("it asks the host"))

    class OnlyKernels(Device):
        def capture(self, run: Callable[[], None], **options: Any) -> Any:
            self._us = None
            replay = super().capture(run, **options)
            return replay if self._us is not None else Reject("the framework asks the host")

    answer = judged(question(first=chosen("honest", 8.0)), OnlyKernels())
    assert answer.framework_us == 0.0 and answer.us == pytest.approx(8.0, rel=0.01)


def test_a_device_that_was_lost_ends_the_worker_and_is_no_answer() -> None:
    backend = Device()
    backend.lost = True
    with pytest.raises(RuntimeError, match="told to fail"):
        judged(question(chosen("raises", 0.5), first=chosen("honest", 8.0)), backend)
