"""What a first call sets up stays so; what it fills beside things that cannot be given back is seen all the same."""

import functools
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from remembering import TABLE, Make, Module, X, Y, compiled
from torch import nn

from agentcompile_core.stages.capture import first_call
from agentcompile_core.stages.capture.dependence import answer


@pytest.fixture(autouse=True, params=["asked in forks", "looked at"])
def _empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    TABLE.clear()
    if request.param == "looked at":
        monkeypatch.setattr(first_call, "remembers", lambda *_: None)


class Box:
    """Rows beside a lock."""

    def __init__(self) -> None:
        self.lock, self.rows = threading.Lock(), list[float]()


def lazily_registered() -> Make:
    """What a late import puts into a table of another module, which no second import would do again."""
    def kept(x: torch.Tensor) -> torch.Tensor:
        import registering_of_a_test  # noqa: F401

        found: torch.Tensor = TABLE["double"] * x
        return found

    return kept


def defined_once() -> Make:
    name = f"code_state::of_{len(DEFINED)}"

    @functools.cache
    def define() -> None:
        torch.library.define(name, "(Tensor x) -> Tensor")
        DEFINED.append(name)

    def kept(x: torch.Tensor) -> torch.Tensor:
        define()
        return x * 2

    return kept


def flagged_once() -> Make:
    box, is_ready = Box(), False

    def kept(x: torch.Tensor) -> torch.Tensor:
        nonlocal is_ready
        if not is_ready:
            box.rows.append(2.0)
            is_ready = True
        (factor,) = box.rows
        return x * factor

    return kept


def grown_once() -> Make:
    numbers, views = bytearray(b"ab"), []

    def kept(x: torch.Tensor) -> torch.Tensor:
        if len(numbers) < 9:
            numbers.extend(b"x" * 9)
            views.append(memoryview(numbers))  # which forbids to make it smaller
        return x * len(numbers[:2])

    return kept


def warm_cache() -> Make:
    @functools.lru_cache
    def twos(rows: int) -> torch.Tensor:
        return torch.full((), 2.0)

    twos(7)
    return lambda x: x * twos(x.shape[0])


def by_what_says_that_it_is_a_function() -> Make:
    class Said:
        __class__ = types.FunctionType  # type: ignore[assignment]

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    said = Said()
    return lambda x: said(x)


class Noting:
    def __init__(self, make: Make) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self.make = make

    def note(self, x: torch.Tensor) -> torch.Tensor:
        return self.made.setdefault(x.shape[-1], self.make(x))


DEFINED: list[str] = []
SET_UP = (lazily_registered, defined_once, flagged_once, grown_once, warm_cache, by_what_says_that_it_is_a_function)


