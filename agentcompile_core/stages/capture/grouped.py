"""Experts that a model dispatches to itself, seen during capture: each row with its own expert, as one ``agentcompile.expert_linear``.

Two ways are understood. A loop over the experts that were chosen, which picks the rows of one, computes them with its matrices and adds
them up (DBRX, LongCat): it is run for every expert on all choices of all rows, where a matrix of one expert stands for that of each row's
own, so that all runs call the same, and what they call is called once. Rows that are sorted by expert, split into those of each and joined
again (JetMoE): no part is multiplied by itself, but all rows with the matrices of their own experts. What a trace has no numbers for is
never asked: how many rows an expert has. That rows are computed apart from each other is not checked here; every graph is compared.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NoReturn

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from ...ops import operators as operators
from .known import writes
from .unsupported import Unsupported

_NOT_UNDERSTOOD = "it dispatches to its experts in a way that is not understood"
_TURNS = ("T", "t", "mT", "transpose", "swapaxes")
_PRODUCTS = ("linear", "matmul", "__matmul__", "mm")


class _Standin:
    """What torch takes for a tensor, so that it asks who watches its calls."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        raise Unsupported(_NOT_UNDERSTOOD)


@frozen(eq=False)
class Choices:
    """Which experts were chosen: ``index`` i64 [T, S] of T rows; and of each of the T * S choices the expert, the row and the slot."""

    index: Tensor
    experts: Tensor
    rows: Tensor
    slots: Tensor

    @classmethod
    def of(cls, index: Tensor) -> "Choices":
        """Those that ``index`` makes, in its order."""
        (rows, slots), device = index.shape, index.device
        return cls(index, index.reshape(-1), torch.arange(rows, device=device).repeat_interleave(slots),
                   torch.arange(slots, device=device).repeat(rows))


@frozen(eq=False)
class Own(_Standin):
    """One of the matrices ``stack`` [E, ...], of the expert whose turn it is; ``turned``: transposed."""

    stack: Tensor
    turned: bool
    loop: "Hits"

    def __getattr__(self, name: str) -> Any:
        """Its transposes; anything else is not understood."""
        if name not in _TURNS or self.stack.dim() != 3:
            raise Unsupported(_NOT_UNDERSTOOD)
        other = evolve(self, turned=not self.turned)
        return other if name in ("T", "mT") else lambda *_: other

    def squeeze(self, *_: Any) -> "Own":
        """Itself: no axis of it has an extent of 1 that matters."""
        return self


class Expert(int):
    """The number of an expert, which a model takes for a tensor of one element."""

    def __getitem__(self, _: int) -> "Expert":
        return self

    def item(self) -> "Expert":
        """The number."""
        return self


@define(eq=False)
class Hits:
    """The experts that were chosen, as a loop over them sees them: all of them, since nobody knows which."""

    choices: Choices
    count: int
    mode: "Grouped"
    turn: int = -1
    made: dict[Any, tuple[Any, Any]] = field(factory=dict)  # of a call in one turn, with what it was given: its result
    taken: dict[Any, tuple[Tensor, Tensor]] = field(factory=dict)  # rows of all choices: what they are taken of, and they
    added: dict[int, tuple[Tensor, Tensor, list[int]]] = field(factory=dict)  # results of rows: to what they are added, by which experts

    def __iter__(self) -> Iterator[Expert]:
        self.mode.loops.append(self)
        try:
            for turn in range(self.count):
                self.turn = turn
                yield Expert(turn)
        finally:
            self.mode.loops.remove(self)
        self._finish()

    def picked(self, given: Tensor, index: Any) -> Tensor | None:
        """What ``index`` picks of ``given`` for every choice: its row, or its own weight; None where it picks something else."""
        rows, slots = self.choices.rows, self.choices.slots
        parts = index if isinstance(index, tuple) else (index,)
        if not parts or parts[0] is not rows:
            return None
        key = (id(given), *map(id, parts))
        if key not in self.taken:
            if len(parts) > 1 and parts[1] is slots and given.shape == self.choices.index.shape:
                found = given.reshape(-1)[(slice(None), *parts[2:])]
            else:
                found = given[index]
            self.taken[key] = (given, found)
        return self.taken[key][1]

    def product(self, name: str, rows: Tensor, own: Own) -> Tensor:
        """Of all choices' ``rows`` with the matrices of their own experts: ``rows @ own^T`` of a linear layer, else ``rows @ own``."""
        experts = self.choices.index
        if own.stack.dim() != 3 or rows.dim() != 2 or rows.shape[0] != experts.numel():
            raise Unsupported(_NOT_UNDERSTOOD)
        transposed = (name == "linear") is own.turned
        if own.stack.shape[0] < self.count:  # others have no matrices, and get those of one that may be chosen for the same row, too
            apart = experts.clamp(max=own.stack.shape[0] - 1).reshape(-1, 1)
            return _products(rows[:, None], own.stack, apart, transposed).flatten(0, 1)
        whole = next((given for given, found in self.taken.values() if found is rows and given.shape[0] == experts.shape[0]), None)
        x = rows.unflatten(0, tuple(experts.shape)) if whole is None else whole[:, None]
        return _products(x, own.stack, experts, transposed).flatten(0, 1)

    def _finish(self) -> None:
        """Add up what every row's own experts made of it."""
        if not self.added or len({id(total) for total, _, _ in self.added.values()}) > 1:
            raise Unsupported(_NOT_UNDERSTOOD)
        (total, rows, _), *others = self.added.values()
        for _, different, experts in others:
            first, last = experts[0], experts[-1]
            if experts != list(range(first, last + 1)):
                raise Unsupported(_NOT_UNDERSTOOD)
            is_one = (self.choices.experts >= first) & (self.choices.experts <= last)
            rows = torch.where(is_one[:, None], different, rows)
        total.add_(rows.unflatten(0, tuple(self.choices.index.shape)).sum(dim=1).to(total.dtype))


