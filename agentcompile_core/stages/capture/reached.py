"""Every call that a chunk of a prompt makes: what a trace of it would record, found without one, on tensors of no memory.

A sixth of an export's time. What torch.export sees of a model is what it calls, in which order, on which of the tensors before;
where that is the same at a third size as a line through two others says, the graph of the third size is the one on that line.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .between import Unlike
from .made import Made

_SPELLED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, str, type(None))
_READ = 64  # elements of a literal that are compared; what reads a longer one is traced
TENSOR = "a tensor:"  # what begins with it is one, and then its number, shape, strides, type, offset and literal

Call = tuple[Any, ...]  # operator, arguments, keywords, results, whether it has an effect; at the end the results of all with no operator


@define
class _Numbered:
    """Tensors by the order in which they came up, those that were given below 0. They are kept: none takes the place of another."""

    known: dict[int, int] = field(factory=dict)
    kept: list[Tensor] = field(factory=list)

    def number(self, tensor: Tensor, given: bool = False) -> int:
        if id(tensor) not in self.known:
            self.known[id(tensor)] = -1 - len(self.kept) if given else len(self.kept)
            self.kept.append(tensor)
        return self.known[id(tensor)]


class Reached(TorchDispatchMode):
    """Collects calls: name of the operator, arguments and results, tensors as numbers with shape, strides and type.

    ``given``: the tensors that are there before. Any other that no call made is a literal, of which the elements are told.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._tensors, self._made = _Numbered(), Made()
        self._literals: set[int] = set()  # told wherever they are read: they may be written
        for tensor in given:
            self._tensors.number(tensor, given=True)

    def returned(self, result: Any) -> tuple[Call, ...]:
        """All calls, and behind them what the whole returned."""
        return (*self.calls, ("", self._said(result), (), (), True))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        said = (str(func), self._said(args), self._said(tuple((kwargs or {}).items())))
        result = self._made.of(func, args, kwargs or {})
        self.calls.append((*said, self._said(result, made=True), _has_effect(func)))
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
        if not made and (id(tensor) in self._literals or id(tensor) not in self._tensors.known):
            if tensor.is_meta or tensor.numel() > _READ:
                raise Unlike("it reads a tensor that it keeps outside of its parameters and buffers")
            self._literals.add(id(tensor))
            literal = self._said(tensor.tolist())
        number, type_name = self._tensors.number(tensor), str(tensor.dtype)
        return (TENSOR, number, tuple(tensor.shape), tensor.stride(), type_name, tensor.storage_offset(), literal)


def _has_effect(operator: Any) -> bool:
    """Whether it does more than to make its results: it writes, or draws numbers."""
    return operator._schema.is_mutable or torch.Tag.nondeterministic_seeded in operator.tags


def calls_of(step: nn.Module, arguments: tuple[Tensor, ...], run: Callable[[dict[str, Tensor]], Any] | None = None) -> tuple[Call, ...]:
    """Every call of ``step`` on ``arguments`` (of no memory), whose parameters and buffers are replaced by ones of no memory.

    ``run``: what is run instead, over the same tensors, given by their names in ``step``.

    Raises:
        Unlike: it cannot be seen what is called. Whatever the model raises without memory is raised, too.
    """
    held: dict[str, Tensor] = {**dict(step.named_parameters(remove_duplicate=False)), **dict(step.named_buffers(remove_duplicate=False))}
    apart = {id(tensor): _without_memory(tensor) for tensor in held.values()}
    named = {name: apart[id(tensor)] for name, tensor in held.items()}
    with Reached([*apart.values(), *arguments]) as reached:
        result = run(named) if run is not None else torch.func.functional_call(step, named, arguments, tie_weights=False)
        return reached.returned(result)


def _without_memory(tensor: Tensor) -> Tensor:
    meta = tensor.detach().to("meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
