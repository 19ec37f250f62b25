"""One plain module with the calls that it is compiled for and judged by."""

from collections.abc import Callable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
CASES: dict[str, "Case"] = {}


@frozen(kw_only=True)
class Case:
    """``build`` makes the module; ``call`` the arguments of one call from a generator, by position and by name."""

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[torch.Generator], Call]

    def module(self) -> nn.Module:
        """The module in evaluation mode, always with the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return self.build().eval().requires_grad_(False)

    def arguments(self, seed: int) -> Call:
        """The arguments of one call; other seeds give other numbers of the same shapes and types."""
        return self.call(torch.Generator().manual_seed(seed))


def randn(*shape: int) -> Callable[[torch.Generator], Tensor]:
    """A drawer of normal float32 tensors."""
    return lambda generator: torch.randn(shape, generator=generator)


def integers(high: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    """A drawer of int64 tensors below ``high``."""
    return lambda generator: torch.randint(high, shape, generator=generator)


def drawn(value: Any, generator: torch.Generator) -> Any:
    """``value`` with its drawers drawn, in containers too; everything else as it is."""
    if isinstance(value, tuple | list):
        return type(value)(drawn(item, generator) for item in value)
    if isinstance(value, dict):
        return {name: drawn(item, generator) for name, item in value.items()}
    return value(generator) if callable(value) else value


def add(name: str, build: Callable[[], nn.Module], *args: Any, **keywords: Any) -> None:
    """Register a module called ``name``; arguments are values or drawers."""
    CASES[name] = Case(name=name, build=build, call=lambda g: (drawn(args, g), drawn(keywords, g)))


class Of(nn.Module):
    """A module that is one function, with parts that it may use."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """What the function returns; the module itself is its first argument where it has parts."""
        return self.function(self, *args, **keywords) if len(self._modules) else self.function(*args, **keywords)


def function(name: str, call: Callable[..., Any], *args: Any, **keywords: Any) -> None:
    """Register a module that is one function of its arguments."""
    add(name, lambda: Of(call), *args, **keywords)
