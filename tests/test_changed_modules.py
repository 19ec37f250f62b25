"""A plain module that is changed after it was compiled: what is written in place is followed, what is replaced is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.store import Store


class Net(nn.Module):
    """Has one of each: parameters, buffers, parts, and attributes of its own that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)
        self.scale, self.axes, self.name = 0.5, (0, 1), "x"
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.norm(self.first(x))) * self.scale + self.shift)


def _hooked(net: Net) -> None:
    net.norm.register_forward_hook(lambda module, inputs, result: result + 1.0)


def _moved(net: Net) -> None:
    net.first.weight.data = net.first.weight.data * 2.0


def _turned(net: Net) -> None:
    net.second.weight.data = net.second.weight.data.view(-1).view(5, 4).t()


def _narrowed(net: Net) -> None:
    net.first.bias.data = net.first.bias.data[:1]


def _reread(net: Net) -> None:
    net.norm.weight.data = net.norm.weight.data.view(torch.int32)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "norm.weight": _reread,
    "first.weight": lambda net: setattr(net.first, "weight", nn.Parameter(torch.randn(5, 6))),
    "first.weight ": _moved,
    "second.weight": _turned,
    "first.bias ": _narrowed,
    "first.bias": lambda net: setattr(net.first, "bias", None),
    "shift": lambda net: setattr(net, "shift", torch.zeros(4)),
    "norm.eps": lambda net: setattr(net.norm, "eps", 0.5),
    "scale": lambda net: setattr(net, "scale", 0.25),
    "axes": lambda net: setattr(net, "axes", (1, 0)),
    "training": lambda net: net.train(),
    "second": lambda net: setattr(net, "second", nn.Linear(5, 4)),
    "norm": _hooked,
    "second ": lambda net: setattr(net.second, "forward", lambda x: x[:, :4]),
    "shift ": lambda net: net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True),
}


def compiled() -> tuple[Net, Any]:
    net = Net().eval().requires_grad_(False)
    return net, ac.compile(net, example_inputs=(torch.randn(3, 6),), device="cpu", store=STORE, origins=(), validators=())


STORE = Store(None)


@pytest.fixture(scope="module")
def unchanged() -> tuple[Net, Any]:
    return compiled()


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_values_written_in_place_are_followed_and_equal_attributes_are_no_change(unchanged: tuple[Net, Any], data: st.DataObject) -> None:
    net, mine = unchanged
    for name in data.draw(st.lists(st.sampled_from(sorted(net.state_dict())), min_size=1, max_size=4)):
        tensor = dict(net.state_dict())[name]
        tensor.copy_(torch.rand(tensor.shape).to(tensor.dtype))
    net.scale, net.axes = float("0.5"), tuple(range(2))  # other objects of the same value
    x = torch.randn(3, 6)
    torch.testing.assert_close(mine(x), net(x))


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_replaced_is_refused_by_its_name(name: str) -> None:
    net, mine = compiled()
    x = torch.randn(3, 6)
    torch.testing.assert_close(mine(x), net(x))
    CHANGES[name](net)
    with pytest.raises(UsageError, match=rf"{name.strip()}\b.* after .* was compiled.*compile it again"):
        mine(x)


def test_a_parameter_whose_data_was_replaced_stays_a_change_when_it_is_compiled_once_more() -> None:
    """The second program moves the new values to a place of its own; the first one still reads the old ones."""
    net, mine = compiled()
    x = torch.randn(3, 6)
    net.first.weight.data = torch.randn(5, 7)[:, :6]  # no program reads it as it lies, so that the next one moves it
    other = ac.compile(net, example_inputs=(x,), run_on="framework", origins=[], validators=(), store=Store(None))
    torch.testing.assert_close(other(x), net(x))
    with pytest.raises(UsageError, match=r"first\.weight was replaced"):
        mine(x)


def test_a_parameter_that_programs_move_one_after_the_other_is_no_change() -> None:
    net, mine = compiled()
    x = torch.randn(3, 6)
    for _ in range(2):
        net.first.weight.data = net.first.weight.data  # the same memory
        other = ac.compile(net, example_inputs=(x,), run_on="framework", origins=[], validators=(), store=Store(None))
        torch.testing.assert_close(other(x), net(x))
        torch.testing.assert_close(mine(x), net(x))


def test_a_change_that_was_undone_is_none() -> None:
    net, mine = compiled()
    x, before = torch.randn(3, 6), net.second
    net.train()
    net.second = nn.Linear(5, 4)
    with pytest.raises(UsageError):
        mine(x)
    net.second = before
    net.eval()
    torch.testing.assert_close(mine(x), net(x))
