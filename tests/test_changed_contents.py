"""What parts of a compiled module hold in lists, mappings, sets and objects of their own: a change there is refused by its path."""

import copy
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from capture_models import SIZES, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.runtime.held import MOST, Held, _Memo, held_by, keeps
from agentcompile_core.runtime.module_changes import AsBound
from agentcompile_core.store import Store


class Slotted:
    """An object without a mapping of its attributes."""

    __slots__ = ("factor", "more")

    def __init__(self, factor: Any, more: Any = None) -> None:
        self.factor, self.more = factor, more


class Net(nn.Module):
    """Reads numbers from what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.first.notes = {"by": [0.25, {"inner": 2.0}]}  # type: ignore[assignment]
        self.steps, self.args, self.slotted = [0.5, 4.0], SimpleNamespace(scale=2.0, chosen={1, 2}), Slotted(3.0)
        self.in_a_tuple, self.options, self.memo = (1.0, [7.0]), Settings(), {3: 2.0}
        self.memos: list[Any] = [{7: {5: 2.0}}, {}, {2: torch.zeros(3)}]
        self.args.device, self.args.kept = torch.device("cpu"), torch.zeros(3)
        self.shared = nn.Identity()
        self.shared.own = self.steps  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.steps[0] + self.args.scale * self.first.notes["by"][1]["inner"] * self.slotted.factor * (
            self.memo[3] * self.options.scale)


def _put(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


class Settings:
    """Has no attribute of its own yet."""

    scale = 2.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "steps": lambda net: _put(net.steps, 0, 9.0),
    "steps ": lambda net: net.steps.append(1.0),
    "steps  ": lambda net: setattr(net, "steps", [1.0]),
    "args": lambda net: setattr(net.args, "scale", 1.0),
    "args ": lambda net: setattr(net.args, "another", 1.0),
    "args  ": lambda net: net.args.chosen.add(3),
    "options": lambda net: setattr(net.options, "scale", 1.0),
    "slotted": lambda net: setattr(net.slotted, "factor", 1.0),
    "slotted ": lambda net: setattr(net, "slotted", None),
    "first.notes": lambda net: _put(net.first.notes, "new", 1.0),
    "first.notes ": lambda net: _put(net.first.notes["by"][1], "inner", 1.0),
    "memo": lambda net: _put(net.memo, 3, 1.0),
    "memo ": lambda net: net.memo.clear(),
    "memo  ": lambda net: net.memo.update({3: 1.0, 4: 2.0}),
    "memos": lambda net: net.memos[0].clear(),
    "memos ": lambda net: _put(net.memos[0][7], 5, 1.0),
    "memos  ": lambda net: _put(net.memos[1], "new", 1.0),
    "memos   ": lambda net: net.memos.append({}),
    "in_a_tuple": lambda net: net.in_a_tuple[1].clear(),
}
EQUAL: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda net: (_put(net.steps, 0, float("0.5")), setattr(net.args, "scale", float("2.0"))),
    "a list": lambda net: setattr(net, "steps", [float("0.5"), 4.0]),
    "nested": lambda net: setattr(net.first, "notes", copy.deepcopy(net.first.notes)),
    "a tuple": lambda net: setattr(net, "in_a_tuple", (float("1.0"), [7.0])),
    "an object": lambda net: setattr(net, "slotted", Slotted(3.0)),
    "a set": lambda net: (net.args.chosen.add(77), net.args.chosen.discard(77)),
    "a memo": lambda net: _put(net.memo, 99, 1.0),
    "memos of tensors": lambda net: (_put(net.memos[2], 9, torch.ones(3)), net.memos[2].clear(), net.memos[2].update({4: torch.ones(2)})),
    "memos within others": lambda net: (_put(net.memos[0][7], 6, 1.0), _put(net.memos[0], 8, {}), _put(net.memos[1], 9, 1.0)),
    "a device": lambda net: setattr(net.args, "device", torch.device("cpu")),
    "a tensor": lambda net: setattr(net.args, "kept", torch.ones(3)),
    "tensors that its forward keeps": lambda net: (_put(net.first.notes, "last", torch.ones(3)), net.steps.append(torch.ones(3))),
}


def compiled() -> tuple[Any, Any]:
    net = Net().eval().requires_grad_(False)
    return net, ac.compile(net, example_inputs=(torch.randn(3, 6),), device="cpu", store=STORE, origins=(), validators=())


STORE = Store(None)


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_within_what_a_part_holds_is_refused_by_its_name(what: str) -> None:
    net, mine = compiled()
    assert mine.graphs.graphs  # it is programs that run
    x = torch.randn(3, 6)
    torch.testing.assert_close(mine(x), net(x))
    CHANGES[what](net)
    with pytest.raises(UsageError) as refused:
        mine(x)
    assert str(refused.value).startswith((f"{what.strip()} holds something else", f"{what.strip()} was set to something else"))


@pytest.mark.parametrize("what", EQUAL)
def test_other_objects_of_equal_value_are_no_change_and_are_looked_at_from_then_on(what: str) -> None:
    net, mine = compiled()
    x = torch.randn(3, 6)
    for _ in range(2):
        EQUAL[what](net)
        torch.testing.assert_close(mine(x), net(x))
    net.in_a_tuple[1][0] = net.steps[0] = net.first.notes["by"][0] = net.slotted.factor = 8.0
    with pytest.raises(UsageError, match="holds something else"):
        mine(x)


def test_a_list_that_two_parts_hold_is_looked_at_in_both() -> None:
    net, mine = compiled()
    net.steps = list(net.shared.own)  # another one, of the same numbers
    mine(torch.randn(3, 6))
    net.shared.own[0] = 8.0
    with pytest.raises(UsageError, match=r"shared\.own holds something else"):
        mine(torch.randn(3, 6))


FORMS = st.recursive(st.integers(0, 2), lambda one: st.one_of(
    st.lists(one, max_size=2).map(tuple), st.lists(one, min_size=1, max_size=2).map(tuple).map(_Memo)), max_leaves=5)


def grown(form: Any, data: st.DataObject) -> Any:
    """A form that is kept: what is in its memos, and in those within, may be more now."""
    if isinstance(form, _Memo):
        return _Memo((*(grown(one, data) for one in form.items), *data.draw(st.lists(FORMS, max_size=1))))
    return tuple(grown(one, data) for one in form) if isinstance(form, tuple) else form


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_forms_are_equal_both_ways_and_what_is_kept_twice_is_kept(data: st.DataObject) -> None:
    third = data.draw(FORMS)
    second = grown(third, data) if data.draw(st.booleans()) else data.draw(FORMS)
    first = grown(second, data) if data.draw(st.booleans()) else data.draw(FORMS)
    assert (first == second) == (second == first) and (first != second) == (second != first)
    assert keeps(first, first) and (first != second or keeps(first, second))
    assert first == second or not (keeps(first, second) and keeps(second, first))
    assert keeps(first, third) or not (keeps(first, second) and keeps(second, third))


class Hostile:
    """Raises whatever is asked of it by name."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(name)

    def __eq__(self, other: object) -> bool:
        raise OSError("equal")

    __hash__ = None  # type: ignore[assignment]


