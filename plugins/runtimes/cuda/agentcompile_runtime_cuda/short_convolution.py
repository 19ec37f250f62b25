"""Short causal convolutions over tokens, ``agentcompile.causal_convolution``, by the kernel of ``short_convolution.cu``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentcompile_cuda_kit import c_type, make_source

from agentcompile_core.plugin_api import Access, Backend, DType, Launch, Role, StepSource, Target, i32, pointer

from .own_kernels import OwnKernels

if TYPE_CHECKING:
    import torch

TEMPLATE = Path(__file__).with_name("short_convolution.cu")
THREADS, RUN = 128, 16  # of a block; tokens of a thread
MOST_WIDTH = 8
VECTOR_BYTES = 16


def source(dtype: DType, width: int, silu: bool) -> StepSource:
    """The kernel of one element type, width and activation; grid and scalars are those of a call."""
    given = (pointer(name, Role.INPUT, DType.I64 if name == "valid" else dtype) for name in ("state", "x", "weight", "bias", "valid"))
    made = (pointer(name, Role.OUTPUT, dtype, Access.WRITE) for name in ("out", "last"))
    launch = Launch(entry="causal_convolution", grid=(1, 1, 1), block=(THREADS, 1, 1), pdl=True,
                    arguments=(*given, *made, *(i32(name, 0) for name in ("tokens", "channels", "x_token"))))
    plan = {"T": c_type(dtype), "threads": THREADS, "run": RUN, "width": width, "silu": silu}
    return make_source(TEMPLATE, plan=plan, launches=(launch,))


def blocks(tokens: int, channels: int, itemsize: int) -> int:
    """Of a call."""
    return -(-(-(-tokens // RUN) * (channels * itemsize // VECTOR_BYTES)) // THREADS)


class ShortConvolution:
    """The kernels by width and activation, which ``backend`` builds for the target that is live on first use."""

    def __init__(self, backend: Backend, target: Callable[[], Target | None]) -> None:
        self._kernels = {(width, silu): OwnKernels(backend, target, partial(source, width=width, silu=silu))
                         for width in range(1, MOST_WIDTH + 1) for silu in (False, True)}

    def takes(self, state: "torch.Tensor", x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None") -> bool:
        """Whether the tensors are and lie as the kernel reads them."""
        if x.dim() != 3 or x.shape[0] != 1 or not x.numel() or x.stride(1) != 1 or not 0 < weight.shape[1] <= MOST_WIDTH:
            return False
        if not x.is_floating_point() or x.dtype.itemsize > 4 or any(one.dtype is not x.dtype for one in (state, weight)):
            return False
        if bias is not None and (bias.dtype is not x.dtype or not bias.is_contiguous() or bias.data_ptr() % VECTOR_BYTES):
            return False
        apart = x.stride(2) if x.shape[2] > 1 else 0
        whole = not any(count * x.element_size() % VECTOR_BYTES for count in (x.shape[1], apart))
        return whole and x.data_ptr() % VECTOR_BYTES == 0 and state.is_contiguous() and weight.is_contiguous()

    def __call__(self, state: "torch.Tensor", x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None",
                 valid: "torch.Tensor | None", silu: bool, out: "tuple[torch.Tensor, torch.Tensor]") -> None:
        """Write to ``out``, [1, T, C] and [1, C, K], both dense, what ``agentcompile.causal_convolution`` makes of the others.

        Raises:
            BuildError: the device has no preset, or nothing builds the kernel.
        """
        kernels, (_, channels, tokens) = self._kernels[weight.shape[1], silu], x.shape
        kernels.run(x, kernels.launches(x)[0], blocks(tokens, channels, x.element_size()), (state, x, weight, bias, valid, *out),
                    (tokens, channels, x.stride(2)))
