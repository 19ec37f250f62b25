"""What a result depends on besides arguments and tensors is in no graph: such modules run themselves; compiling changes none."""

import cProfile
import datetime
import functools
import itertools
import os
import pstats
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.api import CompiledModel
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.runtime.framework_session import EagerModule
from agentcompile_core.runtime.module_session import ModuleSession
from agentcompile_core.store import Store

CATALOG = load_catalog(only=())
RARELY = 1000  # calls after which something else is computed: more than any check makes


def compiled(module: nn.Module, *example: Any, store: Store | None = None) -> CompiledModel:
    return ac.compile(module, example_inputs=example, device="cpu", store=store or Store(None), catalog=CATALOG)


class Of(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


def steps(count: int, x: Tensor) -> Tensor:
    return x * 2.0 if count < RARELY else x * 3.0


class InAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen, self.kept, self.total = 0, [], {"n": 0}, torch.zeros(())
        self.register_buffer("calls", torch.zeros(()))

    def counted(self) -> int:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return steps(self.counted(), x)


class Number(InAttribute):
    def counted(self) -> int:
        self.count += 1
        return self.count


class Grows(InAttribute):
    def counted(self) -> int:
        self.seen.append(1)
        return len(self.seen)


class Keyed(InAttribute):
    def counted(self) -> int:
        self.kept["n"] += 1
        return self.kept["n"]


class OfClass(InAttribute):
    calls_of_all = 0

    def counted(self) -> int:
        OfClass.calls_of_all += 1
        return OfClass.calls_of_all


class Summed(InAttribute):
    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(1)
        return torch.where(self.total < RARELY, x * 2.0, x * 3.0)


class Replaced(InAttribute):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return torch.where(self.calls < RARELY, x * 2.0, x * 3.0)


class Trained(InAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.weight += 1
        return torch.where(self.weight < RARELY, x * 2.0, x * 3.0)


class Drawing(InAttribute):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def counted(self) -> int:
        return 0 if self.generator.random() < 0.999 else RARELY


def nonlocal_count() -> Callable[[Tensor], Tensor]:
    count = 0

    def call(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return steps(count, x)

    return call


CALLS = 0
NUMBERS = itertools.count()
QUEUE: deque[int] = deque(maxlen=2)


def global_count(x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return steps(CALLS, x)


def queued(x: Tensor) -> Tensor:
    QUEUE.append(sum(QUEUE) + 1)
    return steps(QUEUE[-1], x)


STATES: dict[str, Callable[[], nn.Module]] = {
    "number": Number, "list": Grows, "dict": Keyed, "class": OfClass, "tensor": Summed, "buffer": Replaced, "parameter": Trained,
    "closure": lambda: Of(nonlocal_count()), "global": lambda: Of(global_count), "queue": lambda: Of(queued),
    "iterator": lambda: Of(lambda x: steps(next(NUMBERS), x)),
    "generator of Python": lambda: Drawing(random.Random(0)), "generator of numpy": lambda: Drawing(numpy.random.default_rng(0)),
}


@pytest.mark.parametrize("name", STATES)
def test_what_a_call_leaves_for_the_next_runs_as_it_is(name: str) -> None:
    x, module = torch.randn(3), STATES[name]().eval()
    before = [p.clone() for p in module.parameters()]
    made = compiled(module, x)
    assert all(map(torch.equal, before, module.parameters()))
    assert isinstance(made.session, EagerModule) and any("runs on the framework" in note for note in made.notes)
    assert torch.equal(made(x), x * 2.0)


def test_compiling_leaves_no_trace() -> None:
    for make in (Number, Grows, Keyed, Summed, Replaced):
        module = make().eval()
        calls = module.calls
        compiled(module, torch.randn(3))
        assert (module.count, module.seen, module.kept, float(module.total), float(calls)) == (0, [], {"n": 0}, 0.0, 0.0)
        assert module.calls is calls and not calls.is_inference()
    x = torch.randn(3)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    compiled(Of(lambda x: x * random.random() + numpy.random.rand() + torch.rand(3)), x)
    assert before[:2] == (random.getstate(), numpy.random.get_state()[1].tolist()) and torch.equal(before[2], torch.get_rng_state())


def read(path: Path) -> float:
    return float(path.read_text())


OUTSIDE: dict[str, Callable[[Path], Callable[[Tensor], Tensor]]] = {
    "clock": lambda path: lambda x: x.clamp(max=1e3 if time.time() > 0 else 1e4),
    "date": lambda path: lambda x: x.clamp(max=1e3 if datetime.datetime.now().year < 3000 else 1e4),
    "random": lambda path: lambda x: x.clamp(max=1e3 + random.random()),
    "chosen": lambda path: lambda x: x.clamp(max=random.choice((1e3, 1e4))),
    "numpy": lambda path: lambda x: x.clamp(max=1e3 + numpy.random.rand()),
    "environment": lambda path: lambda x: x.clamp(max=float(os.environ.get("LIMIT_OF_A_TEST", "1e3"))),
    "file": lambda path: lambda x: x.clamp(max=read(path)),
    "whether a file is there": lambda path: lambda x: x.clamp(max=1e3 if os.path.exists(path) else 1e4),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_reads_from_outside_runs_as_it_is(name: str, tmp_path: Path) -> None:
    path = tmp_path / "limit"
    path.write_text("1e3")
    module, x = Of(OUTSIDE[name](path)), torch.tensor([1.0, 5e4])
    made = compiled(module, torch.randn(2))
    assert isinstance(made.session, EagerModule) and "runs on the framework" in made.notes[0]
    path.write_text("1e2")
    if name == "file":
        assert torch.equal(made(x), module(x))


def behind_a_compile() -> None:
    """Called by the next test alone."""


def test_whoever_profiles_goes_on_behind_a_compile_and_nothing_is_missed() -> None:
    profile = cProfile.Profile()
    with profile:
        made = compiled(Of(OUTSIDE["clock"](Path())), torch.randn(3))
        behind_a_compile()
    assert isinstance(made.session, EagerModule)
    assert any(name == behind_a_compile.__name__ for _, _, name in pstats.Stats(profile).stats)  # type: ignore[attr-defined]


@functools.lru_cache
def table(length: int) -> Tensor:
    return torch.ones(length)


class Lazy(nn.Module):
    """Keeps what it makes once and what it computed last: no later result depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, float] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        scale = self.made.setdefault(len(x), 2.0)
        self.last = x * scale + table(3)
        return self.last


def test_what_is_made_once_or_only_kept_is_captured() -> None:
    """Also where the trace would be the first call of all: a table of its tensors would serve nobody."""
    table.cache_clear()
    module, x = Lazy().eval(), torch.randn(3)
    made = compiled(module, x)
    assert isinstance(made.session, ModuleSession), made.notes
    assert module.last is None and not module.made and torch.equal(made(x), module(x))
