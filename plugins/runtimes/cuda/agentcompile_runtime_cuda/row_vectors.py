"""What kernels of rows can read: whole vectors of 16 bytes at aligned addresses."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VECTOR_BYTES = 16


def is_aligned(tensor: "torch.Tensor") -> bool:
    """Whether vectors can be read at its address."""
    return tensor.data_ptr() % VECTOR_BYTES == 0


def is_weight(weight: "torch.Tensor | None", x: "torch.Tensor", needed: bool) -> bool:
    """Whether the kernels take ``weight`` beside ``x``; a norm of some kinds needs one."""
    if weight is None:
        return not needed
    return weight.dtype is x.dtype and is_aligned(weight) and weight.is_contiguous() and weight.numel() == x.shape[-1]


def even(count: int, tensor: "torch.Tensor") -> bool:
    """Whether ``count`` elements of a 16-bit tensor at an aligned address are whole vectors."""
    return tensor.element_size() == 2 and whole(count, tensor)


def whole(count: int, tensor: "torch.Tensor") -> bool:
    """The same of a 16-bit or 32-bit one."""
    return tensor.element_size() in (2, 4) and tensor.is_floating_point() and count * tensor.element_size() % VECTOR_BYTES == 0 and (
        is_aligned(tensor))
