"""Running a plain module's program: the arguments of one call in, what the module returns out; no cache and no loop."""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..ir.graph import GraphSet
from ..ops.dtypes import zeros
from . import calls
from .binder import bind
from .executables import Executables
from .program import Program

if TYPE_CHECKING:
    import torch

    from .weights import WeightStore


class ModuleSession:
    """The owner of one module's bound program and its input buffers; one call at a time."""

    def __init__(
        self,
        graphs: GraphSet,
        program: Program,
        weights: "WeightStore",
        executables: Executables,
    ) -> None:
        self.graphs, self.device = graphs, executables.device
        self._lock = threading.Lock()
        graph = program.graph
        self._inputs: dict[str, torch.Tensor] = {
            name: zeros(graph.spec(name), self.device) for name in graph.inputs
        }
        self._bound = bind(program, weights, {}, self._inputs, executables)
        self._outputs = len(graph.outputs)
        self._call = calls.read(graphs.call)

    def prepare(self, report: Any = None) -> None:
        """Nothing beyond binding."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run on arguments as at capture (calls.canonical): tensors of the same shapes and types, the rest equal.

        Returns:
            What the module returns, with copies of its tensors.

        Raises:
            UsageError: the arguments differ from what was compiled for; the message says where.
        """
        found = self.run(self.flat(args, keywords))
        return found if self._call is None else calls.rebuilt(self._call.outputs, found)

    def flat(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> "Sequence[torch.Tensor]":
        """The tensors among canonical arguments in the order of the graph's inputs; raises UsageError as a call does."""
        return args if self._call is None else self._call.tensors(args, keywords)

    def run(self, inputs: "Sequence[torch.Tensor]") -> "tuple[torch.Tensor, ...]":
        """The graph's outputs for its inputs, in their order; the results are copies.

        Raises:
            UsageError: count, shape or type of the inputs differ from what was compiled for.
        """
        import torch

        if len(inputs) != len(self._inputs):
            raise UsageError(f"{len(inputs)} inputs were given; the module was compiled for {len(self._inputs)}")
        for (name, place), tensor in zip(self._inputs.items(), inputs, strict=True):
            if tensor.shape != place.shape or tensor.dtype != place.dtype:
                raise UsageError(
                    f"input {name} is {tuple(tensor.shape)} {tensor.dtype}; the module was compiled for {tuple(place.shape)} "
                    f"{place.dtype}; compile again for other shapes"
                )
        with self._lock, torch.inference_mode():
            for place, tensor in zip(self._inputs.values(), inputs, strict=True):
                place.copy_(tensor)
            self._bound.run()
            return tuple(self._bound.output(i).clone() for i in range(self._outputs))
