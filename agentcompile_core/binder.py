"""Binding: addresses for every value of a program, arguments for every launch, one callable per segment."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .binding import argument_values
from .candidate import Kernel, Launch, StepSource
from .errors import ContractError
from .graph import ValueKind
from .interpreter import prepare
from .layout import alias_roots, is_alias
from .plan import Step
from .program import BoundProgram, Program, Segment, buffer_plan, without_views
from .region import Role

if TYPE_CHECKING:
    import torch

    from .interfaces import Backend
    from .weights import WeightStore


class _Binder:
    """Works on one program once; everything it makes goes into the BoundProgram."""

    def __init__(self, program: Program, weights: "WeightStore", states: "Mapping[str, torch.Tensor]",
                 inputs: "Mapping[str, torch.Tensor]", device: str, backend: "Backend | None",
                 kernels: Mapping[str, Kernel], callables: Mapping[Step, Callable[..., None]]) -> None:
        self.program, self.graph = program, program.graph
        self.weights, self.device, self.backend = weights, device, backend
        self.kernels, self.callables = kernels, callables
        self.sources: dict[str, StepSource] = {s.key: s for s in program.sources}
        self.segments = without_views(program.graph, program.segments)
        self.roots = alias_roots(program.graph)
        self.keep: list[Any] = []
        self.environment: dict[str, torch.Tensor] = {}
        self.planned: dict[str, torch.Tensor] = {}
        self.workspaces: dict[tuple[str, str], torch.Tensor] = {}
        self._place_weights()
        self._place_values(states, inputs)
        self._place_planned()
        self._place_aliases()

    def _place_weights(self) -> None:
        # Layout first: it moves parameters, and addresses are read afterwards.
        groups = []
        for segment in self.segments:
            for name, values in segment.operands:
                operand = next(o for o in segment.match.operands if o.name == name)  # type: ignore[union-attr]
                if operand.role is Role.WEIGHT:
                    groups.append(tuple(self.graph.by_name[self.roots[v]].source for v in values))
        self.weights.arrange(groups)

    def _place_values(self, states: "Mapping[str, torch.Tensor]", inputs: "Mapping[str, torch.Tensor]") -> None:
        for value in self.graph.values:
            if value.kind in (ValueKind.WEIGHT, ValueKind.CONSTANT):
                self.environment[value.name] = self.weights.tensor(value.source)
            elif value.kind is ValueKind.STATE:
                self.environment[value.name] = _given(states, value.source, "state")
            elif value.kind is ValueKind.INPUT:
                self.environment[value.name] = _given(inputs, value.name, "input")

    def _place_planned(self) -> None:
        import torch

        offsets, nbytes = buffer_plan(self.program, self.segments)
        arena = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=self.device)
        self.keep.append(arena)
        for name, offset in offsets.items():
            spec = self.graph.spec(name)
            flat = arena[offset:offset + spec.nbytes].view(getattr(torch, spec.dtype.value))
            self.planned[name] = flat.view(spec.shape)
        made_by_step = {v for s in self.segments for v in s.values((Role.OUTPUT,))}
        for name in made_by_step:
            root = self.roots[name]
            self.environment[root] = self.planned[root]

    def _place_aliases(self) -> None:
        for node in self.graph.nodes:
            if is_alias(self.graph, node):
                root, name = self.roots[node.outputs[0]], node.outputs[0]
                if root in self.environment:
                    self.environment[name] = self.environment[root].view(self.graph.spec(name).shape)

    def address(self, names: tuple[str, ...]) -> int:
        """Address of an operand's first value; the others lie behind it."""
        root = self.roots[names[0]]
        value = self.graph.by_name[root]
        if value.kind is ValueKind.WEIGHT:
            return self.weights.concatenated(tuple(self.graph.by_name[self.roots[n]].source for n in names)).data_ptr()
        if root in self.planned:
            return self.planned[root].data_ptr()
        tensor = self.environment.get(root)
        if tensor is None:
            raise ContractError(f"program {self.graph.name}: operand {names[0]} has no address")
        return tensor.data_ptr()

    def runs(self) -> list[Callable[[], None]]:
        """One callable per segment, in order."""
        found: list[Callable[[], None]] = []
        chained = False  # whether the node captured just before is a kernel of ours
        for index, segment in enumerate(self.segments):
            if segment.step is None:
                found.append(self._framework(segment, index))
            elif segment.source:
                found.append(self._kernel(segment, chained))
            else:
                found.append(self._callable(segment))
            chained = segment.step is not None and bool(segment.source)
        return found

    def _framework(self, segment: Segment, index: int) -> Callable[[], None]:
        later = {v for s in self.segments[index + 1:] for v in self._reads(s)} | set(self.graph.outputs)
        made = [o for n in segment.nodes for o in self.graph.node_by_name[n].outputs]
        copies = tuple(name for name in made if name in self.planned)
        wanted = tuple(name for name in made if name in later or name in copies)
        prepared = prepare(self.graph, segment.nodes, device=self.device, outputs=wanted)
        environment, planned = self.environment, self.planned

        def run() -> None:
            environment.update(prepared.run(environment))
            for name in copies:
                planned[name].copy_(environment[name])

        return run

    def _reads(self, segment: Segment) -> tuple[str, ...]:
        if segment.step is None:
            return tuple(i for n in segment.nodes for i in self.graph.node_by_name[n].inputs)
        return tuple(v for _, values in segment.operands for v in values)

    def _kernel(self, segment: Segment, chained: bool) -> Callable[[], None]:
        import torch

        source = self.sources[segment.source]
        if self.backend is None or source.digest not in self.kernels:
            raise ContractError(f"program {self.graph.name}: no built kernel for step {segment.step}")
        handle = self.backend.load(self.kernels[source.digest])
        addresses = {name: self.address(values) for name, values in segment.operands}
        addresses.update(self._workspaces(source))
        launches: list[Callable[[int], None]] = []
        for launch in source.launches:
            launches.append(self._launch(handle, launch, addresses, chained))
            chained = True
        on_cpu, current = self.device == "cpu", torch.cuda.current_stream

        def run() -> None:
            stream = 0 if on_cpu else current().cuda_stream
            for launch in launches:
                launch(stream)

        return run

    def _launch(self, handle: Any, launch: Launch, addresses: Mapping[str, int], chained: bool) -> Callable[[int], None]:
        assert self.backend is not None
        return self.backend.prepare(handle, launch, argument_values(launch, addresses), launch.pdl and chained)

    def _workspaces(self, source: StepSource) -> dict[str, int]:
        import torch

        found = {}
        for workspace in source.workspaces:
            key = (source.key, workspace.name)
            if key not in self.workspaces:
                self.workspaces[key] = torch.zeros(workspace.nbytes, dtype=torch.uint8, device=self.device)
                self.keep.append(self.workspaces[key])
            found[workspace.name] = self.workspaces[key].data_ptr()
        return found

    def _callable(self, segment: Segment) -> Callable[[], None]:
        assert segment.step is not None and segment.match is not None
        call = self.callables[segment.step]
        operands = {}
        for name, values in segment.operands:
            operand = next(o for o in segment.match.operands if o.name == name)
            root = self.roots[values[0]]
            if operand.role is Role.WEIGHT:
                operands[name] = self.weights.concatenated(tuple(self.graph.by_name[self.roots[v]].source for v in values))
            elif root in self.planned and len(values) > 1:
                base = self.planned[root]
                operands[name] = base.as_strided(operand.spec.shape, _contiguous_strides(operand.spec.shape))
            else:
                tensor = self.planned.get(root, self.environment.get(root))
                if tensor is None:
                    raise ContractError(f"program {self.graph.name}: operand {name} has no tensor")
                operands[name] = tensor.view(self.graph.spec(values[0]).shape)
        return lambda: call(**operands)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _given(tensors: "Mapping[str, torch.Tensor]", name: str, what: str) -> "torch.Tensor":
    if name not in tensors:
        raise ContractError(f"no tensor for {what} {name!r}; given: {', '.join(sorted(tensors)[:8])}")
    return tensors[name]


def bind(program: Program, weights: "WeightStore", states: "Mapping[str, torch.Tensor]", inputs: "Mapping[str, torch.Tensor]",
         device: str, backend: "Backend | None" = None, kernels: Mapping[str, Kernel] | None = None,
         callables: Mapping[Step, Callable[..., None]] | None = None) -> BoundProgram:
    """Give every value an address on ``device`` and every launch its arguments.

    ``states`` maps state sources (``kv.key.0``, ``session.position``) and ``inputs`` graph input names to tensors.

    Raises:
        ContractError: a kernel, tensor or address is missing.
    """
    binder = _Binder(program, weights, states, inputs, device, backend, kernels or {}, callables or {})
    runs = binder.runs()
    return BoundProgram(program, runs, binder.environment, [binder.keep, binder.planned, binder.workspaces])
