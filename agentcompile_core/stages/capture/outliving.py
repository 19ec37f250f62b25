"""Tensors that a call computed from its arguments and that outlive it: whoever keeps them, and wherever, may remember them."""

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .comparison import Arguments, tensors_among
from .left_behind import written_by
from .storages import storage_of

_LITERAL = torch.ops.aten.lift_fresh.default  # what ``torch.tensor(0.0)`` gives its numbers to, which no operator made


class Outliving(TorchDispatchMode):
    """Notes, within it, what is computed from the numbers of ``given``: by storage, each held weakly.

    What an operator reads of a tensor's shape and type alone (``zeros_like``, ``new_ones``) is not computed from its numbers. Tensors
    without a storage (sparse ones) are one to it, so what is made of any behind that may be.
    """

    def __init__(self, given: Arguments) -> None:
        super().__init__()
        self._derived: set[int | None] = {storage_of(tensor) for tensor in tensors_among(given)}  # None: of what has no storage
        # A storage that is held weakly leaves its number to no other one.
        self._made: dict[int, StorageWeakRef] = {}
        self._written: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run ``func``."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        read, written = {storage_of(tensor) for tensor in tensors_among((args, kwargs))}, tensors_among(result)
        for tensor in written:
            number = storage_of(tensor)
            if number is not None and (number not in read or func is _LITERAL) and number not in self._made:
                self._made[number] = StorageWeakRef(tensor.untyped_storage())
        if not read.isdisjoint(self._derived) and not _is_of_a_shape(func):
            for tensor in (*written, *written_by(func, args, kwargs)):
                number = storage_of(tensor)
                self._derived.add(number)
                if number is not None and number not in self._made and number not in self._written:
                    self._written[number] = StorageWeakRef(tensor.untyped_storage())
        return result

    def is_kept(self) -> bool:
        """Whether some of it is still there, now that nobody who asks has any of it."""
        if self._is_there():
            gc.collect()  # what lies in a circle
        return self._is_there()

    def _is_there(self) -> bool:
        return any(not self._made[number].expired() for number in self._derived if number in self._made)


def _is_of_a_shape(func: Any) -> bool:
    name = func._schema.name.partition("::")[2] if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten" else ""
    return name.endswith("_like") or name.startswith("new_")
