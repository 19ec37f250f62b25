"""The last choice for a plain module: whole calls, launch by launch, replayed, or by its own forward; and what each of them must keep."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from module_ways import WAYS, put, recording
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import agentcompile_core as ac
from agentcompile_core.api import CompiledModel, whole_calls
from agentcompile_core.configuration import Config
from agentcompile_core.configuration.values import ORIGINS
from agentcompile_core.errors import Reject, UsageError
from agentcompile_core.installation import program_check
from agentcompile_core.ir.baseline import FRAMEWORK
from agentcompile_core.runtime import calls
from agentcompile_core.store import Store

X = torch.arange(8.0).view(2, 4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: Tensor, power: int = 2) -> tuple[Tensor, Tensor]:
        return (x * self.scale) ** power, x


def compiled(module: nn.Module, **options: Any) -> CompiledModel:
    made = ac.compile(module.eval(), example_inputs=(X.clone(),), device="cpu", store=Store(None), **options)
    assert type(made.session).__name__ == "ModuleSession", made.notes
    return made


@pytest.fixture(scope="module")
def scaled() -> CompiledModel:
    return compiled(Scaled())


def pretend(patch: pytest.MonkeyPatch, us: Mapping[str, float], *, broken: bool = False) -> None:
    """A device, and a clock that finds each way to take so many microseconds; it runs the call once."""
    def found(call: Any) -> float:
        call()
        return us[way_of(call.func)]

    def capture(run: Any, owner: Any, **options: Any) -> Any:
        return recording(owner, broken=broken)(run, **options)

    patch.setattr(whole_calls, "_median_us", found)
    patch.setattr(whole_calls, "install", SimpleNamespace(capturing=lambda device, ctx: SimpleNamespace(capture=capture)))


def way_of(session: Any) -> str:
    return "by itself" if session.runs_itself else "replayed" if session._captured is not None else "launched"


def settled(made: CompiledModel, run_on: str = "auto") -> tuple[str, ...]:
    return whole_calls.settle(made.session, made.loaded, run_on, made.context)


@given(us=st.fixed_dictionaries({way: st.floats(1.0, 100.0) for way in WAYS}))
def test_what_is_taken_is_faster_by_the_margin(scaled: CompiledModel, us: dict[str, float]) -> None:
    put(scaled.session, scaled.loaded.module, "launched")
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, us)
        notes = settled(scaled)
    way = way_of(scaled.session)
    assert us[way] == min(us.values()) or min(us.values()) * 1.01**2 >= us[way]
    assert way == "launched" or us[way] * 1.01 < us["launched"]
    assert (notes == ()) == (way == "launched")
    assert all(torch.equal(a, b) for a, b in zip(scaled(X), Scaled()(X), strict=True))


def test_replayed_calls_that_are_wrong_are_not_taken(scaled: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"launched": 9.0, "replayed": 1.0, "by itself": 99.0}, broken=True)
    assert settled(scaled) == () and torch.equal(scaled(X)[0], (X * 3) ** 2)


def test_where_something_was_asked_for_nothing_is_chosen(scaled: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled(Scaled(), origins=tuple(origin for origin in ORIGINS if origin != FRAMEWORK))
    pretend(monkeypatch, {"launched": 9.0, "replayed": 8.0, "by itself": 1.0})
    put(scaled.session, scaled.loaded.module, "launched")
    assert settled(scaled, "framework") == () and way_of(scaled.session) == "launched"
    assert "replay" in settled(made)[0] and way_of(made.session) == "replayed"


def test_a_forward_that_leaves_something_behind_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture refuses such modules where it sees it; here it begins afterwards."""
    module = Scaled()
    made = compiled(module)
    module.__dict__["count"] = 0

    def counting(self: Scaled, x: Tensor, power: int = 2) -> tuple[Tensor, Tensor]:
        self.__dict__["count"] += 1
        return (x * self.scale) ** power, x

    monkeypatch.setattr(Scaled, "forward", counting)
    made.session.weights.settle(with_mode=True)
    pretend(monkeypatch, {"launched": 9.0, "replayed": 8.0, "by itself": 1.0})
    clock = whole_calls._median_us
    monkeypatch.setattr(whole_calls, "_median_us", lambda call: (call(), clock(call))[1])  # the second call sees what the first has left
    settled(made)
    assert not made.session.runs_itself and module.__dict__["count"] == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_sibling_runs_calls_as_the_first_one_and_times_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, module = compiled(Scaled()), Scaled().eval()
    pretend(monkeypatch, {**dict.fromkeys(WAYS, 9.0), way: 1.0})
    settled(made)
    assert way_of(made.session) == way
    module.scale.data.fill_(5.0)
    monkeypatch.setattr(whole_calls, "_median_us", lambda call: pytest.fail("it is timed"))
    other = made.sibling(module)
    assert way_of(other.session) == way and any("equal module" in note for note in other.notes) is (way != "launched")
    assert torch.equal(other(X)[0], (X * 5) ** 2) and torch.equal(made(X)[0], (X * 3) ** 2)


