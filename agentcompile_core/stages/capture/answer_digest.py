"""A digest of what a module answered, to the bit: one process on one thread computes alike each time, so any difference means something."""

import hashlib
import pickle
from typing import Any

import torch
from torch import Tensor

SIZE = 16  # bytes


def digest(leaves: list[Any]) -> bytes:
    """A digest of ``SIZE`` bytes of all ``leaves``; of what cannot be pickled, by its type alone."""
    total = hashlib.blake2b(digest_size=SIZE)
    for leaf in leaves:
        one = _Hash()
        try:
            _Pickler(one).dump(leaf)
        except Exception:  # somebody's class
            one = _Hash()
            one.write(type(leaf).__qualname__.encode())
        total.update(one.of.digest())
    return total.digest()


class _Hash:
    """What a pickler writes to."""

    def __init__(self) -> None:
        self.of = hashlib.blake2b(digest_size=SIZE)

    def write(self, text: Any) -> None:
        self.of.update(text)


class _Pickler(pickle.Pickler):
    """Tensors by their numbers; torch's own pickles hold addresses."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        try:
            return str(value.layout), str(value.dtype), tuple(value.shape), _bits(value)
        except Exception:  # nested ones, and those of somebody's class
            return repr(value)


def _bits(tensor: Tensor) -> bytes:
    plain = tensor.detach()
    plain = plain.dequantize() if plain.is_quantized else plain if plain.layout is torch.strided else plain.to_dense()
    plain = plain.as_subclass(Tensor).resolve_conj().resolve_neg().contiguous().flatten()
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
