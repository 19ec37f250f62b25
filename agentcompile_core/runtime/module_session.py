"""Running a plain module's program: the arguments of one call in, what the module returns out; no cache and no loop."""

import threading
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..errors import Reject, UsageError
from ..ir.graph import GraphSet
from ..ops.aliasing import alias_roots, memory_roots
from ..ops.dtypes import torch_dtype, zeros
from . import calls
from .before_calls import BeforeCalls
from .binder import bind
from .captured_calls import CapturedCalls, capture_calls
from .direct_calls import Direct, direct_calls
from .executables import Executables
from .graph_capture import Capture
from .moving import ALIGNMENT_BYTES
from .own_forward import OwnForward
from .program import Program

if TYPE_CHECKING:
    import torch

    from .weights import WeightStore


_REQUIRES_GRAD = attrgetter("requires_grad")


class ModuleSession:
    """The owner of one module's bound program; one call at a time.

    Kernels read the caller's tensors where they are and write results into new ones. What they cannot read so (strides,
    another device, an odd address) is copied first. A session can be told to replay calls (``replay``), or to leave them to the
    module's own forward (``step_aside``); it then does so where it can, with the same results in memory of their own.
    """

    def __init__(
        self,
        graphs: GraphSet,
        program: Program,
        weights: "WeightStore",
        executables: Executables,
    ) -> None:
        import torch

        self._strided = torch.strided
        self._torch, self._plain = torch, (torch.Tensor, torch.nn.Parameter)
        functions = getattr(torch._C, "_functorch", None)
        self._transform: Any = getattr(functions, "peek_interpreter_stack", lambda: None)
        self._captured: CapturedCalls | None = None
        self._own: OwnForward | None = None
        self.graphs, self.device, self._weights = graphs, executables.device, weights
        self._device_type = torch.device(executables.device).type
        self._lock = threading.Lock()
        graph = program.graph
        self._inputs = tuple((name, torch.Size(graph.spec(name).shape), torch_dtype(graph.spec(name).dtype)) for name in graph.inputs)
        self._names = graph.inputs
        places = {name: zeros(graph.spec(name), self.device) for name in graph.inputs}
        self._place = next(iter(places.values())).device if places else None  # with its number, as tensors have it
        self._bound = bind(program, weights, {}, places, executables, moves=True)
        assert self._bound.moving is not None
        self._moving = self._bound.moving
        self._moving.begin()
        self._results = tuple((name, graph.spec(name).shape, torch_dtype(graph.spec(name).dtype)) for name in self._moving.results)
        self._owned, roots = _owned(program), alias_roots(graph)
        self._fresh = tuple(own and roots[o] in self._moving.results for o, own in zip(graph.outputs, self._owned, strict=True))
        kept = self._bound.environment.values()  # weights, and what no call changes
        self._foreign = {self._bound.arena_address, *(tensor.untyped_storage().data_ptr() for tensor in kept)}
        self._all_fresh = all(self._fresh)
        self._written = _written(program)
        self._before = BeforeCalls(weights, graphs.model.name, executables)
        self._call = calls.read(graphs.call)
        self._direct = self._directly()
        self._positional = len(self._call.args["tuple"]) if self._call is not None and self._call.is_positional else None
        weights.settle(with_mode=True)

    @property
    def under_autocast(self) -> bool:
        """Whether ``torch.autocast`` holds now for this device: operators compute in other types then."""
        return self._torch.is_autocast_enabled(self._device_type)

    @property
    def is_transformed(self) -> bool:
        """Whether a transform of ``torch.func`` runs now: its tensors hold no memory that a program could read."""
        return self._transform() is not None

    def prepare(self, report: Any = None) -> None:
        """Nothing beyond binding."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run on arguments as at capture (calls.canonical): tensors of the same shapes and types, the rest equal.

        Returns:
            What the module returns, in tensors of its own.

        Raises:
            UsageError: the arguments differ from what was compiled for; the message says where.
        """
        inputs = self.flat(args, keywords)
        if self._own is not None and all(map(self._is_readable, self._names, inputs)):
            return self._by_itself(self._own, args, keywords, inputs)
        found = self.run(inputs)
        return found if self._call is None else calls.rebuilt(self._call.outputs, found)

    @property
    def program(self) -> Program:
        """What it runs, unless calls are left to the module's own forward."""
        return self._bound.program

    @property
    def weights(self) -> "WeightStore":
        """What the program is bound to."""
        return self._weights

    @property
    def runs_itself(self) -> bool:
        """Whether calls are left to the module's own forward."""
        return self._own is not None

    @property
    def replays(self) -> bool:
        """Whether calls replay a recorded graph."""
        return self._captured is not None

    def replay(self, capture: Capture) -> Reject | None:
        """Record the program once; from now on calls replay it. A Reject, and nothing changes, where that cannot be."""
        with self._lock, self._torch.inference_mode():
            self._before.order_streams()
            made = capture_calls(self._bound, self._bound.graph, self.device, capture)
        if isinstance(made, Reject):
            return made
        self._captured = made
        return None

    def launch(self) -> None:
        """Replay no more: run launch by launch."""
        self._captured = None

    def stay(self) -> None:
        """Leave no calls to the module's own forward."""
        self._own = None

    def step_aside(self, module: "torch.nn.Module") -> Reject | None:
        """Leave calls to ``module``; a Reject, and nothing changes, where it does to memory what a program does not."""
        if self._call is None or any(node.mutates for node in self._bound.graph.nodes):
            return Reject("its own forward writes in place, or nobody knows how it is called")
        self._own = OwnForward(module, self._call)
        return None

    def _directly(self) -> Direct | None:
        """All of a call in one function, where the program is launches and nothing else, and what it writes is new memory."""
        launches, place = self._moving.launches, self._place
        if launches is None or place is None or self._written or not self._all_fresh:
            return None
        return direct_calls(launches, self._bound.graph, self._moving.results, place, self._lock, self._before)

    def _by_itself(self, own: OwnForward, args: tuple[Any, ...], keywords: dict[str, Any], inputs: "Sequence[torch.Tensor]") -> Any:
        assert self._call is not None
        self._check(inputs)
        self._weights.check_unchanged(self.graphs.model.name)
        found = own(args, keywords)
        return calls.rebuilt(self._call.outputs, self._unshared(tuple(found), inputs, (False,) * len(found)))

    def takes(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Whether a call by position alone has as many arguments as the captured one, so that it is canonical as it is."""
        return len(args) == self._positional and not keywords

    def flat(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> "Sequence[torch.Tensor]":
        """The tensors among canonical arguments in the order of the graph's inputs; raises UsageError as a call does."""
        return args if self._call is None else self._call.tensors(args, keywords)

    def run(self, inputs: "Sequence[torch.Tensor]", *, filled_with: int | None = None) -> "tuple[torch.Tensor, ...]":
        """The graph's outputs for its inputs, in their order, in memory that is nobody else's, and without gradients.

        Where one is asked for (grad mode is on, and an input or a parameter requires it), they are inference tensors, so that a backward
        pass that needs them ends in an error. Replayed calls, and what operators of the framework return, are inference tensors always.

        ``filled_with``: a byte for all memory that the program writes, so that what it leaves out is seen.

        Raises:
            UsageError: count, shape or type of the inputs differ from what was compiled for, or the module was changed since.
        """
        learns = self._torch.is_grad_enabled() and (any(map(_REQUIRES_GRAD, inputs)) or self._weights.learn())
        if self._direct is not None and self._captured is None:
            found = self._direct(inputs, None if filled_with is None else partial(self._fill, filled_with), learns)
            if found is not None:
                return found
        self._check(inputs)
        if self._torch.is_inference_mode_enabled():  # to enter it again takes longer than to ask
            return self._run(inputs, filled_with, {})
        results = {} if learns or self._captured is not None else self._made()
        with self._torch.inference_mode():
            return self._run(inputs, filled_with, results)

    def _made(self) -> "dict[str, torch.Tensor]":
        return {name: self._torch.empty(size, dtype=dtype, device=self.device) for name, size, dtype in self._results}

    def _run(self, inputs: "Sequence[torch.Tensor]", filled_with: int | None,
             results: "dict[str, torch.Tensor]") -> "tuple[torch.Tensor, ...]":
        moving, tensors = self._moving, {}
        with self._lock:
            self._before()
            for name, tensor in zip(self._names, inputs, strict=True):
                tensors[name] = tensor if self._is_readable(name, tensor) else self._copied(name, tensor)
            if self._captured is not None and not self._before.is_recording():
                if filled_with is not None:
                    self._captured.poison(filled_with)
                    self._bound.poison(filled_with)
                return self._captured([tensors[name] for name in self._names])
            tensors |= results or self._made()
            if filled_with is not None:
                self._fill(filled_with, [tensors[name] for name, _, _ in self._results])
            moving.to(tensors)
            try:
                self._bound.run()
                found = tuple(self._bound.environment[name] for name in self._bound.graph.outputs)
            finally:
                moving.forget()
            return found if self._all_fresh else self._unshared(found, [tensors[name] for name in self._names], self._fresh)

    def _check(self, inputs: "Sequence[torch.Tensor]") -> None:
        if len(inputs) != len(self._inputs):
            raise UsageError(f"{len(inputs)} inputs were given; the module was compiled for {len(self._inputs)}")
        for (name, shape, dtype), tensor in zip(self._inputs, inputs, strict=True):
            if tensor.layout is not self._strided or tensor.is_nested or tensor.shape != shape or tensor.dtype is not dtype:
                raise UsageError(f"input {name} is {_described(tensor)}; the module was compiled for {tuple(shape)} {dtype}; "
                                 "compile again for other shapes")

    def _unshared(self, found: "tuple[torch.Tensor, ...]", inputs: "Sequence[torch.Tensor]",
                  are_fresh: tuple[bool, ...]) -> "tuple[torch.Tensor, ...]":
        """Results, with copies of those that are others' memory: an operator may have returned an operand itself, or a view of it."""
        read = [tensor.untyped_storage().data_ptr() for tensor in inputs]
        storages = [tensor.untyped_storage().data_ptr() for tensor in found]
        if len(found) == 1 and (are_fresh[0] or (self._owned[0] and storages[0] not in self._foreign and storages[0] not in read)):
            return found
        taken = {*self._foreign, *read, *(at for at, fresh in zip(storages, are_fresh, strict=True) if fresh)}
        results = []
        for tensor, at, fresh, owned in zip(found, storages, are_fresh, self._owned, strict=True):
            results.append(tensor if fresh or (owned and at not in taken) else tensor.clone())
            taken.add(at)
        return tuple(results)

    def _is_readable(self, name: str, tensor: "torch.Tensor") -> bool:
        """Whether kernels can read the tensor where it is."""
        return (type(tensor) in self._plain and tensor.device == self._place and tensor.is_contiguous() and not tensor.is_neg()
                and not tensor.is_conj() and tensor.data_ptr() % ALIGNMENT_BYTES == 0 and name not in self._written)

    def _copied(self, name: str, tensor: "torch.Tensor") -> "torch.Tensor":
        try:
            return self._torch.empty(tensor.shape, dtype=tensor.dtype, device=self._place).copy_(tensor)
        except Exception as exc:  # of a subclass whatever it raises
            why = str(exc).partition("\n")[0][:200]
            raise UsageError(f"input {name} on {tensor.device} cannot be copied to {self._place}: {why}; pass one with numbers") from exc

    def _fill(self, byte: int, results: "Sequence[torch.Tensor]") -> None:
        """Fill all memory that a run writes with ``byte``."""
        for result in results:
            result.flatten().view(self._torch.uint8).fill_(byte)
        self._bound.poison(byte)


def _described(tensor: "torch.Tensor") -> str:
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested:
        return "a nested tensor"
    return f"{tuple(tensor.shape)} {tensor.dtype}" + ("" if layout == "strided" else f" in the layout {layout}")


def _owned(program: Program) -> tuple[bool, ...]:
    """Of every output of a program whether it is alone in its memory; whatever else lies there is not to be given away."""
    graph = program.graph
    memory = memory_roots(graph)
    roots = [memory[output] for output in graph.outputs]
    others = {memory[name] for name in (*graph.inputs, *(v.name for v in graph.values if v.source))}
    return tuple(root not in others and roots.index(root) == index for index, root in enumerate(roots))


def _written(program: Program) -> frozenset[str]:
    """Inputs that the program writes into: it works on a copy of those."""
    memory = memory_roots(program.graph)
    written = {memory[name] for node in program.graph.nodes for name in node.mutates}
    return frozenset(name for name in program.graph.inputs if memory[name] in written)