def test_what_raises_where_it_is_looked_at_costs_nothing() -> None:
    module = nn.Linear(2, 2)
    module.own, module.alone = {"a": Hostile(), "b": [1.0]}, Hostile()
    assert [one.path for one in held_by(module)] == ["own", "alone"]
    bound = AsBound(module, with_mode=True)
    assert bound.change() == ""
    module.own["b"][0] = 2.0  # type: ignore[index, operator]
    assert bound.change() == "own holds something else"


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(-9, 9), st.text(max_size=3))
HELD = st.recursive(LEAVES, lambda one: st.one_of(
    st.lists(one, max_size=3), st.dictionaries(st.text(max_size=2), one, max_size=3), st.lists(one, max_size=2).map(deque),
    st.lists(one, max_size=2).map(tuple), one.map(Slotted), one.map(lambda value: SimpleNamespace(value=value))), max_leaves=8)


def _holders(value: Any) -> list[Any]:
    """Everything in it that can be changed in place."""
    if isinstance(value, (list, deque, tuple)):
        within = list(value)
    elif isinstance(value, dict):
        within = list(value.values())
    elif isinstance(value, Slotted):
        within = [value.factor, value.more]
    else:
        within = list(vars(value).values()) if isinstance(value, SimpleNamespace) else []
    own = [value] if isinstance(value, (list, deque, dict, Slotted, SimpleNamespace)) else []
    return [*own, *(holder for one in within for holder in _holders(one))]


