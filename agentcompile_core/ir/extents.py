"""Arithmetic of extents and strides."""

from collections.abc import Iterable


def span(extents: Iterable[int], strides: Iterable[int]) -> int:
    """Elements from the first one of a strided view to the one behind its last; every extent is 1 at least.

    Raises:
        ValueError: there is not one stride for each extent.
    """
    return 1 + sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
