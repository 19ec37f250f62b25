"""Calls of programs that are launches and nothing else: all that a call does not change is resolved before the first one.

Small modules wait for Python rather than for the device. What a call can change is asked here in the order of what it costs, and nothing is
looked up by name, nor in an object: this is one function over local values.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ..ir.graph import Graph
from ..ops.dtypes import torch_dtype
from .moving import ALIGNMENT_BYTES
from .moving_launches import MovingLaunch

if TYPE_CHECKING:
    import threading

    import torch

Fill = Callable[["Sequence[torch.Tensor]"], None]
Direct = Callable[..., "tuple[torch.Tensor, ...] | None"]


def direct_calls(launches: Sequence[MovingLaunch], graph: Graph, results: Sequence[str], place: "torch.device",
                 lock: "threading.Lock", begin: Callable[[], int]) -> Direct:
    """``run(inputs, fill=None, learns=False)``: the graph's outputs in new memory on ``place``; None where kernels cannot read all inputs.

    None is for what other ways of a call copy, or refuse: another count, shape, type, layout or device, strides, odd addresses.
    ``fill`` gets the results before anything is written to them (None: nothing does). ``learns``: somebody asks for a gradient, which these
    results have not; they are inference tensors then, of which autograd says so.

    Args:
        launches: the whole program, in order; it writes no input.
        graph: what it computes. Every output is alone in its memory, and nobody else's.
        results: whose memory the outputs are, one for each.
        lock: held while a call is enqueued.
        begin: what every call asks first, under the lock; it raises what a call raises, or returns the stream.
    """
    import torch

    plain, strided = (torch.Tensor, torch.nn.Parameter), torch.strided
    wanted = tuple((torch.Size(spec.shape), torch_dtype(spec.dtype)) for spec in map(graph.spec, graph.inputs))
    makers, count = tuple(_maker(graph, name, place) for name in graph.outputs), len(wanted)
    places = {value: index for index, value in enumerate((*graph.inputs, *results))}
    enqueued = tuple((one.run, _picking([places[value] for value in one.values])) for one in launches)

    def run(inputs: "Sequence[torch.Tensor]", fill: Fill | None = None, learns: bool = False) -> "tuple[torch.Tensor, ...] | None":
        if len(inputs) != count:
            return None
        found: list[torch.Tensor] = []
        addresses: list[int] = []
        for tensor in inputs:
            shape, dtype = wanted[len(addresses)]
            if (type(tensor) not in plain or tensor.layout is not strided or tensor.is_nested or tensor.dtype is not dtype
                    or tensor.shape != shape or tensor.device != place or not tensor.is_contiguous() or tensor.is_neg()
                    or tensor.is_conj() or (address := tensor.data_ptr()) % ALIGNMENT_BYTES):
                return None
            addresses.append(address)
        with lock:
            stream = begin()
            for make in makers:
                result = without_gradients(make) if learns else make()
                found.append(result)
                addresses.append(result.data_ptr())
            if fill is not None:
                fill(found)
            for enqueue, pick in enqueued:
                enqueue(stream, *pick(addresses))
        return tuple(found)

    return run


def without_gradients(make: "Callable[[], torch.Tensor]") -> "torch.Tensor":
    """What ``make`` makes, as an inference tensor: a backward pass that comes to it ends in an error instead of passing it by."""
    import torch

    with torch.inference_mode():
        return make()


def _maker(graph: Graph, name: str, place: "torch.device") -> "Callable[[], torch.Tensor]":
    """What makes memory for an output. torch reads sizes that are given one by one twice as fast."""
    import torch

    spec = graph.spec(name)
    sizes: tuple[Any, ...] = tuple(spec.shape) or ((),)
    return partial(torch.empty, *sizes, dtype=torch_dtype(spec.dtype), device=place)


def _picking(places: Sequence[int]) -> Callable[[list[int]], Sequence[int]]:
    """What picks the items number ``places``, without a loop of Python's."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))
