"""What a backend brings for prompts (libraries of attention, kernels of rows) is compared with the framework's before it serves."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_library import over_all
from attrs import asdict
from chaotic_check import chaotic
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_devices import Placing
from test_live_prefill import LARGE, SMALL, WAYS, captured, check
from torch import Tensor

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import Cause, StageName
from agentcompile_core.installation import install, runtimes
from agentcompile_core.installation.program_check import difference_of_prompts
from agentcompile_core.ops import live_attention
from agentcompile_core.plugin_api import Heads, Scoring
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories in several parts at these sizes too."""
    monkeypatch.setattr(live_attention, "LARGE", LARGE)


def found(name: str, executables: Executables, notes: list[str] | None = None) -> str:
    model, graphs = captured(name)
    assert graphs.kv is not None
    programs, weights = {g.name: framework_program(g) for g in graphs.graphs}, WeightStore(model, "cpu")
    mine = Session(graphs, programs, weights, executables, kv_state=PlainKVCache().allocate(graphs.kv, "cpu"), decode=PythonLoop())
    mine.prepare()
    return difference_of_prompts(mine, programs, weights, notes)


@pytest.mark.parametrize("way", ["captured", "library", "placing", "over_all", "capacity"])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_what_is_right_is_found_right(name: str, way: str) -> None:
    assert found(name, WAYS[way]()) == ""


@pytest.mark.parametrize("way", ["captured", "library", "placing", "over_all"])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_what_is_right_piece_by_piece_serves_though_the_whole_is_far_off(name: str, way: str) -> None:
    notes: list[str] = []
    with chaotic():
        assert found(name, WAYS[way](), notes) == ""
    assert len(notes) == 1 and "was compared piece by piece: as a whole its rms error is 0.4" in notes[0]


@pytest.mark.parametrize(("name", "apart"), [("qwen3", False), ("qwen3", True), ("mistral", False)])
def test_what_is_compared_with_attends_at_any_length(name: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And our own chunks, which serve elsewhere, do not; but for what nothing of the backend serves."""
    opened, blocks, seen = list[bool](), live_attention._by_blocks, list[bool]()
    replays: list[bool] = []

    class Noting(Placing):
        @contextmanager
        def any_length(self) -> Iterator[None]:
            opened.append(True)
            yield
            opened.pop()

        def attend(self, *arguments: Any, **more: Any) -> Any:
            replays.append(bool(opened))
            return super().attend(*arguments, **more)

    monkeypatch.setattr(live_attention, "_by_blocks", lambda *given: (seen.append(bool(opened)), blocks(*given)))
    with chaotic() if apart else nullcontext():
        assert found(name, Executables(device="cpu", backend=Noting())) == ""
    assert len(seen) > 4 and all(seen) and not opened
    assert any(replays) is apart and not all(replays)


class Wrong(Placing):
    """Places all heads but one row of one of them (``lost``: head, row), or attends times ``factor``, or not to the last row; over all keys
    at once (``whole``), or over parts of them."""

    def __init__(self, lost: tuple[int, int] | None = None, factor: float = 1.0, short: bool = False, whole: bool = False) -> None:
        super().__init__()
        self._lost, self._factor, self._short, self._whole = lost, factor, short, whole

    def place(self, heads: Sequence[Heads]) -> bool:
        before = [one.out.clone() for one in heads]
        placed = super().place(heads)
        if self._lost is not None:
            index, row = self._lost[0] % len(heads), self._lost[1]
            one, start = heads[index], 0 if heads[index].at is None else int(heads[index].at)  # type: ignore[arg-type]
            at = start + row % one.rows.shape[2]
            one.out[:, :, at].copy_(before[index][:, :, at])
        return placed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
        if self._short and not causal and k.shape[2] > 1:
            k, v = k[:, :, :-1], v[:, :, :-1]
        served = super().attend(q, k, v, causal=causal, scale=scale)
        return None if served is None else (served[0] * self._factor, served[1])

    def attend_cached(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, scale: float,
                      scoring: Scoring | None = None) -> bool:
        if not self._whole:
            return False
        if self._short and k.shape[2] > q.shape[2]:
            k, v = k[:, :, 1:], v[:, :, 1:]
        served = over_all(q, k, v, out, scale=scale, **(asdict(scoring, recurse=False) if scoring else {}))
        out.mul_(self._factor)
        return served


@settings(max_examples=24, deadline=None)
@given(st.one_of(st.tuples(st.integers(0, 5), st.integers(0, SMALL - 1)).map(lambda lost: {"lost": lost}),
                 st.floats(0.5, 0.99).map(lambda factor: {"factor": factor}), st.just({"short": True})), st.booleans())
def test_what_is_wrong_in_any_row_is_seen(defect: dict[str, Any], whole: bool) -> None:
    executables = Executables(device="cpu", backend=Wrong(**defect, whole=whole))
    assert "(prefill_" in found("qwen3", executables), defect
    with chaotic():
        why = found("qwen3", executables)
    assert "(prefill_" in why and ("short" in defect or ";" in why), defect  # a history that is short is seen behind another chunk alone


def no_memory(heads: Sequence[Heads]) -> bool:
    raise torch.OutOfMemoryError("40 GiB")


def test_a_model_whose_backend_reads_prompts_wrongly_reads_them_by_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    model, graphs = captured("qwen3")
    programs = {g.name: framework_program(g) for g in graphs.graphs}
    monkeypatch.setattr(runtimes, "_kv_runtime", lambda ctx, notes: PlainKVCache())
    monkeypatch.setattr(runtimes, "decode_runtime", lambda ctx, executables, notes: PythonLoop())
    failures: list[Any] = []
    ctx: Context = SimpleNamespace(fail=failures.append, emit=lambda event: None, config=Config())  # type: ignore[assignment]

    def installed(backend: Placing) -> tuple[Session, list[str]]:
        notes: list[str] = []
        session, wrong = install._checked(SimpleNamespace(name="tiny"), graphs, programs, WeightStore(model, "cpu"),  # type: ignore[arg-type]
                                          Executables(device="cpu", backend=backend), ctx, notes)
        assert isinstance(session, Session) and wrong == ""
        return session, notes

    raising, short = Wrong(), Wrong()
    monkeypatch.setattr(raising, "place", lambda heads: torch.zeros(-1))
    monkeypatch.setattr(short, "place", no_memory)
    for backend, seen in ((Wrong(factor=0.9), "rms"), (raising, "raised RuntimeError")):
        failures.clear()
        session, notes = installed(backend)
        (failure,) = failures
        assert failure.stage is StageName.INSTALL and failure.cause is Cause.TOLERANCE and seen in failure.message
        (note,) = (n for n in notes if "whole cache by the framework" in n)
        assert seen in note
        for length in (1, SMALL, LARGE + 1, 3 * LARGE):
            check("qwen3", session, length)
    failures.clear()
    session, notes = installed(Placing())
    assert not failures and session._live is not None and not notes
    session, notes = installed(short)
    assert not failures and session._live is not None and any("for lack of memory" in note for note in notes)
