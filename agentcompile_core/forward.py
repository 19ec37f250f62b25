"""Running a plain module's program: tensors in, tensors out, no cache and no loop."""

import threading
from typing import TYPE_CHECKING, Any

from .binder import bind
from .errors import UsageError
from .executables import Executables
from .graph import GraphSet
from .interfaces import DecodeRuntime
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
        *,
        decode: DecodeRuntime,
    ) -> None:
        import torch

        self.graphs, self.device, self.generation = graphs, executables.device, 0
        self._lock = threading.Lock()
        graph = program.graph
        self._inputs: dict[str, torch.Tensor] = {
            name: torch.zeros(graph.spec(name).shape, dtype=getattr(torch, graph.spec(name).dtype.value), device=self.device)
            for name in graph.inputs
        }
        self._bound = bind(program, weights, {}, self._inputs, executables)
        # A module has no decode state to preserve, so only the plain loop serves it; the runtime is kept for its name.
        self.runtime = decode.name
        self._outputs = len(graph.outputs)

    def prepare(self, report: Any = None) -> None:
        """Nothing beyond binding."""

    def __call__(self, *inputs: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
        """Run on tensors of the captured shapes and types; the results are copies.

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
