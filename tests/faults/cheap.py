"""A compile that takes a second: an addition, served by the core's doubles, whose kernels are Python."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import agentcompile_rules_transformers
import inline_worker

import agentcompile_core as ac
import agentcompile_core.worker
from agentcompile_core.configuration import Config
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.store import Store
from agentcompile_core.testing import bad_validators, doubles
from agentcompile_core.worker import Worker

HERE = "here"
BAD_HERE = "here, with validators that misbehave"
MODULE = """
import torch

class Model(torch.nn.Module):
    def forward(self, a, b):
        return {result}

def get_inputs():
    return [torch.linspace(-1.0, 1.0, {size}), torch.linspace(0.0, 3.0, {size})]

def get_init_inputs():
    return []
"""


def offers(**hooks: Any) -> SimpleNamespace:
    """A plugin that offers one thing by each hook, named without ``agentcompile_``."""
    return SimpleNamespace(**{f"agentcompile_{hook}": hookimpl(lambda offer=offer: [offer]) for hook, offer in hooks.items()})


class Family(doubles.FakeFamily):
    """The fake family with a few behaviours only."""

    def __init__(self, *behaviours: str) -> None:
        self.behaviours = behaviours


def module(folder: Path, result: str = "a + b", name: str = "addition", size: int = 100) -> Path:
    """A model file below ``folder``."""
    path = folder / f"{name}.py"
    path.write_text(MODULE.format(result=result, size=size))
    return path


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """As users run it: what a run survives is survived."""
    before = os.environ.pop("AGENTCOMPILE_STRICT", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["AGENTCOMPILE_STRICT"] = before


class Here(inline_worker.Here):
    """The worker without its process, for storms in which nothing crashes but the whole."""

    catalog = staticmethod(doubles.catalog)

    def __init__(self, **_: Any) -> None:
        super().__init__(self.catalog())


class BadHere(Here):
    """The same, with validators that misbehave."""

    catalog = staticmethod(bad_validators.catalog)


class Backend(doubles.FakeBackend):
    """The fake backend, which waits seconds instead of minutes."""

    deadlines_s = MappingProxyType({"build": 20.0, "check": 3.0, "time": 3.0})


@contextlib.contextmanager
def _doubles_in_the_worker(catalog: str) -> Iterator[None]:
    real = agentcompile_core.worker.Worker
    made = {HERE: Here, BAD_HERE: BadHere}.get(catalog) or partial(Worker, catalog=catalog, builders=1)
    agentcompile_core.worker.Worker = made  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        agentcompile_core.worker.Worker = real  # type: ignore[misc]


def compiled(model: Path, store: Store, *, family: Any = None, extra: tuple[tuple[str, Any], ...] = (), run_on: str = "fake",
             workers: str = "agentcompile_core.testing.doubles:catalog", report: Any = None, **config: Any) -> Any:
    """Compile with doubles; ``config`` are fields of Config."""
    with _here(workers, family, extra, config) as found:
        watch = {} if report is None else {"report": report}
        return ac.compile(str(model), device="cpu", run_on=run_on, store=store, **found, **watch)


def loaded(bundle: Path, model: Path, store: Store, *, family: Any = None, workers: str = "agentcompile_core.testing.doubles:catalog",
           extra: tuple[tuple[str, Any], ...] = (), report: Any = None, **config: Any) -> Any:
    """Load a bundle with doubles, its steps on the fake backend; ``config`` are fields of Config."""
    with _here(workers, family, extra, config) as found:
        watch = {} if report is None else {"report": report}
        return ac.load(bundle, str(model), device="cpu", run_on="fake", store=store, **found, **watch)


@contextlib.contextmanager
def _here(workers: str, family: Any, extra: tuple[tuple[str, Any], ...], config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Catalog and configuration of doubles, lenient, with doubles in the worker."""
    plugin = offers(template_families=family or Family("honest"), backends=Backend(), validators=doubles.SimpleValidator())
    settings = {"validators": ("simple",), "backend": "fake", "rounds": 1, "budget_plans": 4, "advisor": "heuristic", **config}
    with lenient(), _doubles_in_the_worker(workers):
        catalog = load_catalog(only=(), extra=[("doubles", plugin), ("rules", agentcompile_rules_transformers), *extra])
        yield {"catalog": catalog, "config": Config(**settings)}
