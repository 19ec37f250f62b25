"""What a trial of a module leaves in lists, mappings, sets and objects that it holds is taken back; what it remembers is found."""

import array
import collections
import copy
import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from attrs import define
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agentcompile_core import api
from agentcompile_core.errors import UsageError
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.stages.capture.left_behind import undisturbed
from agentcompile_core.store import Store

CATALOG = load_catalog(only=())
X, Y = torch.linspace(-2.0, 2.0, 12).reshape(3, 4), torch.linspace(3.0, 9.0, 12).reshape(3, 4)


class Plain:
    """An object whose attributes are those that were put into it."""


@define
class Slots:
    """An object without a mapping of attributes."""

    memo: Any = None


class Module(nn.Module):
    def __init__(self, held: Any, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.held, self.with_held = held, forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.with_held(self.held, x)


def leaf() -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), st.integers(0, 3), st.text("ab", max_size=2), st.builds(lambda: torch.zeros(2)), st.builds(Slots),
                     st.builds(lambda: nn.Linear(2, 2)))


def namespace(inner: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(memo=inner)


def plain(inner: Any) -> Plain:
    made = Plain()
    made.memo = inner  # type: ignore[attr-defined]
    return made


def within(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    pairs = st.dictionaries(st.text("xyz", min_size=1, max_size=1), inner, max_size=3)
    return st.one_of(items, items.map(tuple), items.map(collections.deque), pairs, pairs.map(collections.OrderedDict),
                     pairs.map(lambda found: collections.defaultdict(list, found)), inner.map(namespace), inner.map(plain),
                     inner.map(Slots), st.sets(st.integers(0, 3)))


def form(value: Any) -> Any:
    """What ``value`` is made of, by the addresses of all that is no container and the numbers of tensors."""
    if isinstance(value, torch.Tensor):
        return (id(value), value.tolist())
    if isinstance(value, dict):
        return (id(value), [(key, form(one)) for key, one in value.items()])
    if isinstance(value, (list, tuple, collections.deque)):
        return (id(value), [form(one) for one in value])
    if isinstance(value, set):
        return (id(value), sorted(value))
    if isinstance(value, nn.Module):
        return (id(value), [(name, form(one)) for name, one in vars(value).items() if isinstance(one, dict) or name == "more"])
    if isinstance(value, (types.SimpleNamespace, Plain)):
        return (id(value), [(name, form(one)) for name, one in vars(value).items()])
    return (id(value), form(value.memo)) if isinstance(value, Slots) else (type(value), value)


def disturb(value: Any, draw: Any) -> None:
    """Change ``value`` and what it leads to in whatever way it can be changed, or not."""
    if isinstance(value, torch.Tensor):
        value.add_(1.0)
        return
    for inner in (*value.values(),) if isinstance(value, dict) else value if isinstance(value, (list, tuple, collections.deque)) else ():
        disturb(inner, draw)
    if not draw(st.booleans()):
        return
    new = draw(st.sampled_from([None, torch.ones(1), 7, [torch.ones(1)], Slots(3)]))
    if isinstance(value, dict):
        value.clear() if draw(st.booleans()) else value.update({"x": new, "new": new})
    elif isinstance(value, (list, collections.deque)):
        value.clear() if draw(st.booleans()) else value.append(new)
    elif isinstance(value, set):
        value.add(9)
    elif isinstance(value, nn.Module):
        value.more = new
    elif isinstance(value, (types.SimpleNamespace, Plain, Slots)):
        disturb(value.memo, draw) if hasattr(value, "memo") else None
        if draw(st.booleans()):
            del value.memo
        else:
            value.memo = new


@settings(max_examples=150)
@given(st.data())
def test_whatever_a_module_holds_is_what_it_was(data: st.DataObject) -> None:
    held = data.draw(st.recursive(leaf(), within, max_leaves=6))
    module = Module(held, lambda held, x: x)
    before = form(held)
    with pytest.raises(ZeroDivisionError), undisturbed(module):
        disturb(held, data.draw)
        raise ZeroDivisionError
    assert module.held is held and form(held) == before


def test_what_is_no_result_of_a_forward_stays_where_it_was_put() -> None:
    held: dict[str, Any] = {"modules": sys.modules, "memo": [None], "names": {}}
    with undisturbed(Module(held, lambda held, x: x)):
        sys.modules["a_module_imported_meanwhile"] = types.ModuleType("a_module_imported_meanwhile")
        held["memo"][0], held["names"]["torch"], held["names"]["x"] = torch.ones(1), torch, torch.ones(1)
    assert sys.modules.pop("a_module_imported_meanwhile") and held["memo"] == [None] and held["names"] == {"torch": torch}


class Scaled(dict):  # type: ignore[type-arg]
    """A mapping that says other values than it holds, and refuses ``update``."""

    def items(self) -> Any:
        return [(key, value / 100) for key, value in super().items()]

    def update(self, *args: Any) -> None:
        raise TypeError("no update")


class Lazy(list):  # type: ignore[type-arg]
    """A list of functions that gives what they return."""

    def __iter__(self) -> Any:
        return (one() for one in super().__iter__())


class Ordered(dict):  # type: ignore[type-arg]
    """A mapping that keeps the order of its keys beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.order = collections.deque[str]()

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.order.append(key)


class Served:
    """What another thread may be at work on."""

    def __init__(self) -> None:
        self.lock, self.done = threading.Lock(), list[int]()


@pytest.mark.parametrize("kind", [Scaled, Lazy, Ordered, Served])
def test_beside_what_cannot_be_given_back_nothing_is(kind: Callable[[], Any]) -> None:
    """All or nothing: a flag that is given back beside a memo that is not would break whoever keeps both."""
    other, memo = kind(), [None]
    module = Module([memo, {"other": other}], lambda held, x: x)
    with undisturbed(module):
        memo[0] = torch.ones(1)  # type: ignore[call-overload]
        if isinstance(other, dict):
            other["x"] = 50.0
        elif isinstance(other, list):
            other.append(lambda: 2.0)
        else:
            other.done.append(1)
    assert memo[0] is not None
    if isinstance(other, dict):
        assert dict.__getitem__(other, "x") == 50.0 and list(getattr(other, "order", "x")) == ["x"]
    else:
        assert len(other) == 1 if isinstance(other, list) else other.done == [1]


def test_arrays_are_given_back_and_tensors_that_nothing_can_be_written_to_are_left() -> None:
    with torch.inference_mode():
        made = torch.full((4,), torch.nan)
    numbers, raw, typed = numpy.zeros(3), bytearray(b"abc"), array.array("d", [1.0])
    wide, plain = torch.tensor(torch.nan).expand(4), torch.full((2,), torch.nan)
    with undisturbed(Module([numbers, raw, typed, made, wide, plain], lambda held, x: x)):
        numbers += 1
        raw[0], typed[0] = 0, 2.0
        plain.fill_(1.0)
    assert not numbers.any() and raw == b"abc" and typed[0] == 1.0 and bool(plain.isnan().all())


def test_a_circle_ends_and_what_is_too_much_is_left() -> None:
    ring: list[Any] = [None]
    ring.append(ring)
    chain: list[Any] = []
    with undisturbed(Module((ring, chain), lambda held, x: x)):
        ring[0] = torch.ones(1)
    assert ring[0] is None
    for _ in range(30_000):
        chain = [chain]
    for more in (chain, list(range(3_000_000))):
        with undisturbed(Module((ring, more), lambda held, x: x)):
            ring[0] = 7
        assert ring[0] == 7 and more
        ring[0] = None


HOLDERS: dict[str, Callable[[], Any]] = {
    "a namespace": lambda: types.SimpleNamespace(memo=None), "an object": lambda: plain(None), "slots": Slots,
    "a mapping": lambda: {"memo": None}, "a mapping of an object": lambda: {"inner": plain(None)}, "a list of slots": lambda: [Slots()],
    "an object of a class with a default": lambda: type("Defaulted", (), {"memo": None})()}


def remembered(held: Any, x: torch.Tensor) -> torch.Tensor:
    """``x`` less the mean of what the first call was given."""
    while not hasattr(held, "memo") and not (isinstance(held, dict) and "memo" in held):
        held = held[0] if isinstance(held, list) else held["inner"]
    if isinstance(held, dict):
        if held["memo"] is None:
            held["memo"] = x.mean()
        return x - held["memo"]
    if held.memo is None:
        held.memo = x.mean()
    return x - held.memo


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_module_that_remembers_its_first_call_runs_itself(kind: str) -> None:
    module, again = (Module(HOLDERS[kind](), remembered) for _ in range(2))
    made = api.compile(module, device="cpu", store=Store(None), catalog=CATALOG, example_inputs=(X,))
    assert "called with before" in made.graphs.eager_reason
    assert torch.equal(made(Y), again(Y)) and torch.equal(made(X), again(X))


def test_a_module_that_remembers_whole_numbers_runs_itself() -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.first = nn.Embedding(8, 4), None

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if self.first is None:
                self.first = ids[:1]
            return self.table(ids) + self.table(self.first)

    module, ids = Embedding(), torch.tensor([3, 1, 2])
    again = copy.deepcopy(module)
    made = api.compile(module, device="cpu", store=Store(None), catalog=CATALOG, example_inputs=(ids,))
    assert "called with before" in made.graphs.eager_reason and module.first is None
    assert torch.equal(made(ids + 1), again(ids + 1)) and torch.equal(made(ids), again(ids))


@pytest.mark.parametrize("mask", [torch.ones(4, dtype=torch.int64), torch.tensor([0, 1, 0, 0, 1, 0])[:4], torch.tensor(2)])
def test_a_module_that_remembers_a_mask_runs_itself(mask: torch.Tensor) -> None:
    def masked(held: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if held.memo is None:
            held.memo = (1 - mask) * -4.0
        return x + held.memo

    class Masked(Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return masked(self.held, x, mask)

    module, again = Masked(Slots(), lambda held, x: x), Masked(Slots(), lambda held, x: x)
    made = api.compile(module, device="cpu", store=Store(None), catalog=CATALOG, example_inputs=(X, mask))
    assert made.graphs.eager_reason
    for other in (torch.zeros_like(mask), mask):
        assert torch.equal(made(X, other), again(X, other))


def test_a_module_that_remembers_what_every_call_makes_alike_is_compiled() -> None:
    def scaled(held: Any, x: torch.Tensor) -> torch.Tensor:
        if "scale" not in held:
            held["scale"] = x.shape[-1] ** -0.5
        return x * held["scale"]

    held: dict[str, Any] = {}
    made = api.compile(Module(held, scaled), device="cpu", store=Store(None), catalog=CATALOG, example_inputs=(X,))
    assert not made.graphs.eager_reason and torch.equal(made(Y), Y * 0.5) and not held


class Cached:
    """An object that makes a number when it is read first; another one is its class's."""

    shift = 1.0

    @functools.cached_property
    def scale(self) -> float:
        return 0.5


def test_what_a_cached_property_makes_later_is_no_change_and_other_values_are() -> None:
    held = Cached()
    module = Module(held, lambda held, x: x * held.scale + held.shift)
    made = api.compile(module, device="cpu", store=Store(None), catalog=CATALOG, example_inputs=(X,))
    assert not made.graphs.eager_reason and "scale" not in vars(held)
    assert torch.equal(made(Y), module(Y)) and "scale" in vars(held) and torch.equal(made(Y), module(Y))
    again = api.compile(module, device="cpu", store=Store(None), catalog=CATALOG, example_inputs=(X,))
    held.scale = 2.0
    with pytest.raises(UsageError, match="holds something else"):
        again(Y)
    held.scale = 0.5
    assert torch.equal(again(Y), module(Y))
    held.shift = 3.0  # which its class had
    for compiled in (made, again):
        with pytest.raises(UsageError, match="holds something else"):
            compiled(Y)