@pytest.mark.parametrize("made", SET_UP)
def test_what_is_set_up_by_a_first_call_stays_so_and_is_captured(made: Callable[[], Make], tmp_path: Path, monkeypatch: Any) -> None:
    text = "import torch\nfrom remembering import TABLE\nTABLE['double'] = torch.tensor(2.0)\n"
    (tmp_path / "registering_of_a_test.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = Module(made())
    found = compiled(module)
    assert not found.graphs.eager_reason, found.notes
    for x in (X, Y):
        assert torch.equal(found(x), x - 2 * x) and torch.equal(module(x), x - 2 * x)
    sys.modules.pop("registering_of_a_test", None)


@pytest.mark.parametrize("beside", [threading.Lock, threading.local, lambda: numpy.array(3.0), lambda: numpy.zeros(1 << 18)])
def test_what_cannot_be_given_back_and_stays_as_it_is_hides_nothing(beside: Callable[[], Any]) -> None:
    def in_a_closure_beside(make: Make) -> Make:
        memo, other = list[torch.Tensor](), beside()

        def kept(x: torch.Tensor) -> torch.Tensor:
            if not memo:
                memo.append(make(x))
            return memo[0] if other is not None else x

        return kept

    assert "called with before" in compiled(Module(in_a_closure_beside(torch.Tensor.mean))).graphs.eager_reason
    assert not compiled(Module(in_a_closure_beside(lambda x: torch.ones(())))).graphs.eager_reason


def test_an_object_is_seen_behind_its_method_and_a_memo_on_a_tensor() -> None:
    module = Module(Noting(torch.Tensor.mean).note)
    made = compiled(module)
    assert "called with before" in made.graphs.eager_reason and torch.equal(made(Y), Y - Y.mean())
    assert not compiled(Module(Noting(lambda x: torch.ones(())).note)).graphs.eager_reason
    marked = torch.zeros(2)

    def kept(x: torch.Tensor) -> torch.Tensor:
        if not hasattr(marked, "memo"):
            marked.memo = x.mean()  # type: ignore[attr-defined]
        found: torch.Tensor = marked.memo  # type: ignore[attr-defined]
        return found

    made = compiled(Module(kept))
    assert "called with before" in made.graphs.eager_reason and torch.equal(made(Y), Y - Y.mean())


def test_what_another_thread_writes_meanwhile_is_lost_for_the_time_of_a_few_calls_at_most() -> None:
    steps, is_over = {"n": 0}, threading.Event()

    def count() -> None:
        while not is_over.wait(0.002):
            steps["n"] += 1
            done.append(1)

    done: list[int] = []
    thread = threading.Thread(target=count)
    thread.start()
    while len(done) < 50:
        time.sleep(0.01)
    compiled(Module(lambda x: x if steps is not None else 2 * x))
    is_over.set()
    thread.join()
    assert steps["n"] >= 0.8 * len(done)


class Table(dict):  # type: ignore[type-arg]
    """A mapping whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Held(nn.Module):
    """A cache of its own, or within something that it holds, of what code keeps."""

    def __init__(self, around: Callable[[Any], Any]) -> None:
        super().__init__()
        self.last = [torch.zeros(())]
        self.cached = around(functools.lru_cache(lambda rows: self.last[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last[0] = x.mean()
        cached = self.cached["of"] if isinstance(self.cached, dict) else self.cached
        return x - cached(x.shape[0])


@pytest.mark.parametrize("around", [lambda cache: cache, lambda cache: {"of": cache}])
def test_a_cache_is_seen_wherever_it_is_held(around: Callable[[Any], Any]) -> None:
    assert "called with before" in compiled(Held(around)).graphs.eager_reason


def test_a_mapping_of_ones_own_that_is_written_like_any_is_given_back() -> None:
    def of(make: Make) -> Make:
        table = Table()

        def kept(x: torch.Tensor) -> torch.Tensor:
            if "memo" not in table:
                table["memo"] = make(x)
            found: torch.Tensor = table.memo
            return found

        return kept

    assert not compiled(Module(of(lambda x: torch.ones(())))).graphs.eager_reason
    made = compiled(Module(of(torch.Tensor.mean)))
    assert "called with before" in made.graphs.eager_reason and torch.equal(made(Y), Y - Y.mean())


def test_a_function_that_is_made_around_a_result_is_one() -> None:
    made_later: dict[str, Make] = {}

    def kept(x: torch.Tensor) -> torch.Tensor:
        if "less" not in made_later:
            mean = x.mean()
            made_later["less"] = lambda z: mean + 0 * z
        return made_later["less"](x)

    assert "called with before" in compiled(Module(kept)).graphs.eager_reason


def test_on_which_side_of_something_the_first_numbers_lay_is_remembered_too() -> None:
    sides: list[bool] = []

    def kept(x: torch.Tensor) -> torch.Tensor:
        if not sides:
            sides.append(bool(x.abs().max() > 0))
        return x if sides[0] else 2 * x

    assert "called with before" in compiled(Module(kept)).graphs.eager_reason


def test_a_mapping_that_another_thread_fills_is_left_alone() -> None:
    table, is_over = dict.fromkeys(range(20_000), 0), threading.Event()

    def fill() -> None:
        while not is_over.is_set():
            table[len(table)] = 0
            if len(table) % 20 == 0:
                time.sleep(0.0002)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        compiled(Module(lambda x: x if table else 2 * x))
    finally:
        is_over.set()
        thread.join()
    assert list(table) == list(range(len(table))) and len(table) > 20_000


def test_whoever_stops_it_finds_names_as_one_call_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made, memo = functools.lru_cache(lambda: 3.0), list[torch.Tensor]()
    calls = [made]

    def kept(x: torch.Tensor) -> torch.Tensor:
        if not memo:
            memo.append(x.mean() * made())
        return memo[0]

    def stopped(*asked: Any) -> Any:
        calls.append(made)
        if len(calls) == 4:  # the module's third call, in a state that was put back
            raise KeyboardInterrupt
        return answer(*asked)

    monkeypatch.setattr(first_call, "remembers", lambda *_: None)
    monkeypatch.setattr(first_call, "answer", stopped)
    with pytest.raises(KeyboardInterrupt):
        compiled(Module(kept))
    assert inspect.getclosurevars(kept).nonlocals["made"] is calls[0] and torch.equal(memo[0], X.mean() * 3)
