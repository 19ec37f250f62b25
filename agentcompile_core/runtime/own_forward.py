"""A module's own forward in the place of its program, for calls that it serves sooner."""

from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import calls

if TYPE_CHECKING:
    import torch


class OwnForward:
    """Calls ``module`` with canonical arguments and takes its results apart as ``call`` says.

    Args:
        module: on the device of its inputs.
        call: the shape of the captured call.
    """

    def __init__(self, module: "torch.nn.Module", call: calls.Call) -> None:
        import torch

        count = len(call.args["tuple"])
        positional, named = calls.by_name(module, tuple(range(count)), {})
        self._positional, self._names = len(positional), tuple(named)  # once: looking at a signature takes longer than a small call
        self._module, self._outputs, self._torch = module, call.outputs, torch
        self._is_one = "tensor" in call.outputs

    def __call__(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> "list[torch.Tensor]":
        """The tensors of the results, in the order of the graph's outputs; without gradients, since nobody goes back through a program.

        Raises:
            UsageError: the module returns something of another shape than at capture.
        """
        if self._names:
            keywords = {**dict(zip(self._names, args[self._positional:], strict=True)), **keywords}
        args = args[: self._positional]
        if self._torch.is_grad_enabled():  # not inference mode: what the module keeps must serve elsewhere too
            with self._torch.no_grad():
                found = self._module(*args, **keywords)
        else:
            found = self._module(*args, **keywords)
        if self._is_one and isinstance(found, self._torch.Tensor):
            return [found]
        tensors: list[torch.Tensor] = []
        if calls.tree_of(found, tensors, shared=True) != self._outputs:
            raise UsageError("the module returns something of another shape than when it was compiled; compile it again")
        return tensors
