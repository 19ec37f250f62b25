"""What is known of tensors while a model is traced: the range of what is counted from the position, and which are all ones or zeros.

Models ask such things of themselves: whether a table of positions is long enough, whether a mask hides anything. A trace has
no numbers to answer with, but every position lies inside the context that is asked for, and what a model makes as ones are ones.
"""

import builtins
from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .storages import storage_of

_SUMS = {"add": 1, "__add__": 1, "__radd__": 1, "sub": -1, "__sub__": -1}
_REVERSED = ("rsub", "__rsub__")
_ORDERS: dict[str, Callable[["Span", "Span"], bool | None]] = {
    "gt": lambda a, b: _decided(a.low > b.high, a.high <= b.low), "ge": lambda a, b: _decided(a.low >= b.high, a.high < b.low),
    "lt": lambda a, b: _decided(a.high < b.low, a.low >= b.high), "le": lambda a, b: _decided(a.high <= b.low, a.low > b.high),
}
_MADE = {"ones": 1, "new_ones": 1, "ones_like": 1, "zeros": 0, "new_zeros": 0, "zeros_like": 0}  # and what every element is
_KEEPING = ("to", "bool", "int", "long", "float", "half", "bfloat16", "type_as", "clone", "contiguous", "expand", "unsqueeze", "detach",
            "repeat", "__getitem__")


@frozen
class Span:
    """A number that lies in ``low`` .. ``high``, both included."""

    low: int
    high: int


def _decided(yes: bool, no: bool) -> bool | None:
    return True if yes else False if no else None