@frozen(eq=False)
class Count:
    """A number that a trace does not know: the one at ``index`` of ``counts`` i64 [E]."""

    counts: Tensor
    index: int

    def _asked(self, *_: Any) -> NoReturn:
        raise Unsupported("a number is made from data")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = __mod__ = _asked
    __bool__ = __index__ = __int__ = __float__ = __lt__ = __gt__ = __le__ = __ge__ = _asked


def _counts(sizes: Any) -> Tensor | None:
    """The tensor of which ``sizes`` are the numbers, all of them in order."""
    if not isinstance(sizes, list | tuple) or not sizes or not all(isinstance(size, Count) for size in sizes):
        return None
    counts: Tensor = sizes[0].counts
    whole = all(size.counts is counts and size.index == at for at, size in enumerate(sizes)) and len(sizes) == counts.shape[0]
    return counts if whole else None


@frozen(eq=False)
class Part(_Standin):
    """The rows of one expert among ``rows``, sorted by expert."""

    rows: Tensor
    counts: Tensor
    expert: int


class Grouped(TorchFunctionMode):
    """Watches calls of torch while it is entered."""

    _WATCHED: ClassVar[frozenset[str]] = frozenset({
        "topk", "one_hot", "permute", "nonzero", "unbind", "item", "tolist", "split", "cat", "__getitem__", *_PRODUCTS})

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[Hits] = []
        self._bounds: dict[int, tuple[Tensor, int]] = {}  # of indices: what they are below
        self._masks: dict[int, tuple[Tensor, Choices | Tensor]] = {}  # of one-hot masks [T, S, E], or of these turned [E, S, T]
        self._numbers: dict[int, tuple[Tensor, Count]] = {}  # of an element of a tensor of counts
        self._single: dict[int, tuple[Tensor, Tensor, int]] = {}  # of one of several matrices: all of them, and which
        self._multiplied: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}  # of sorted rows and matrices: with both, the products

    def __torch_function__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self.loops and args:
            return self._in_turn(self.loops[-1], func, name, args, kwargs)
        if name not in self._WATCHED or not args:
            return func(*args, **kwargs)
        if name == "tolist" and _is_unknown(args[0]) and args[0].dim() == 1 and not args[0].is_floating_point():
            return [Count(args[0], index) for index in range(args[0].shape[0])]
        if name == "item" and id(args[0]) in self._numbers:
            return self._numbers[id(args[0])][1]
        if name == "nonzero" and (found := self._hits(args[0])) is not None:
            return found
        if name == "split" and len(args) > 1 and (counts := _counts(args[1])) is not None:
            return self._split(args[0], counts, *args[2:], **kwargs)
        if name == "linear" and isinstance(args[0], Part):
            return self._multiply(*args, **kwargs)
        if name == "cat" and any(isinstance(part, Part) for part in args[0]):
            return self._join(*args, **kwargs)
        result = func(*args, **kwargs)
        self._learn(name, args, kwargs, result)
        return result

    def _learn(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name == "topk":
            axis = kwargs.get("dim", args[2] if len(args) > 2 else -1)
            self._bounds[id(result[1])] = (result[1], args[0].shape[axis])
        elif name == "one_hot" and args[0].dim() == 2:
            self._masks[id(result)] = (result, args[0])
        elif name == "permute" and id(args[0]) in self._masks and args[1:] in ((2, 1, 0), ((2, 1, 0),)):
            self._masks[id(result)] = (result, Choices.of(self._masks[id(args[0])][1]))  # type: ignore[arg-type]
        elif name == "unbind" and _is_unknown(args[0]) and args[0].dim() == 1 and not args[0].is_floating_point():
            self._numbers |= {id(one): (one, Count(args[0], index)) for index, one in enumerate(result)}
        elif name == "__getitem__" and isinstance(args[1], int) and isinstance(args[0], Tensor) and args[0].dim() == 3:
            self._single[id(result)] = (result, args[0], args[1])

    # Loops over experts

    def _hits(self, chosen: Tensor) -> Hits | None:
        masks = [(mask, what) for mask, what in self._masks.values() if isinstance(what, Choices) and chosen.shape == mask.shape[:1]]
        if not masks or not _is_unknown(chosen):
            return None
        choices = masks[-1][1]
        assert isinstance(choices, Choices)
        _, below = self._bounds.get(id(choices.index), (choices.index, chosen.shape[0]))  # a mask may have room for an expert that is none
        return Hits(choices, min(below, chosen.shape[0]), self)

    def _in_turn(self, loop: Hits, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "__getitem__" and isinstance(args[1], int) and args[1] is not True and args[1] == loop.turn:
            return Own(args[0], False, loop)
        if name == "where" and len(args) == 1 and isinstance(args[0], Own):
            if self._masks.get(id(args[0].stack), (None, None))[1] is not loop.choices:
                raise Unsupported(_NOT_UNDERSTOOD)
            return loop.choices.slots, loop.choices.rows
        if name == "index_add_":
            return self._add(loop, *args, **kwargs)
        if writes(name):  # what one expert would overwrite is another's, too
            raise Unsupported(_NOT_UNDERSTOOD)
        if name == "__getitem__" and (picked := loop.picked(*args)) is not None:
            return picked
        key = (func, _said(args), _said(kwargs))
        if key not in loop.made:
            multiplies = name in _PRODUCTS and len(args) == 2 and isinstance(args[1], Own) and not kwargs
            result = loop.product(name, *args) if multiplies else func(*args, **kwargs)
            loop.made[key] = ((args, kwargs), result)
        return loop.made[key][1]

    def _add(self, loop: Hits, total: Tensor, dim: int, index: Any, rows: Tensor) -> Tensor:
        if dim != 0 or index is not loop.choices.rows:
            raise Unsupported(_NOT_UNDERSTOOD)
        loop.added.setdefault(id(rows), (total, rows, []))[2].append(loop.turn)
        return total

    # Rows in the order of experts

    def _split(self, rows: Tensor, counts: Tensor, dim: int = 0) -> list[Part]:
        if dim != 0:
            raise Unsupported(_NOT_UNDERSTOOD)
        return [Part(rows, counts, expert) for expert in range(counts.shape[0])]

    def _multiply(self, part: Part, weight: Tensor, bias: Tensor | None = None) -> Part:
        _, stack, number = self._single.get(id(weight), (weight, weight, -1))
        if number != part.expert or bias is not None or stack.shape[0] != part.counts.shape[0]:
            raise Unsupported(_NOT_UNDERSTOOD)
        key = (id(part.rows), id(stack))
        if key not in self._multiplied:
            ends, numbers = part.counts.cumsum(0), torch.arange(part.rows.shape[0], device=part.rows.device)
            experts = (numbers[:, None] >= ends[None, :]).sum(dim=1)
            # The choices of one token are of different experts, and its layer is read as one; those of several may be of the same.
            axis = 0 if any(chosen.shape == (1, len(experts)) for chosen, _ in self._bounds.values()) else 1
            products = _products(part.rows.unsqueeze(axis), stack, experts.unsqueeze(axis), transposed=False).squeeze(axis)
            self._multiplied[key] = (part.rows, stack, products)
        return evolve(part, rows=self._multiplied[key][2])

    def _join(self, parts: Any, dim: int = 0) -> Tensor:
        first = parts[0]
        alike = all(isinstance(part, Part) and part.rows is first.rows and part.counts is first.counts for part in parts)
        if dim != 0 or not alike or [part.expert for part in parts] != list(range(first.counts.shape[0])):
            raise Unsupported(_NOT_UNDERSTOOD)
        rows: Tensor = first.rows
        return rows


def _products(x: Tensor, stack: Tensor, experts: Tensor, transposed: bool) -> Tensor:
    found: Tensor = torch.ops.agentcompile.expert_linear.default(x, stack, experts, None, transposed)
    return found


def _is_unknown(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and (isinstance(tensor, FakeTensor) or tensor.is_meta)


def _said(value: Any) -> Any:
    """What tells two calls of a turn apart: tensors by which they are, matrices of an expert by which they are one of."""
    if isinstance(value, Own):
        return "own", id(value.stack), value.turned
    if isinstance(value, Tensor):
        return "tensor", id(value)
    if isinstance(value, dict):
        return tuple((key, _said(one)) for key, one in value.items())
    return tuple(_said(one) for one in value) if isinstance(value, list | tuple) else (type(value), repr(value))