def test_a_sibling_whose_replayed_calls_are_wrong_launches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled(Scaled())
    pretend(monkeypatch, {"launched": 9.0, "replayed": 1.0, "by itself": 9.0})
    settled(made)
    pretend(monkeypatch, {}, broken=True)
    other = made.sibling(Scaled().eval())
    assert way_of(other.session) == "launched" and torch.equal(other(X)[0], (X * 3) ** 2)


def test_a_module_by_itself_keeps_the_promises_of_a_session() -> None:
    made = compiled(Scaled())
    put(made.session, made.loaded.module, "by itself")
    results = made(X)
    assert results[1].data_ptr() != X.data_ptr() and torch.equal(results[1], X)
    assert torch.equal(made(X, 2)[0], results[0]) and not results[0].requires_grad
    assert torch.equal(made(X.t().contiguous().t())[0], results[0])  # by the program, which copies it first
    with pytest.raises(UsageError, match="compile again for other shapes"):
        made(X[:1])
    with pytest.raises(UsageError, match="the module was compiled for 2"):
        made(X, 3)
    made.loaded.module.scale = nn.Parameter(torch.ones(4))
    with pytest.raises(UsageError, match="scale was replaced"):
        made(X)


def test_a_replay_that_leaves_out_something_is_seen() -> None:
    made = compiled(Scaled())
    session: Any = made.session
    session.replay(recording(session, broken=True))
    assert program_check.difference(session, {"forward": session.program}, session.weights, made.loaded)
    session.replay(recording(session))
    assert not program_check.difference(session, {"forward": session.program}, session.weights, made.loaded)


def test_large_operands_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled(Scaled())
    monkeypatch.setattr("agentcompile_core.runtime.captured_calls.MOST_BYTES", 2 * X.nbytes - 1)
    answer = made.session.replay(recording(made.session))
    assert isinstance(answer, Reject) and "at most" in answer.reason and torch.equal(made(X)[1], X)


class Late(nn.Module):
    """A framework operator whose result a kernel reads."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.sort(x, -1).values * 2.0, -1)


class Copies(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in ("copy_", "clone"), "what the framework makes is read where it is"
        return func(*args, **(kwargs or {}))


def test_kernels_read_what_the_framework_made_where_it_is(tmp_path: Path) -> None:
    x = torch.randn(6, 32)
    made = ac.compile(Late(), example_inputs=(x,), run_on="emulation", config=Config(device="cpu", budget_s=60.0, budget_plans=2),
                      store=Store(tmp_path))
    origins = [bool(s.source) for s in made.session.program.segments]
    assert True in origins and False in origins, made.notes
    with Copies():
        found = [made(tensor) for tensor in (x, x + 1.0, x)]
    assert torch.equal(found[0], found[2]) and torch.allclose(found[0], Late()(x), atol=1e-6)


def test_defaults_that_change_are_seen() -> None:
    """Signatures are looked at once per function, and again where its defaults are others."""
    def forward(self: Any, x: Tensor, power: int = 2) -> Tensor:
        return x**power

    kind = type("Changing", (nn.Module,), {"forward": forward})
    module = kind()
    assert calls.canonical(module, (X,), {}) == ((X, 2), {})
    forward.__defaults__ = (3,)
    assert calls.canonical(module, (X,), {}) == ((X, 3), {})
    module.forward = lambda x, *, other=5: x
    assert calls.canonical(module, (X,), {}) == ((X,), {"other": 5})


@pytest.mark.parametrize("way", WAYS)
def test_an_input_without_numbers_gets_one_sentence(scaled: CompiledModel, way: str) -> None:
    put(scaled.session, scaled.loaded.module, way)
    with pytest.raises(UsageError, match="cannot be copied"):
        scaled(torch.empty(X.shape, device="meta"))
