"""What parts of a compiled module hold in lists, mappings, sets and objects of their own: a change there is refused by its path."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.runtime.held import MOST, held_by
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
        self.in_a_tuple = (1.0, [7.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.steps[0] + self.args.scale * self.first.notes["by"][1]["inner"] * self.slotted.factor


def _put(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


CHANGES: dict[str, Callable[[Net], Any]] = {
    "steps": lambda net: _put(net.steps, 0, 9.0),
    "steps ": lambda net: net.steps.append(1.0),
    "args": lambda net: setattr(net.args, "scale", 1.0),
    "args ": lambda net: setattr(net.args, "another", 1.0),
    "args.chosen": lambda net: net.args.chosen.add(3),
    "slotted": lambda net: setattr(net.slotted, "factor", 1.0),
    "slotted ": lambda net: setattr(net, "slotted", Slotted(3.0)),
    "first.notes": lambda net: _put(net.first.notes, "new", 1.0),  # type: ignore[arg-type]
    "first.notes['by']": lambda net: _put(net.first.notes["by"], 0, 1.0),  # type: ignore[index]
    "first.notes['by'][1]": lambda net: _put(net.first.notes["by"][1], "inner", 1.0),  # type: ignore[index]
    "in_a_tuple[1]": lambda net: net.in_a_tuple[1].clear(),  # type: ignore[attr-defined]
}


def compiled() -> tuple[Net, Any]:
    net = Net().eval().requires_grad_(False)
    return net, ac.compile(net, example_inputs=(torch.randn(3, 6),), device="cpu", store=STORE)


STORE = Store(None)


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_within_what_a_part_holds_is_refused_by_its_path(what: str) -> None:
    net, mine = compiled()
    assert mine.graphs.graphs  # it is programs that run
    x = torch.randn(3, 6)
    torch.testing.assert_close(mine(x), net(x))
    CHANGES[what](net)
    with pytest.raises(UsageError) as refused:
        mine(x)
    assert str(refused.value).startswith((f"{what.strip()} holds something else", f"{what.strip()} was set to something else"))


def test_other_objects_of_equal_value_are_no_change() -> None:
    net, mine = compiled()
    net.steps[0], net.args.scale, net.steps = float("0.5"), float("2.0"), [float("0.5"), float("4.0")]
    net.args.chosen.add(1)
    x = torch.randn(3, 6)
    torch.testing.assert_close(mine(x), net(x))
    net.steps[1] = 1.0  # of the list that stands there now
    with pytest.raises(UsageError, match="steps holds something else"):
        mine(x)


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
        _changed(holder, object())
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


def test_circles_and_what_is_too_much_come_to_an_end() -> None:
    module = nn.Linear(2, 2)
    module.own = [1.0]
    module.own.append(module.own)  # type: ignore[operator, union-attr]
    module.many = [[at] for at in range(2 * MOST)]
    module.less = [[1.0]]
    assert [path for _, path in held_by(module)] == ["own", "less", "less[0]"]
    bound = AsBound(module, with_mode=True)
    module.own[0] = 2.0  # type: ignore[index, operator]
    assert bound.change() == "own holds something else"
