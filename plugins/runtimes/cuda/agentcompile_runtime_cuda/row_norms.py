"""Norms of rows, alone and of the sum of two, in one launch each (``rows.cu``): RMS norms, and layer norms of either operator."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import frozen

from agentcompile_core.plugin_api import operator_names

from .compared import Compared
from .head_places import THREADS, norm_kind
from .row_vectors import even, is_weight, whole

if TYPE_CHECKING:
    import torch

OF_LAYER = 3  # ac::Norm of row.cuh
WARP, WIDE = 32, 1024  # threads; columns from which on a row is a block's
Launched = tuple[str, int, tuple[Any, ...]]  # entry, blocks, scalars


@frozen(kw_only=True)
class Norm:
    """A norm over the last axis as the kernels count kinds, and the operator that it is."""

    kind: int
    eps: float
    operator: "Callable[[torch.Tensor], torch.Tensor]"
    weight: "torch.Tensor | None" = None
    bias: "torch.Tensor | None" = None
    needs_weight: bool = False

    def fits(self, x: "torch.Tensor") -> bool:
        """Whether its weight and bias lie as the kernels read them beside ``x``."""
        return is_weight(self.weight, x, self.needs_weight) and is_weight(self.bias, x, False)

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides which instructions of the kernel run."""
        return self.weight is None, self.bias is None, self.kind


def rms(weight: "torch.Tensor | None", eps: float, one_plus: bool = False, once: bool = False) -> Norm:
    """``agentcompile.rms_norm``, by what stands behind its first argument."""
    import torch

    return Norm(kind=norm_kind(one_plus, once), eps=eps, weight=weight, needs_weight=one_plus or once,
                operator=lambda x: torch.ops.agentcompile.rms_norm.default(x, weight, eps, one_plus, once))


def layer(normalized_shape: Sequence[int], weight: "torch.Tensor | None" = None, bias: "torch.Tensor | None" = None, eps: float = 1e-05,
          cudnn_enable: bool = True) -> Norm | None:
    """``aten.layer_norm``, likewise; None over more than one axis."""
    import torch

    operator = partial(torch.nn.functional.layer_norm, normalized_shape=list(normalized_shape), weight=weight, bias=bias, eps=eps)
    return Norm(kind=OF_LAYER, eps=eps, weight=weight, bias=bias, operator=operator) if len(normalized_shape) == 1 else None


def plain_layer(weight: "torch.Tensor | None", eps: float) -> Norm:
    """``agentcompile.layer_norm``, likewise."""
    import torch

    return Norm(kind=OF_LAYER, eps=eps, weight=weight, operator=lambda x: torch.ops.agentcompile.layer_norm.default(x, weight, eps))


class RowNorms:
    """Bodies of norms, and of sums with norms.

    Args:
        launch: runs an entry of rows.cu over tensors in its order, outputs last.
    """

    def __init__(self, launch: "Callable[[tuple[torch.Tensor | None, ...], Launched], None]", compared: Compared) -> None:
        self._launch, self._compared = launch, compared
        self.bodies: dict[tuple[str, ...], Callable[..., Any]] = {
            (operator_names.RMS_NORM,): self.rms, (operator_names.ATEN_LAYER_NORM,): self.layer,
            (operator_names.LAYER_NORM,): self.plain_layer}
        norms = {operator_names.RMS_NORM: rms, operator_names.ATEN_LAYER_NORM: layer, operator_names.LAYER_NORM: plain_layer}
        for name, norm in norms.items():
            self.bodies[operator_names.ADD, name] = partial(self._sum, norm)

    def rms(self, x: "torch.Tensor", weight: "torch.Tensor | None", eps: float, one_plus: bool = False,
            once: bool = False) -> "torch.Tensor | None":
        """``agentcompile.rms_norm``; None where the kernel does not serve it."""
        return self._of(x, rms(weight, eps, one_plus, once))

    def layer(self, input: "torch.Tensor", normalized_shape: Sequence[int], weight: "torch.Tensor | None" = None,
              bias: "torch.Tensor | None" = None, eps: float = 1e-05, cudnn_enable: bool = True) -> "torch.Tensor | None":
        """``aten.layer_norm``, likewise."""
        return self._of(input, layer(normalized_shape, weight, bias, eps))

    def plain_layer(self, x: "torch.Tensor", weight: "torch.Tensor | None", eps: float) -> "torch.Tensor | None":
        """``agentcompile.layer_norm``, likewise."""
        return self._of(x, plain_layer(weight, eps))

    def _of(self, x: "torch.Tensor", norm: Norm | None) -> "torch.Tensor | None":
        import torch

        columns = x.shape[-1]
        fits = even if norm is not None and norm.kind == OF_LAYER else whole  # float32 is the framework's: means cancel otherwise there
        if norm is None or not fits(columns, x) or not x.is_contiguous() or not norm.fits(x):
            return None
        rows = x.numel() // columns
        entry, blocks = ("norm_rows_block", rows) if columns >= WIDE else ("norm_rows_warp", -(-rows // (THREADS // WARP)))
        out = torch.empty_like(x)
        launch = partial(self._launch, (x, norm.weight, norm.bias, out), (entry, blocks, (rows, columns, norm.eps, norm.kind)))
        agreed = self._compared.agreed((entry, x.dtype, columns, *norm.key), launch, lambda: (out,), lambda: (norm.operator(x),))
        return out if agreed else None

    def _sum(self, of: Callable[..., Norm | None], left: "torch.Tensor", right: "torch.Tensor", *how: Any,
             **named: Any) -> "tuple[torch.Tensor, torch.Tensor] | None":
        """left + right and its norm ``of(*how)``."""
        import torch

        columns, same, norm = left.shape[-1], left.shape == right.shape and left.dtype is right.dtype, of(*how, **named)
        if norm is None or not same or not even(columns, left) or not even(columns, right):
            return None
        if not left.is_contiguous() or not right.is_contiguous() or not norm.fits(left):
            return None
        total, out = torch.empty_like(left), torch.empty_like(left)
        launch = partial(self._launch, (left, right, norm.weight, norm.bias, total, out),
                         ("add_norm_rows", left.numel() // columns, (columns, norm.eps, norm.kind)))

        def framework() -> "tuple[torch.Tensor, ...]":
            wanted = left + right
            return wanted, norm.operator(wanted)

        agreed = self._compared.agreed(("add_norm_rows", left.dtype, columns, *norm.key), launch, lambda: (total, out), framework)
        return (total, out) if agreed else None
