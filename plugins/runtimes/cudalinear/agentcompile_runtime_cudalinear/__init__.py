"""CUDALinear: linear layers of any model, whose calls with one token run kernels that were compiled for their shape."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layer import CUDALinear
    from .replacing import Replaced, replace_linears

__all__ = ["CUDALinear", "Replaced", "replace_linears"]


def __getattr__(name: str) -> Any:
    """Import on first use: the layer needs torch."""
    if name == "CUDALinear":
        from .layer import CUDALinear

        return CUDALinear
    if name in __all__:
        from . import replacing

        return getattr(replacing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
