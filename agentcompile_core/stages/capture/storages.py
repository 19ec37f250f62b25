"""Whose memory a tensor lies in, also one that has no numbers."""

from torch import Tensor


def storage_of(tensor: Tensor) -> int | None:
    """A number that tensors share whose memory is one, as long as one of them lives; None where there is no such memory (sparse ones,
    wrappers). It is the storage itself and not its address: those of meta and fake tensors have none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None
