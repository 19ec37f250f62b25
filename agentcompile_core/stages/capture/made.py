"""What an operator makes of tensors without memory, computed once for all operands that look the same.

Kernels for such tensors are Python, and half of the time of a run. Their results are shapes, strides and types, and made of nothing else.
"""

from collections.abc import Iterable
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.utils import _pytree as pytree

from .storages import storage_of

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class _Unseen(Exception):
    """An argument of which more than its look may matter."""


@define
class Made:
    """Calls of one run, in which settings of torch that kernels ask for stay what they are; the default type is looked at."""

    _known: dict[Any, tuple[type, tuple[_Layout, ...]]] = field(factory=dict)

    def of(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``operator`` returns: tensors of the same layout as it made of like operands before, or it is called."""
        try:
            key = (operator, torch.get_default_dtype(), _look(args), _look(tuple(kwargs.items())))
        except _Unseen:
            return operator(*args, **kwargs)
        if key in self._known:
            kind, layouts = self._known[key]
            made = [torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in layouts]
            return made[0] if kind is Tensor else made if kind is list else tuple(made)
        result = operator(*args, **kwargs)
        results = (result,) if isinstance(result, Tensor) else result
        if _is_new(operator, results, (args, kwargs)):
            kind = Tensor if isinstance(result, Tensor) else type(result)
            self._known[key] = kind, tuple((one.shape, one.stride(), one.dtype) for one in results)
        return result


def _look(value: Any) -> Any:
    """What can be told apart of an argument; 1, 1.0 and True are three, and so are 0.0 and -0.0."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) or not value.is_meta or value.is_complex() or value.layout is not torch.strided:
            raise _Unseen
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if isinstance(value, (tuple, list)):
        return tuple([_look(item) for item in value])
    return type(value), repr(value) if isinstance(value, float) else value


def _is_new(operator: Any, results: Any, given: Any) -> bool:
    """Whether ``results`` are tensors in memory of their own, by the operator's schema and as it is."""
    if any(one.alias_info is not None for one in operator._schema.returns) or not isinstance(results, (tuple, list)):
        return False
    if not all(isinstance(one, Tensor) and one.is_meta and not one.is_complex() and not one.storage_offset() for one in results):
        return False
    memory = _memory(results)
    return len(set(memory)) == len(memory) and not set(memory) & set(_memory(pytree.tree_leaves(given)))


def _memory(values: Iterable[Any]) -> list[int | None]:
    return [storage_of(one) for one in values if isinstance(one, Tensor)]
