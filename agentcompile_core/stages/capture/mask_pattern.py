"""What an attention mask means, found by asking the function that draws it.

A mask function of transformers answers whether a query sees a key, for indices of a batch, a head, a query and a key. It may close over
tensors that were made in the trace and so hold no numbers: those of which it is known what fills them are replaced while it is asked.
"""

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from transformers import masking_utils

from ...ops.operators import seen
from .known import Known
from .unsupported import Unsupported

PROBES = 61  # rows that are looked at as a whole wherever they lie, and as many borders of chunks
DRAWS = 4  # keys that every row is asked for among all, and as many before it, beside those at its edges
MOST_ANSWERS = 256
NEITHER = "its attention mask is neither causal nor a sliding window nor in chunks"


@frozen
class Pattern:
    """A causal mask: of the last ``window`` positions, of the query's own ``chunk`` of so many positions; 0: of all of them."""

    window: int = 0
    chunk: int = 0


_answers: dict[Any, Pattern] = {}  # by what a mask function is made of, and a length


class _Numbers(TorchFunctionMode):
    """Calls of torch while it is entered see numbers in the place of traced tensors of which ``about`` knows them."""

    def __init__(self, about: Known | None) -> None:
        super().__init__()
        self._about = about

    def __torch_function__(self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        args = tuple([self._given(each) for each in args])
        kwargs = {name: self._given(each) for name, each in (kwargs or {}).items()}
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs)

    def _given(self, value: Any) -> Any:
        """A mask is asked by thousands of calls, few of which are given anything but tensors and numbers."""
        if isinstance(value, Tensor):
            return self._numbers(value)
        return value if isinstance(value, (int, float, str, torch.dtype)) else pytree.tree_map_only(Tensor, self._numbers, value)

    def _numbers(self, tensor: Tensor) -> Tensor:
        found = self._about.filled_with(tensor) if self._about is not None else None
        if found is not None:
            return torch.full(tensor.shape, found, dtype=tensor.dtype)
        if type(tensor) is not Tensor or tensor.device.type != "cpu":
            raise Unsupported("its attention mask is drawn by tensors whose values a trace does not know")
        return tensor


def pattern_of(mask_function: Callable[..., Any], length: int, about: Known | None = None) -> Pattern:
    """What ``mask_function`` draws over ``length`` positions; a window or chunk as long as that is none.

    Functions of transformers that are made of the same numbers are asked once: every trace of a model makes them anew.

    Raises:
        Unsupported: neither a causal mask, nor one in a sliding window or in chunks; or one of tensors that are not known.
    """
    made_of = _made_of(mask_function, about)
    if made_of is None:
        return _asked(mask_function, length, about)
    found = _answers.get((made_of, length))
    if found is None:
        found = _asked(mask_function, length, about)
        if len(_answers) >= MOST_ANSWERS:
            _answers.clear()
        _answers[made_of, length] = found
    return found


def _made_of(value: Any, about: Known | None) -> Any:
    """What a mask function of transformers is made of: its code, and what it closes over; None where anything else may have a say."""
    if isinstance(value, bool | int | None):
        return type(value), value
    if isinstance(value, Tensor):
        filled = about.filled_with(value) if about is not None else None
        return None if filled is None else (filled, tuple(value.shape), value.dtype)
    if isinstance(value, tuple):
        parts = tuple(_made_of(each, about) for each in value)
    elif isinstance(value, FunctionType) and value.__globals__ is vars(masking_utils) and not (value.__defaults__ or value.__kwdefaults__):
        parts = (value.__code__, *(_made_of(cell.cell_contents, about) for cell in value.__closure__ or ()))
    else:
        return None
    return None if None in parts else parts


def _asked(mask_function: Callable[..., Any], length: int, about: Known | None) -> Pattern:
    with _disable_current_modes(), _Numbers(about):
        columns, zero = torch.arange(length), torch.tensor(0)

        def asked(queries: Tensor, keys: Tensor) -> Tensor:
            return torch.as_tensor(mask_function(zero, zero, queries, keys)).expand(length)

        size = int(asked(columns, zero).sum())  # how many queries see the first key
        if size == length:
            found = Pattern()
        elif size and int(asked(torch.tensor(size), columns).sum()) == 1 and size > 1:
            found = Pattern(chunk=size)  # the first query that does not see it sees itself alone
        else:
            found = Pattern(window=size)
        for position in _probes(size, length, in_chunks=bool(found.chunk)):
            at = torch.tensor(position)
            if not size or not torch.equal(asked(at, columns), seen(at, columns, found.window, found.chunk)):
                raise Unsupported(NEITHER)
        if not _holds_of_all_rows(asked, found, length):
            raise Unsupported(NEITHER)
        return found


def _holds_of_all_rows(asked: Callable[[Tensor, Tensor], Tensor], found: Pattern, length: int) -> bool:
    """Whether every row sees what the pattern says around both of its edges, and at keys that are drawn: a few questions over all rows,
    since what is wrong of few rows may lie between probes."""
    rows, generator = torch.arange(length), torch.Generator().manual_seed(length)
    edges = [rows, *([rows - found.window] if found.window else []), *([rows - rows % found.chunk] if found.chunk else [])]
    drawn = [torch.randint(length, (length,), generator=generator) for _ in range(DRAWS)]
    keys = [*(edge + by for edge in edges for by in (-1, 0, 1)), *drawn, *(each % (rows + 1) for each in drawn)]
    inside = (each.clamp(0, length - 1) for each in keys)
    return all(torch.equal(asked(rows, at), seen(rows, at, found.window, found.chunk)) for at in inside)


def _probes(size: int, length: int, in_chunks: bool) -> list[int]:
    """Rows near the edges of windows and chunks of ``size``, and a spread of others: prefix masks and others differ somewhere there."""
    size = max(size, 1)
    borders = range(size, length if in_chunks else 0, size * max(1, length // size // PROBES))
    near = {border + by for border in (size, 2 * size, *borders) for by in (-1, 0, 1)}
    return sorted(p for p in {0, 1, *near, length - 1, *range(0, length, max(1, length // PROBES))} if 0 <= p < length)
