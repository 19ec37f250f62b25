"""Whatever runs in a block, in other floating point types than it names: a model and its graphs in float64, without a copy of either.

Parameters are converted where an operator reads them, so that no more than one operator's are held twice. Types that a model names in its
code (``.float()`` in a norm, float32 in a softmax) are exchanged too; a copy of its parameters in float64 would go on in float32 there.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...ops.operators import NAMESPACE, body_of
from .left_behind import written_by
from .storages import storage_of

Types = Mapping[torch.dtype, torch.dtype]

# What reads a few of many rows does so in the type that they lie in: a table of embeddings in float64 may be several GiB.
_LOOKUPS = {"aten::embedding", "aten::index_select", "aten::index.Tensor", "aten::gather"}
_FRESH = "aten::lift_fresh"  # a tensor that Python made of numbers
_MOVED = "aten::to.dtype_layout"  # to another device; torch itself names the type that the tensor has
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_GROUPED = "aten::_grouped_mm"  # which torch has for bfloat16 alone


class Retyped(TorchDispatchMode):
    """A block in which ``types`` says what stands for what, for the tensors of ``given`` and for all that is made of them.

    One type may stand for another and have a third one for itself (float32 for bfloat16, float64 for float32): then tensors say the type
    that they stand for. To floats of ``given`` nothing may be written; other tensors that come from outside of the block are taken for
    stand-ins where their type is one.
    """

    def __init__(self, types: Types, given: Iterable[Tensor], scaled: Iterable[Tensor] = (), factor: float = 1.0) -> None:
        """What is read of the floats of ``scaled``, some of ``given``, is ``factor`` times what they hold."""
        super().__init__()
        self._scaled, self._factor = {storage_of(t) for t in scaled} - {None}, factor
        self._types, self._stand_ins = types, set(types.values())
        self._given = {storage_of(t) for t in given} - {None}
        self._saying = _Saying({stand_in: own for own, stand_in in types.items()}, self._given) if self._stand_ins & types.keys() else None

    def __enter__(self) -> "Retyped":
        """Begin the block."""
        if self._saying is not None:
            self._saying.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """End it."""
        super().__exit__(*raised)
        if self._saying is not None:
            self._saying.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run ``func`` on what stands for its arguments.

        Raises:
            NotImplementedError: it would write to a float of ``given``.
        """
        kwargs, known = kwargs or {}, _known(func)
        with torch._C.DisableTorchFunction():
            first = next(_tensors((*args, *kwargs.values())), None)
            if first is None or known.is_fresh or (known.leaves_types and self._is_given(first) and not _dtypes(args, kwargs)):
                is_scaled = first is not None and storage_of(first) in self._scaled
                return pytree.tree_map_only(Tensor, lambda made: self._made(made, is_scaled), func(*args, **kwargs))
            if known.writes and any(t.is_floating_point() and self._is_given(t) for t in written_by(func, args, kwargs)):
                raise NotImplementedError(f"{func} writes to a tensor of the model")
            types = {} if known.is_ours or known.moves else self._types
            args = tuple(self._stand_in(argument, types) for argument in args)
            kwargs = {name: self._stand_in(argument, types) for name, argument in kwargs.items()}
            if not known.is_ours:
                return _grouped(*args, **kwargs) if known.is_grouped else func(*args, **kwargs)
        with self:  # an operator of ours is what its body computes, which names types itself
            return body_of(func.name())(*args, **kwargs)

    def _is_given(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._given

    def _stand_in(self, argument: Any, types: Types) -> Any:
        """What stands for an argument; for types by themselves ``types`` says it."""
        if isinstance(argument, Tensor):
            dtype = argument.dtype
            if dtype not in self._types or (dtype in self._stand_ins and not self._is_given(argument)):
                return argument
            return self._converted(argument, storage_of(argument) in self._scaled)
        if isinstance(argument, (list, tuple)):
            return [self._stand_in(one, types) for one in argument]
        return types.get(argument, argument) if isinstance(argument, torch.dtype) else argument

    def _made(self, tensor: Tensor, is_scaled: bool) -> Tensor:
        """What an operator made without looking at types; views of what is given stay what they are, so that writing to them is seen."""
        return tensor if self._is_given(tensor) else self._converted(tensor, is_scaled)

    def _converted(self, tensor: Tensor, is_scaled: bool) -> Tensor:
        if tensor.dtype not in self._types:
            return tensor
        made = tensor.to(self._types[tensor.dtype])
        return made * self._factor if is_scaled else made


class _Saying(TorchFunctionMode):
    """A block in which tensors say the type that they stand for, which the code of a model passes on (``x.to(y.dtype)``)."""

    def __init__(self, own: Types, given: set[int | None]) -> None:
        super().__init__()
        self._own, self._given = own, given

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call ``func``."""
        if func != _DTYPE:  # a new object each time
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():  # not by another block of the same, around an operator of ours
            found = args[0].dtype
            return found if storage_of(args[0]) in self._given else self._own.get(found, found)


@frozen
class _Known:
    """What an operator does. ``leaves_types``: it gives a view, or a few of many rows; ``moves``: to a device."""

    is_fresh: bool
    is_ours: bool
    is_grouped: bool
    moves: bool
    writes: bool
    leaves_types: bool


@cache
def _known(func: Any) -> _Known:
    name, returns, arguments = func.name(), func._schema.returns, func._schema.arguments
    is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
    return _Known(is_fresh=name == _FRESH, is_ours=name.startswith(NAMESPACE), is_grouped=name == _GROUPED, moves=name == _MOVED,
                  writes=writes, leaves_types=is_view or name in _LOOKUPS)


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _dtypes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(argument, torch.dtype) for argument in (*args, *kwargs.values()))


def _grouped(rows: Tensor, matrices: Tensor, offs: Tensor, bias: None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows [R, K] up to each of ``offs`` [E] times the next one of ``matrices`` [E, K, N]; zeros behind the last one."""
    if rows.dim() != 2 or matrices.dim() != 3 or bias is not None:
        raise NotImplementedError("a grouped product of another form")
    out, first = rows.new_zeros(rows.shape[0], matrices.shape[2], dtype=out_dtype or rows.dtype), 0
    for matrix, last in zip(matrices, offs.tolist(), strict=True):
        out[first:last], first = rows[first:last] @ matrix, last
    return out
