"""What a module, an object that it holds or a class of theirs is given after it was compiled, where its forward asks for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from agentcompile_core import api
from agentcompile_core.errors import UsageError
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.store import Store

CATALOG = load_catalog(only=())
X = torch.linspace(-2.0, 2.0, 12).reshape(3, 4)


def made() -> tuple[nn.Module, Any]:
    """A module that asks for values in all ways, and the class of an object that it holds."""
    class Helper:
        shift = 0.25

    class Base(nn.Module):
        scale = 0.5
        notes: tuple[str, ...] = ()

    class Module(Base):
        def __init__(self) -> None:
            super().__init__()
            self.helper = Helper()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.turned(x * self.scale + self.helper.shift)
            if hasattr(self, "gain"):
                x = x * self.gain
            if getattr(self, "inner", None) is not None:
                x = self.inner(x)
            added = [self.bias for _ in range(1) if hasattr(self, "bias")]
            return x + added[0] if added else x

        def turned(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    return Module(), Helper


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "a value of its class, for itself": lambda module, helper: setattr(module, "scale", 2.0),
    "a value of its class, for all": lambda module, helper: setattr(type(module), "scale", 2.0),
    "a value of a base of its class": lambda module, helper: setattr(type(module).__base__, "scale", 2.0),
    "a value of an object's class, for itself": lambda module, helper: setattr(module.helper, "shift", 2.0),
    "a value of an object's class, for all": lambda module, helper: setattr(helper, "shift", 2.0),
    "a number that it looks for": lambda module, helper: setattr(module, "gain", 2.0),
    "a tensor that it looks for": lambda module, helper: setattr(module, "gain", torch.tensor(2.0)),
    "a part that it looks for": lambda module, helper: setattr(module, "inner", nn.Linear(4, 4)),
    "a parameter that it looks for": lambda module, helper: setattr(module, "bias", nn.Parameter(torch.ones(4))),
    "a buffer that it looks for": lambda module, helper: module.register_buffer("bias", torch.ones(4)),
    "a method of its own, for itself": lambda module, helper: setattr(module, "turned", torch.abs),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_forward_asks_for_is_seen_where_it_comes_later(change: str) -> None:
    module, helper = made()
    compiled = api.compile(module, device="cpu", store=Store(None), catalog=CATALOG, example_inputs=(X,))
    before = module(X)
    assert not compiled.graphs.eager_reason and torch.equal(compiled(X), before)
    CHANGES[change](module, helper)
    assert not torch.equal(module(X), before)
    with pytest.raises(UsageError, match="compile it again"):
        compiled(X)


def test_what_no_forward_asks_for_is_no_change() -> None:
    module, helper = made()
    compiled = api.compile(module, device="cpu", store=Store(None), catalog=CATALOG, example_inputs=(X,))
    module.mine, helper.__doc__ = "a note of somebody else's", "another text"
    module.register_buffer("somebody_elses", torch.ones(1))
    assert torch.equal(compiled(X), module(X))
