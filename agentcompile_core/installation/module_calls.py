"""Calls of a compiled module beside the framework's operators of the same graph: its examples, and random numbers in their place."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..runtime.binder import bind
from ..runtime.executables import Executables
from ..runtime.module_session import ModuleSession
from ..runtime.program import Program, framework_program

if TYPE_CHECKING:
    import torch

    from ..runtime.weights import WeightStore

    Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]

SEED = 7


def of(session: ModuleSession, programs: Mapping[str, Program], weights: "WeightStore", loaded: Any) -> "Pairs":
    """What a session gives for each call, and what the framework's operators give."""
    import torch

    graph = programs["forward"].graph
    if not hasattr(loaded, "example_inputs"):
        return
    examples = session.flat(loaded.example_inputs, loaded.example_keywords)
    for inputs in (examples, _telling(examples)):
        if inputs is None:
            return
        copies = {name: tensor.to(session.device, copy=True).contiguous() for name, tensor in zip(graph.inputs, inputs, strict=True)}
        first, second = (session.run(inputs, filled_with=byte) for byte in (0xFF, 0))
        bound = bind(framework_program(graph), weights, {}, copies, Executables(device=session.device))
        with torch.inference_mode():
            bound.run()
            for i, results in enumerate(zip(first, second, strict=True)):
                if results[0].is_floating_point():
                    yield from ((one, bound.output(i)) for one in results)
                else:  # of equals any one may be the largest, but it is the same one every time
                    yield results


def _telling(examples: "Sequence[torch.Tensor]") -> "list[torch.Tensor] | None":
    """The examples with random numbers where all of one are the same, which would hide what is read where; None: there are none such."""
    import torch

    generator, told = torch.Generator().manual_seed(SEED), False
    found = []
    for tensor in examples:
        if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            tensor, told = torch.randn(tensor.shape, generator=generator).to(tensor), True
        found.append(tensor)
    return found if told else None
