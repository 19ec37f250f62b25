"""The bits of tensors, for comparisons to which NaN is a value like any other."""

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def words(tensor: Tensor) -> Tensor:
    """The bits of a contiguous tensor in words of a width that divides it: comparing is bound by memory."""
    flat = tensor.reshape(-1)
    wide = flat.nbytes % 8 == 0 and flat.data_ptr() % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if wide else torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits in the same order, whatever their shapes."""
    a, b = a.contiguous(), b.contiguous()
    first, second = words(a), words(b)
    return torch.equal(first, second) if first.dtype is second.dtype else torch.equal(as_bytes(a), as_bytes(b))
