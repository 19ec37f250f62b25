"""A backend is asked for its compiler beside loading, but not beside a file of the user's; one that cannot say what it is is left out."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from agentcompile_core import api
from agentcompile_core.api import setting_up
from agentcompile_core.api.setting_up import compiler_asked
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.store import Store

FRONTENDS = {frontend.name: frontend for frontend in load_catalog(only=()).frontends.values()}


def backend(answer: Callable[[], Any]) -> Any:
    return SimpleNamespace(compiler=answer)


def raising(exc: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        raise exc

    return answer


@pytest.mark.parametrize("name", sorted(FRONTENDS))
def test_it_is_asked_on_a_thread_beside_what_runs_no_file_of_the_users(name: str) -> None:
    asked, loaded = list[threading.Thread](), threading.Event()

    def answer() -> str:
        assert loaded.wait(10.0)  # beside: the block goes on meanwhile
        asked.append(threading.current_thread())
        return "cc 1"

    with compiler_asked(backend(answer), FRONTENDS[name]):
        loaded.set()
    is_asked = name in ("huggingface", "live_model", "live_module")
    assert len(asked) == is_asked and threading.current_thread() not in asked


@pytest.mark.parametrize("exc", [RuntimeError("no"), SystemExit(3), KeyboardInterrupt()])
def test_what_it_raises_is_left_to_whoever_asks_later(exc: BaseException, capfd: pytest.CaptureFixture[str]) -> None:
    with compiler_asked(backend(raising(exc)), FRONTENDS["live_model"]):
        pass
    assert capfd.readouterr().err == ""


def test_no_backend_and_no_thread_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiler_asked(None, FRONTENDS["live_model"]):
        pass
    monkeypatch.setattr(threading.Thread, "start", lambda self: raising(RuntimeError("can't start new thread"))())
    asked: list[str] = []
    with compiler_asked(backend(lambda: asked.append("asked")), FRONTENDS["live_model"]):
        pass
    assert not asked


def test_a_compiler_that_hangs_is_waited_for_so_long_and_not_where_loading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting_up, "ASKED_S", 0.3)
    end = threading.Event()
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), compiler_asked(backend(end.wait), FRONTENDS["live_model"]):
        raise ZeroDivisionError
    failed = time.monotonic()
    with compiler_asked(backend(end.wait), FRONTENDS["live_model"]):
        pass
    waited = time.monotonic() - failed
    end.set()
    assert failed - began < 0.3 <= waited < 5.0


@pytest.mark.parametrize("what", ["compiler", "identity", "library_digest"])
@pytest.mark.parametrize("answer", [raising(OSError("cc is missing")), raising(SystemExit(3)), object])
def test_a_backend_that_cannot_say_what_results_depend_on_costs_its_kernels_alone(what: str, answer: Callable[[], Any]) -> None:
    catalog, module, x = load_catalog(strict=False), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.linspace(-1.0, 1.0, 16).view(2, 8)
    for one in catalog.backends.values():
        setattr(one, what, lambda *_: answer())
    made = api.compile(module, device="cpu", target="h200", catalog=catalog, store=Store(None), example_inputs=(x,), budget_s=2.0)
    assert torch.equal(made(x), module(x))
    (failure,) = {failure.message for failure in made.context.failures}
    assert any(name in failure for name in ("cc is missing", "SystemExit: 3", "object"))
