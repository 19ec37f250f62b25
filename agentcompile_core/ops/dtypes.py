"""Element types of the compiler as torch's."""

from typing import TYPE_CHECKING

from ..ir.graph import DType, TensorSpec

if TYPE_CHECKING:
    import torch


def torch_dtype(dtype: DType) -> "torch.dtype":
    """The torch dtype of a DType."""
    import torch

    found = getattr(torch, dtype.value)
    assert isinstance(found, torch.dtype)
    return found


def zeros(spec: TensorSpec, device: "str | torch.device") -> "torch.Tensor":
    """A contiguous tensor of zeros of the shape and type of ``spec``."""
    import torch

    return torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
