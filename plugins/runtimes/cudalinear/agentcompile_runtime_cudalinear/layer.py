"""The layer itself: which of its calls are one token's, and what serves the others."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, is_autocast_enabled, is_grad_enabled, nn
from torch._C import _len_torch_dispatch_stack as dispatch_modes  # make_fx, fake tensors, whoever looks at operators
from torch.compiler import is_compiling
from torch.jit import is_tracing

Step = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]  # one row [1, 1, in_features] to one [1, 1, out_features], of its own

_PLAIN = (Tensor, nn.Parameter)


class CUDALinear(nn.Linear):
    """An ``nn.Linear`` over the parameters of another one, of which ``step`` serves the calls with one token.

    Everything else goes the way of ``nn.Linear``: several tokens, another device or element type, autocast, gradients, parameters
    that are no longer those that ``step`` reads, and graphs that torch traces. Parameters keep their names, so that state
    dicts, tied weights and optimizers see no difference; a copy (``copy.deepcopy``, ``pickle``) is a plain ``nn.Linear``.

    Args:
        linear: the layer that it stands for, which shares its parameters.
        step: runs one row; see ``Step``. It reads the parameters where they are now.
    """

    def __init__(self, linear: nn.Linear, step: Step) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.training = linear.training
        self._step, self._reads, self._device_type = step, self._places(), linear.weight.device.type

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [.., in_features] times the weight, plus the bias: [.., out_features]."""
        if not self._is_served(input):
            return super().forward(input)
        if input.dim() == 3 and not input.requires_grad:  # as models call it; a view takes as long as half of what is asked below
            return self._step((input,))[0]
        (out,) = self._step((input.detach().view(1, 1, self.in_features),))
        return out.view(*input.shape[:-1], self.out_features)

    def _is_served(self, input: Tensor) -> bool:
        # Every call of every layer asks. Parameters are looked up where nn.Module keeps them, a tenth of what its attributes take.
        if type(input) not in _PLAIN or is_compiling() or is_tracing() or dispatch_modes():  # first: tracers bring what has no memory
            return False
        weight, shape, count = self._parameters.get("weight"), input.shape, self.in_features
        return (weight is not None and input.numel() == count and len(shape) > 0 and shape[-1] == count and input.dtype is weight.dtype
                and input.device == weight.device and self._places() == self._reads and not is_autocast_enabled(self._device_type)
                and not (is_grad_enabled() and (input.requires_grad or weight.requires_grad or self._bias_learns())))

    def _bias_learns(self) -> bool:
        return self.bias is not None and self.bias.requires_grad

    def _places(self) -> tuple[Any, ...]:
        """Where the parameters are, and how they lie there."""
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")  # gone where somebody prunes or parametrizes
        found: tuple[Any, ...] = () if weight is None else (weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
        return found if bias is None else (*found, bias.data_ptr(), bias.dtype, bias.shape, bias.stride())

    def plain(self) -> nn.Linear:
        """An ``nn.Linear`` over the same parameters."""
        found = nn.Linear(1, 1, bias=False, device="meta")
        found.in_features, found.out_features = self.in_features, self.out_features
        found.weight, found.bias = self.weight, self.bias
        found.training = self.training
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        return copy.deepcopy(self.plain(), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.plain(),)


def _itself(linear: nn.Linear) -> nn.Linear:
    return linear
