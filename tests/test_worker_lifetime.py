"""The worker holds device memory, so it ends with the compile: when it returns, when it raises, and on Ctrl-C."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agentcompile_rules_transformers
import pytest
from addition_module import MODULE
from child_processes import children

import agentcompile_core as ac
import agentcompile_core.worker
from agentcompile_core import pipeline
from agentcompile_core.configuration import Config
from agentcompile_core.installation import install
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.events import CandidateFinished
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.processes import fork_server
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Worker

PLUGIN = SimpleNamespace(agentcompile_template_families=hookimpl(lambda: [doubles.FakeFamily()]),
                         agentcompile_backends=hookimpl(lambda: [doubles.FakeBackend()]),
                         agentcompile_validators=hookimpl(lambda: [doubles.SimpleValidator()]))


class Compiling:
    """Compiles an addition with doubles; ``seen`` holds the children that ran whenever a candidate was finished."""

    def __init__(self, folder: Path) -> None:
        self.seen: set[int] = set()
        self.raises: type[BaseException] | None = None
        self.before = children()
        self._model = folder / "addition.py"
        self._model.write_text(MODULE)

    def __call__(self, event: object) -> None:
        if isinstance(event, CandidateFinished):
            self.seen |= children() - self.before
            if self.raises is not None:
                raise self.raises("now")

    def compile(self, run_on: str = "nothing") -> Any:
        catalog = load_catalog(only=(), extra=[("doubles", PLUGIN), ("rules", agentcompile_rules_transformers)])
        return ac.compile(str(self._model), device="cpu", run_on=run_on, catalog=catalog, store=Store(None), report=self,
                          config=Config(validators=("simple",), backend="fake", rounds=1, budget_plans=2))


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiling:
    made = partial(Worker, catalog="agentcompile_core.testing.doubles:catalog", builders=1)
    monkeypatch.setattr(agentcompile_core.worker, "Worker", made)
    monkeypatch.setattr(fork_server, "_servers", {})
    monkeypatch.setattr(fork_server, "_keeping", 0)  # as in a program that compiles one model
    return Compiling(tmp_path)


def test_no_child_outlives_a_compile_and_none_is_there_when_the_session_is_made(compiling: Compiling,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    while_installing: list[set[int]] = []
    installed = install.install

    def noted(*args: Any) -> Any:
        while_installing.append(children() - compiling.before)
        return installed(*args)

    monkeypatch.setattr(install, "install", noted)
    compiled = compiling.compile(run_on="framework")
    assert compiling.seen, "candidates were evaluated in a child"
    assert while_installing == [set()] and children() == compiling.before
    assert compiled.session is not None


def test_no_child_outlives_a_compile_that_is_interrupted(compiling: Compiling) -> None:
    compiling.raises = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        compiling.compile()
    assert compiling.seen and children() == compiling.before


def test_no_child_outlives_a_compile_that_fails(compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a stage failed")

    monkeypatch.setattr(pipeline.select, "run", broken)
    with pytest.raises(RuntimeError, match="a stage failed"):
        compiling.compile()
    assert compiling.seen and children() == compiling.before
