"""Hostile kernels as real CUDA text, run by the emulator under a clock that says what it is told: each is refused for its reason."""

import hostile_kernels as hostile
import pytest
from agentcompile_cuda_kit.targets import preset
from agentcompile_validator_emulation.backend import EmulationBackend

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import Origin, Schedule, Step
from agentcompile_core.worker.evaluate import WorkerState
from agentcompile_core.worker.protocol import Evaluation, Job

WORKS = 40  # launches of the one that stops
CHEATS = ("stops working", "returns when out is filled")  # results kept by address may show in the many runs of a validator


class Clocked(EmulationBackend):
    """The emulator with a clock of its own, and as many runs as make a kernel stop that works forty times."""

    name = "clocked"
    clock = True

    def time(self, run, *, repetitions: int, runs_per_repetition: int) -> tuple[float, ...]:  # type: ignore[no-untyped-def]
        for _ in range(2 * runs_per_repetition):
            run(0)
        return (1.0,) * repetitions


@pytest.fixture(scope="module")
def session() -> WorkerState:
    catalog = load_catalog(only=("transformers_rules", "numerics"))
    catalog.offers["agentcompile_backends"]["test/clocked"] = Clocked()
    return WorkerState(catalog)


def evaluated(session: WorkerState, name: str) -> Evaluation:
    step = Step(match_id="linear", implementation=hostile.FAMILY, origin=Origin.GENERATED, schedule=Schedule({"kernel": name}))
    job = Job(trial=hostile.trial(name, preset("h200"), stop=WORKS), step=step, backend="clocked", validators=("numerics",))
    return session.evaluate(job, session.build(job), lambda phase: None)


def test_the_honest_kernel_passes(session: WorkerState) -> None:
    found = evaluated(session, "honest")
    assert found.failure is None and found.measurement is not None, found.message


@pytest.mark.parametrize("name", [name for name, one in hostile.HOSTILE.items() if one.emulated])
def test_a_hostile_kernel_is_refused_for_its_reason(session: WorkerState, name: str) -> None:
    found, expected = evaluated(session, name), hostile.HOSTILE[name]
    assert found.failure in expected.causes and expected.message in found.message, (found.failure, found.message)
    assert found.measurement is None
    if name in CHEATS:
        assert found.verdicts[0].passed, "the validator alone does not see it"