def writes(name: str) -> bool:
    """Whether a call of this name writes its first operand."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or (name.startswith("__i") and name != "__invert__")


def _may_share(written: object, other: Tensor) -> bool:
    """Whether a write to ``written`` may change ``other``."""
    lying = {storage_of(written), storage_of(other)} if isinstance(written, Tensor) else {None}
    return None in lying or len(lying) == 1


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


class Known(TorchFunctionMode):
    """Watches calls of torch while it is entered; answers ``bool(tensor)`` where a span decides a comparison."""

    def __init__(self) -> None:
        super().__init__()
        self._facts: dict[int, tuple[Tensor, Span | bool]] = {}  # of a tensor, which is kept: a span, or the truth of a comparison
        self._behind: dict[int, tuple[Tensor, Tensor, int]] = {}  # of a tensor, which is kept: another, and how much more it is
        self._filled: dict[int, tuple[Tensor, int]] = {}  # of a tensor, which is kept: what each of its elements is

    def lies_in(self, number: Tensor, low: int, high: int) -> Tensor:
        """Say that the one element of ``number`` lies in ``low`` .. ``high``."""
        self._facts[id(number)] = (number, Span(low, high))
        return number

    def is_ones(self, value: object) -> bool:
        """Whether ``value`` was made as ones and only cast, cut or expanded since."""
        return self.filled_with(value) == 1

    def filled_with(self, value: object) -> int | None:
        """The number that ``value`` was made of, and only cast, cut or expanded since; None where that is not known."""
        return self._filled[id(value)][1] if id(value) in self._filled else None

    def __torch_function__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__bool__" and isinstance(truth := self._fact(args[0]), bool):
            return truth
        if name == "__getitem__" and len(args) == 2:
            args = (args[0], self._fixed(args[1]))
        if func is torch.arange and len(args) == 2 and (count := self._distance(*args)) is not None:
            return torch.arange(count, **(kwargs or {})) + args[0]  # as many numbers from any position on
        if func is torch.ones:
            args = tuple(self._longest(one) for one in args)
        if func is torch.tensor and isinstance(args[0], int | float) and _is_meta((kwargs or {}).get("device")):
            # A literal without data would be lost; a filled tensor says what it is.
            func, args = torch.full, ((), args[0])
            kwargs = {"dtype": torch.tensor(args[1]).dtype, **(kwargs or {})}
        result = func(*args, **(kwargs or {}))
        if writes(name) or (kwargs and "out" in kwargs):
            self._forget(kwargs["out"] if kwargs and "out" in kwargs else args[0])
        elif isinstance(result, Tensor):
            self._learn(name, args, kwargs or {}, result)
        return result

    def _forget(self, written: object) -> None:
        """What is written may be a view of anything that lies where it does."""
        self._filled = {key: fact for key, fact in self._filled.items() if not _may_share(written, fact[0])}
        self._facts = {key: fact for key, fact in self._facts.items() if not _may_share(written, fact[0])}
        self._behind = {key: fact for key, fact in self._behind.items() if not any(_may_share(written, one) for one in fact[:2])}

    def _learn(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        number = _MADE[name] if name in _MADE else self.filled_with(args[0]) if name in _KEEPING and args else None
        if number is not None:
            self._filled[id(result)] = (result, number)
        if name == "clamp":
            fact: Span | bool | None = self._clamped(*args, **kwargs)
        else:
            fact = self._derived(name.strip("_") if name.strip("_") in _ORDERS else name, args) if len(args) == 2 and not kwargs else None
        if fact is not None:
            self._facts[id(result)] = (result, fact)
        if _SUMS.get(name) and len(args) == 2 and not kwargs:
            self._learn_distance(_SUMS[name], *args, result)

    def _learn_distance(self, sign: int, a: Any, b: Any, result: Tensor) -> None:
        if sign == 1 and isinstance(a, int):
            a, b = b, a
        if isinstance(b, int) and (begins := self._begins(a)) is not None:
            self._behind[id(result)] = (result, begins[0], begins[1] + sign * b)

    def _begins(self, value: object) -> tuple[Tensor, int] | None:
        """A number of the trace as another one and how much it is more than that."""
        if not isinstance(value, Tensor) or not isinstance(self._fact(value), Span):
            return None
        return self._behind[id(value)][1:] if id(value) in self._behind else (value, 0)

    def _distance(self, first: object, last: object) -> int | None:
        """How much ``last`` is more than ``first``, where that is the same at every position."""
        a, b = self._begins(first), self._begins(last)
        return b[1] - a[1] if a is not None and b is not None and a[0] is b[0] else None

    def _derived(self, name: str, args: tuple[Any, ...]) -> Span | bool | None:
        a, b = (self._fact(one) for one in args)
        if not isinstance(a, Span) or not isinstance(b, Span):
            return None
        if name in _REVERSED:
            a, b = b, a
        if name in _ORDERS:
            return _ORDERS[name](a, b)
        if name in _REVERSED or _SUMS.get(name) == -1:
            return Span(a.low - b.high, a.high - b.low)
        return Span(a.low + b.low, a.high + b.high) if name in _SUMS else None

    def _clamped(self, value: object, min: object = None, max: object = None) -> Span | None:
        span = self._fact(value)
        if not isinstance(span, Span) or any(one is not None and not isinstance(one, int) for one in (min, max)):
            return None
        ends = [span.low, span.high]
        if isinstance(min, int):
            ends = [builtins.max(end, min) for end in ends]
        if isinstance(max, int):
            ends = [builtins.min(end, max) for end in ends]
        return Span(ends[0], ends[1])

    def _longest(self, size: Any) -> Any:
        """A size with the most in the place of what is counted from the position: ones over all that may be cached hide none of it."""
        if isinstance(size, tuple | list):
            return type(size)(self._longest(one) for one in size)
        counted = isinstance(size, Tensor) and (begins := self._begins(size)) is not None and begins[0] is not size
        return self._fact(size).high if counted else size  # type: ignore[union-attr]

    def _fixed(self, index: Any) -> Any:
        """An index with the number in the place of every tensor that can only be that one."""
        if isinstance(index, tuple):
            return tuple(self._fixed(one) for one in index)
        if isinstance(index, slice):
            return slice(self._fixed(index.start), self._fixed(index.stop), self._fixed(index.step))
        span = self._fact(index) if isinstance(index, Tensor) else None
        return span.low if isinstance(span, Span) and span.low == span.high else index

    def _fact(self, value: object) -> Span | bool | None:
        if isinstance(value, int) and not isinstance(value, bool):
            return Span(value, value)
        return self._facts[id(value)][1] if isinstance(value, Tensor) and id(value) in self._facts else None


_active: list[Known] = []


class knowing:
    """Enter a ``Known``, which ``known`` finds."""

    def __enter__(self) -> Known:
        _active.append(Known())
        return _active[-1].__enter__()

    def __exit__(self, *exc: Any) -> None:
        _active.pop().__exit__(*exc)


def known() -> Known | None:
    """What is known in the trace that runs; None outside of one."""
    return _active[-1] if _active else None
