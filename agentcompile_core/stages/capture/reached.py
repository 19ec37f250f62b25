"""Every call that a chunk of a prompt makes: what a trace of it would record, found without one, on tensors of no memory.

A sixth of an export's time. What torch.export sees of a model is what it calls, in which order, on which of the tensors before;
where that is the same at a third size as a line through two others says, the graph of the third size is the one on that line.
"""

from collections.abc import Iterable
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .between import Unlike

_SPELLED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, str, type(None))
_READ = 64  # elements of a literal that are compared; what reads a longer one is traced

Call = tuple[Any, ...]


@define
class _Numbered:
    """Tensors by the order in which they came up. They are kept, so that none takes the place of another."""

    known: dict[int, int] = field(factory=dict)
    kept: list[Tensor] = field(factory=list)

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self.known:
            self.known[id(tensor)] = len(self.kept)
            self.kept.append(tensor)
        return self.known[id(tensor)]


class Reached(TorchDispatchMode):
    """Collects calls: name of the operator, arguments and results, tensors as numbers with shape, strides and type.

    ``given``: the tensors that are there before. Any other that no call made is a literal, of which the elements are told.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._tensors = _Numbered()
        for tensor in given:
            self._tensors.number(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        said = (str(func), self._said(args), self._said(tuple((kwargs or {}).items())))
        result = func(*args, **(kwargs or {}))
        self.calls.append((*said, self._said(result, made=True)))
        return result

    def _said(self, value: Any, made: bool = False) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, made)
        if isinstance(value, (tuple, list)):
            return tuple(self._said(item, made) for item in value)
        if isinstance(value, _SPELLED):
            return f"{type(value).__name__} {value}"
        if type(value) not in _PLAIN:
            raise Unlike(f"an operator takes a {type(value).__name__}")
        return value

    def _tensor(self, tensor: Tensor, made: bool) -> Call:
        literal: Any = None
        if id(tensor) not in self._tensors.known and not made:
            if tensor.is_meta or tensor.numel() > _READ:
                raise Unlike("it reads a tensor that it keeps outside of its parameters and buffers")
            literal = self._said(tensor.tolist())
        return (self._tensors.number(tensor), tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.storage_offset(), literal)


def calls_of(step: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Call, ...]:
    """Every call of ``step`` on ``arguments`` (of no memory), whose parameters and buffers are replaced by ones of no memory.

    Raises:
        Unlike: it cannot be seen what is called. Whatever the model raises without memory is raised, too.
    """
    held: dict[str, Tensor] = {**dict(step.named_parameters(remove_duplicate=False)), **dict(step.named_buffers(remove_duplicate=False))}
    apart = {id(tensor): _without_memory(tensor) for tensor in held.values()}
    with Reached([*apart.values(), *arguments]) as reached:
        torch.func.functional_call(step, {name: apart[id(tensor)] for name, tensor in held.items()}, arguments, tie_weights=False)
    return tuple(reached.calls)


def _without_memory(tensor: Tensor) -> Tensor:
    meta = tensor.detach().to("meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