def _changed(holder: Any, value: object) -> None:
    if isinstance(holder, (list, deque)):
        holder.append(value)
    elif isinstance(holder, dict):
        holder["changed"] = value
    else:
        setattr(holder, "factor" if isinstance(holder, Slotted) else "value", value)


@settings(max_examples=60, deadline=None)
@given(HELD, st.data())
def test_every_place_that_can_be_written_is_seen(value: Any, data: st.DataObject) -> None:
    module = nn.Linear(2, 2)
    module.own = value
    bound = AsBound(module, with_mode=True)
    assert bound.change() == ""
    holders = _holders(value)
    if holders:
        holder = data.draw(st.sampled_from(holders))
        _changed(holder, "another value")
        assert bound.change().startswith("own")


def test_what_a_forward_writes_itself_is_not_asked_for_again() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.options = [], {"scale": 2.0}

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(len(self.seen))
            return x * self.options["scale"]

    module = Counts()
    bound = AsBound(module, with_mode=False, forward=lambda part: part(torch.ones(1)))
    for _ in range(3):
        module(torch.ones(2))
        assert bound.change() == ""
    module.options["scale"] = 3.0
    assert bound.change() == "options holds something else"


@pytest.mark.parametrize("forward", [None, lambda part: part(torch.ones(1, 6))])
def test_what_is_held_is_looked_at_once_for_what_changed_and_once_behind_a_forward(forward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net, looks = Net(), Counter[str]()
    bound = AsBound(net, with_mode=True, forward=forward)
    now = Held.now

    def counted(held: Held) -> Any:
        looks[held.path] += 1
        return now(held)

    monkeypatch.setattr(Held, "now", counted)
    assert bound.change() == ""
    assert set(looks.values()) == {1} and len(looks) == 9
    looks.clear()
    net.memos.append({})
    assert bound.change() == "memos holds something else"
    assert max(looks.values()) == 1 + 1 + (forward is not None), "whether anything changed, what did, and what the forward left"


def test_a_memo_that_the_forward_fills_again_is_as_it_was() -> None:
    net = Net()
    bound = AsBound(net, with_mode=True, forward=lambda part: part.memo.update({3: 2.0, 4: 1.0}))
    net.memo.clear()
    assert bound.change() == ""
    net.memo[3] = 9.0
    assert bound.change() == ""  # and whatever it was


def test_circles_and_what_is_too_much_come_to_an_end() -> None:
    module = nn.Linear(2, 2)
    module.own = [1.0]
    module.own.append(module.own)  # type: ignore[operator, union-attr]
    module.many, module.less = [[at] for at in range(MOST)], [[1.0]]
    assert [one.path for one in held_by(module)] == ["own", "less"]
    bound = AsBound(module, with_mode=True)
    assert bound.change() == ""
    module.own[0] = 2.0  # type: ignore[index, operator]
    assert bound.change() == "own holds something else"


def test_parts_of_packages_are_left_alone() -> None:
    model = tiny("llama", SIZES)
    assert not list(held_by(model))
    layer = model.model.layers[0]
    layer.notes = {"a": 1.0}
    assert not list(held_by(model)) and list(held_by(Net()))
