"""The one owner of a model's parameters and buffers on the device."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .errors import ContractError, UsageError

if TYPE_CHECKING:
    import torch


class WeightStore:
    """Parameters and buffers by qualified name, one copy, shared by every program and by the original module.

    Siblings that a step reads as one matrix (Q/K/V, gate/up) are concatenated once; the original Parameters become row
    slices of the concatenation, so the framework and the model itself read the same bytes. Tied parameters stay tied.
    """

    def __init__(self, module: "torch.nn.Module", device: str) -> None:
        import torch

        self.device = device
        meta = next((name for name, p in module.named_parameters() if p.is_meta), None)
        if meta is not None:
            raise UsageError(f"parameter {meta} holds no data (the model was captured without weights); load the model with its weights to run it")
        self._tensors: dict[str, torch.Tensor] = {}
        self._groups: dict[tuple[str, ...], torch.Tensor] = {}
        self._group_of: dict[str, tuple[str, ...]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter.device != torch.device(device) and parameter.device.type != device:
                parameter.data = parameter.data.to(device)
            self._tensors[name] = parameter
        for name, buffer in module.named_buffers(remove_duplicate=False):
            self._tensors[name] = buffer if buffer.device.type == device else buffer.to(device)

    @classmethod
    def from_tensors(cls, tensors: "Mapping[str, torch.Tensor]", device: str) -> "WeightStore":
        """A store over plain tensors, without a module (synthetic weights of a worker)."""
        store = cls.__new__(cls)
        store.device = device
        store._tensors = dict(tensors)
        store._groups, store._group_of = {}, {}
        return store

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> "torch.Tensor":
        """The parameter or buffer called ``name``, without gradient.

        Raises:
            UsageError: the model has none of that name.
        """
        if name not in self._tensors:
            raise UsageError(f"the model has no parameter {name!r}; the program was compiled for another model")
        return self._tensors[name].detach()

    def concatenated(self, names: tuple[str, ...]) -> "torch.Tensor":
        """The rows of ``names`` behind each other as one contiguous tensor; a single name is that tensor itself.

        Raises:
            ContractError: a name is already part of another concatenation.
        """
        import torch

        if len(names) == 1:
            tensor = self.tensor(names[0])
            if not tensor.is_contiguous():
                self._tensors[names[0]].data = tensor.contiguous()
            return self.tensor(names[0])
        if names in self._groups:
            return self._groups[names]
        taken = [name for name in names if name in self._group_of]
        if taken:
            raise ContractError(f"{taken[0]} is already concatenated as {self._group_of[taken[0]]}, now wanted as {names}")
        joined = torch.cat([self.tensor(name) for name in names], dim=0)
        row = 0
        for name in names:
            parameter = self._tensors[name]
            rows = parameter.shape[0]
            parameter.data = joined[row:row + rows]
            row += rows
            self._group_of[name] = names
        self._groups[names] = joined
        return joined

    @property
    def nbytes(self) -> int:
        """Bytes of all distinct storages."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._tensors.values()}
        return sum(storages.values())


def concatenated_shape(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Shape of row-wise concatenation."""
    return (sum(s[0] for s in shapes), *shapes[0][1:])


def numel(shape: tuple[int, ...]) -> int:
    """Number of elements."""
    return math.prod(shape)
