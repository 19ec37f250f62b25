"""A traced session: which steps note their times, what the time line says of them, and that everything is as before afterwards.

The backend's notes are made up here; that kernels note what they should is the kit's matter, and on a GPU test_device_trace.py's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

import agentcompile_core as ac
from agentcompile_core.configuration import Config
from agentcompile_core.errors import UsageError
from agentcompile_core.ir.candidate import StepSource
from agentcompile_core.plugin.phases import PHASES
from agentcompile_core.report import trace
from agentcompile_core.store import Store

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.backend import EmulationBackend

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
pytestmark = pytest.mark.usefixtures("shared_captures")


@pytest.fixture(scope="module")
def compiled(emulated_tiny: Any) -> Any:
    return emulated_tiny


def notes(number: int, blocks: int) -> tuple[tuple[int, ...], ...]:
    """Of the ``number``-th traced step: released when the one before has ended, two nanoseconds for each block's way to its end."""
    start = 1_000 * number
    return tuple((start, start + 100, 0, 0, 0, start + 600 + 2 * block) for block in range(blocks))


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tags under which sources were asked for, in order."""
    tags: list[str] = []

    def traced(self: Any, source: StepSource, tag: str) -> StepSource:
        tags.append(tag)
        digest = f"{len(tags):016x}"
        return evolve(source, code=source.code.replace(source.digest, digest), digest=digest,
                      headers=tuple((name, text.replace(source.digest, digest)) for name, text in source.headers),
                      launches=tuple(evolve(one, entry=one.entry.replace(source.digest, digest)) for one in source.launches))

    def noted(self: Any, handle: Any, source: StepSource) -> tuple[tuple[tuple[int, ...], ...], ...]:
        grids = (launch.grid for launch in source.launches)
        return tuple(notes(int(source.digest, 16), x * y * z) for x, y, z in grids)

    monkeypatch.setattr("agentcompile_core.runtime.tracing.TIMED", 1)  # emulated steps take a third of a second
    monkeypatch.setattr("agentcompile_core.runtime.tracing.TIMED_RUNS", 2)
    monkeypatch.setattr("agentcompile_core.runtime.tracing.WARM_UPS", 1)
    monkeypatch.setattr(EmulationBackend, "traced", traced)
    monkeypatch.setattr(EmulationBackend, "noted", noted)
    return tags


def test_a_layer_the_step_behind_it_and_what_is_behind_the_layers_are_traced(compiled: Any, tracing: list[str]) -> None:
    ids = torch.tensor([[3, 5, 7, 9]])
    before = compiled.generate(ids, 4, eos_token_id=None)
    states = {name: tensor.clone() for name, tensor in compiled.session.states.items() if not name.startswith("kv.")}
    line = compiled.trace(10, layer=0, repetitions=2)
    for name, tensor in states.items():
        assert torch.equal(compiled.session.states[name], tensor), name
    assert torch.equal(compiled.generate(ids, 4, eos_token_id=None), before)
    program = compiled.session.bound("decode").program
    layers = [program.graph.node_by_name[s.nodes[-1]].layer for s in program.segments if s.source]
    wanted = layers.count(0) + 1 + layers[layers.index(0):].count(-1)
    assert len(tracing) == len(set(tracing)) == wanted and line.layers == len(set(layers) - {-1})
    assert [launch.layer for launch in line.launches] == [*[0] * layers.count(0), 1, *[-1] * (wanted - layers.count(0) - 1)]
    first = line.launches[0]
    assert first.at(PHASES[1]).mean_us == pytest.approx(0.0, abs=1e-3) and first.at("first") is None
    assert line.layer_us == pytest.approx(layers.count(0) * 1.0, abs=1e-3)  # as many steps, a microsecond each
    assert line.clock_ns == 2 and line.losses and "largest losses" in trace.trace_text(line)


def test_bytes_of_attention_grow_with_the_position(compiled: Any, tracing: list[str]) -> None:
    moved = {position: {launch.label: launch.nbytes for launch in compiled.trace(position, layer=0, repetitions=1).launches}
             for position in (10, 20)}
    config = compiled.loaded.module.config
    row = 2 * config.num_key_value_heads * config.head_dim * 4
    grown = {label for label in moved[10] if moved[20][label] != moved[10][label]}
    assert len(grown) == 1 and moved[20][next(iter(grown))] - moved[10][next(iter(grown))] == 10 * row


@pytest.mark.parametrize(("position", "layer", "said"), [
    (0, None, "position 0 cannot be traced; allowed are 1 to 63"), (64, None, "position 64 cannot be traced"),
    (10, 77, "layer 77 has no generated kernels; allowed are 0 to")])
def test_what_is_not_there_is_refused(compiled: Any, tracing: list[str], position: int, layer: int | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        compiled.trace(position, layer=layer)


def test_a_backend_without_traced_kernels_is_said(compiled: Any) -> None:
    with pytest.raises(UsageError, match="the backend emulation traces no kernels"):
        compiled.trace(10)


def test_a_model_without_a_session_of_kernels_is_said() -> None:
    framework = ac.compile(str(TINY), dtype="float32", max_context=64, config=Config(device="cpu", validators=(), origins=()),
                           store=Store(None), run_on="framework")
    with pytest.raises(UsageError, match="nothing to trace"):
        framework.trace(10)


def test_memory_of_the_cache_is_there_for_every_step_that_is_traced(
        compiled: Any, tracing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[int] = []
    monkeypatch.setattr("agentcompile_core.runtime.tracing.hold", lambda kv, positions: needed.append(positions))
    ran: list[int] = []
    time_from_host = EmulationBackend.time_from_host

    def timed(self: Any, run: Any, **named: Any) -> Any:
        found = time_from_host(self, run, **named)
        ran.append(int(compiled.session.position))
        return found

    monkeypatch.setattr(EmulationBackend, "time_from_host", timed)
    compiled.trace(10, layer=0, repetitions=1)
    assert ran and max(ran) <= needed[0] and len(needed) == 1
