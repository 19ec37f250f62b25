"""Binding: addresses for every value of a program, arguments for every launch, one callable per segment."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ..errors import ContractError
from ..ir.candidate import StepSource
from ..ir.graph import GraphKind, TensorSpec, ValueKind
from ..ir.region import Role
from ..ir.source_check import argument_values
from ..ops.aliasing import alias_roots, is_alias
from ..ops.dtypes import torch_dtype, zeros
from ..ops.heads import ways_in
from ..ops.interpreter import compile_nodes
from ..ops.joint_products import Memory
from ..ops.states_in_place import ADVANCING, copied_over
from .bound_program import BoundProgram, Piece
from .buffers import buffer_plan, without_views
from .executables import Executables, call_key
from .head_rows import HeadRows
from .live import HostPosition, LiveAttention, Outside, begins, is_read_in_the_last_row, last_reads, live_nodes
from .moving import Moving, late_values, lies_as, own_results
from .moving_launches import MovingLaunch, enqueue, moving_launch
from .pieces import cut, fixed_values, runs_outside
from .program import Program, Segment
from .row_buffers import columns_of, joined_results, parts_of_operands, products_by_rows, rows_of_operands, without_taken
from .row_runs import alike, runs_beside
from .workspaces import Workspaces

if TYPE_CHECKING:
    import torch

    from ..plugin.backend import Backend
    from .weights import WeightStore


class _Binder:
    """Works on one program once; everything it makes goes into the BoundProgram."""

    def __init__(self, program: Program, weights: "WeightStore", states: "Mapping[str, torch.Tensor]",
                 inputs: "Mapping[str, torch.Tensor]", executables: Executables, live: HostPosition | None = None,
                 moves: bool = False) -> None:
        self.program, self.graph, self.live = program, program.graph, live
        self.weights, self.executables, self.device = weights, executables, executables.device
        self.sources: dict[str, StepSource] = {s.key: s for s in program.sources}
        steps = {name for segment in program.segments if segment.step is not None for name in segment.nodes}
        self.apart = {name: ways_in(self.graph, self.graph.node_by_name[name], steps)
                      for name in (live_nodes(program.graph) if live is not None else ())}
        before = {name: tuple(dict.fromkeys(node for way in ways.values() for node in way.nodes)) for name, ways in self.apart.items()}
        segments, several = cut(program.graph, without_views(program.graph, program.segments), before), self.graph.tokens > 1 and not moves
        inside = rows_of_operands if several else parts_of_operands
        self.taken = {} if moves else inside(self.graph, segments)
        self.segments = without_taken(self.graph, segments, self.taken)
        self.last_reads = last_reads(self.graph, self.segments, self._outside) if self.apart else ((),) * len(self.segments)
        self.read_until = {value: index for index, segment in enumerate(self.segments) for value in self._reads(segment)}
        self.roots = alias_roots(program.graph)
        rows = self.graph.kind is GraphKind.DECODE and self.graph.tokens > 1
        self.shares_products = (bool(self.apart) or rows) and executables.backend is not None
        self.environment: dict[str, torch.Tensor] = {}
        self.planned: dict[str, torch.Tensor] = {}
        self.workspaces = Workspaces(executables.device)
        fixed = fixed_values(self.graph, self.segments, self._outside)
        self.joined = joined_results(self.graph, self.segments) if several else {}
        self.put_together = {one.whole for one in self.joined.values()}  # by the steps that write their parts
        wholes = (self.roots[one.whole] for one in (*self.taken.values(), *self.joined.values()))
        fixed = tuple(dict.fromkeys((*fixed, *(whole for whole in wholes if self.graph.kind_of(whole) is ValueKind.INTERMEDIATE))))
        results = own_results(self.graph, self.segments, fixed) if moves else ()
        self.late = late_values(self.graph, self.segments, fixed) if moves else frozenset()
        self.moving = Moving(self.graph, results, self.environment, self.planned) if moves else None
        self.launches: list[MovingLaunch] = []  # of steps, where inputs and results move
        self._place_weights()
        self._place_values(states, inputs)
        self._place_planned(fixed, results)
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

    def _place_planned(self, fixed: tuple[str, ...], results: tuple[str, ...]) -> None:
        import torch

        shared = self.shares_products and not self.apart
        beside = products_by_rows(self.graph, self.segments, self.taken, self.environment) if shared else ()
        offsets, nbytes = buffer_plan(self.program, self.segments, fixed, elsewhere=(*results, *self.taken, *self.joined), beside=beside,
                                      parts={name: one.whole for name, one in self.joined.items()})
        arena = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=self.device)
        self.arena = arena
        for name, offset in offsets.items():
            spec = self.graph.spec(name)
            flat = arena[offset:offset + spec.nbytes].view(torch_dtype(spec.dtype))
            self.planned[name] = flat.view(spec.shape)
        for names in beside:
            specs = [self.graph.spec(name) for name in names]
            flat = arena[offsets[names[0]] :][: sum(spec.nbytes for spec in specs)].view(torch_dtype(specs[0].dtype))
            self.planned |= columns_of(flat, {name: spec.shape for name, spec in zip(names, specs, strict=True)})
        for name, one in {**self.taken, **self.joined}.items():  # what is written to the whole is there already
            whole, spec = self.planned.get(self.roots[one.whole], self.environment.get(one.whole)), self.graph.spec(name)
            assert whole is not None
            part = whole.view(self.graph.spec(one.whole).shape).narrow(one.axis, one.start, one.count)
            self.planned[name] = part.view(spec.shape)
        self.environment |= {name: self.planned[name] for name in self.taken}  # where steps are looked at one by one
        for name in results:  # until the first call brings its own
            self.planned[name] = zeros(self.graph.spec(name), self.device)
        made_by_step = {v for s in self.segments for v in s.values((Role.OUTPUT,))}
        made_by_call = {n.outputs[0] for n in self.graph.nodes if n.name in self.apart and not begins(n)}
        for name in (*made_by_step, *made_by_call, *self.put_together):
            root = self.roots[name]
            self.environment[root] = self.planned[root]

    def _place_aliases(self) -> None:
        for node in self.graph.nodes:
            if is_alias(self.graph, node):
                root, name = self.roots[node.outputs[0]], node.outputs[0]
                if root in self.environment:
                    self.environment[name] = self.environment[root].view(self.graph.spec(name).shape)

    def _outside(self, segment: Segment) -> bool:
        """Whether a framework segment, or the second half of a call of attention, stays outside of captured graphs."""
        if self.apart.keys().isdisjoint(segment.nodes):
            return runs_outside(self.graph, segment)
        return not begins(self.graph.node_by_name[segment.nodes[-1]])

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

    def parts(self) -> list[Piece]:
        """One per segment, in order."""
        found, last = list[Piece](), self._last_writer()
        chained = False  # whether the node captured just before is a kernel of ours
        staging: dict[Any, torch.Tensor] = {}
        done = 0  # how many segments run already
        shared = {name for name, writers in copied_over(self.graph).items() if writers > 1}  # kernels read states early (decision 0048)
        for index, segment in enumerate(self.segments):
            if index < done:
                continue
            chained = chained and not any(shared.intersection(self.graph.node_by_name[name].mutates) for name in segment.nodes)
            if not self.apart.keys().isdisjoint(segment.nodes):
                append, attends = self._attention(segment, index, staging)
                found += evolve(append, closing=index > last), evolve(attends, closing=index >= last)
                chained = False
                continue
            if segment.step is None:
                run, capturable = self._framework(segment, index), not runs_outside(self.graph, segment)
            elif segment.source:
                (run, done), capturable = self._kernels(index, chained), True
            else:
                run, capturable = self._call(segment)
            done = max(done, index + 1)
            names = dict.fromkeys(one.name for one in self.segments[index:done])
            found.append(Piece(run=run, capturable=capturable, closing=index > last, names=tuple(names)))
            chained = segment.step is not None and bool(segment.source)
        return found

    def _last_writer(self) -> int:
        """The last segment of a prompt chunk that leaves something to a later one: rows of a cache, or a state of fixed size."""
        if not self.apart:
            return len(self.segments)
        states = {v.name for v in self.graph.values if v.kind is ValueKind.STATE and not v.source.startswith("session.")}
        return max((index for index, segment in enumerate(self.segments) for name in segment.nodes
                    if not states.isdisjoint(self.graph.node_by_name[name].mutates)), default=len(self.segments))

    def _attention(self, segment: Segment, index: int, staging: "dict[Any, torch.Tensor]") -> tuple[Piece, Piece]:
        """A call of attention over what is cached, whose first half a graph may hold."""
        node, backend = self.graph.node_by_name[segment.nodes[-1]], self.executables.backend
        assert self.live is not None
        out, spec = self.planned.get(node.outputs[0]), self.graph.spec(node.inputs[0])
        if out is not None and (spec.shape, spec.dtype) not in staging:
            batch, heads, count, width = spec.shape  # in memory as the result: libraries write as they read
            rows = zeros(TensorSpec(shape=(batch, count, heads, width), dtype=spec.dtype), self.device)
            staging[spec.shape, spec.dtype] = rows.transpose(1, 2)
        outside = None if out is None else Outside(out=out, queries=staging[spec.shape, spec.dtype],
                                                   last_row_only=is_read_in_the_last_row(self.graph, node))
        ways = self.apart[node.name]
        made = tuple(o for name in segment.nodes[:-1] for o in self.graph.node_by_name[name].outputs if o in node.inputs)
        before = compile_nodes(self.graph, segment.nodes[:-1], device=self.device, outputs=made, bodies=backend.body if backend else None)
        head_rows = HeadRows(ways, self.environment, before, backend)
        call = LiveAttention(node, self.environment, self.live, head_rows, backend, outside)
        return call.pieces(lambda: self._forget(index))

    def _forget(self, index: int) -> None:
        """Drop what nothing reads behind a segment; a graph that holds it has its address."""
        for name in self.last_reads[index]:
            self.environment.pop(name, None)

    def _framework(self, segment: Segment, index: int) -> Callable[[], None]:
        nodes = [n for n in segment.nodes if self.put_together.isdisjoint(self.graph.node_by_name[n].outputs)]
        made = [o for n in nodes for o in self.graph.node_by_name[n].outputs]
        copies = tuple(name for name in made if name in self.planned and name not in self.taken)
        wanted = tuple(n for n in made if self.read_until.get(n, -1) > index or n in self.graph.outputs or n in copies)
        backend = self.executables.backend
        several = bool(self.apart) or self.graph.tokens > 1  # one token runs as it was timed, but for what no kernel of a search does
        bodies = None if backend is None else backend.body if several else partial(_of_one_token, backend)
        into = {} if self.apart or self.moving is not None else {name: self.planned[name] for name in copies}
        memory = Memory(weights=self.environment, results=into, joins=self.shares_products)
        prepared = compile_nodes(self.graph, nodes, device=self.device, outputs=wanted, bodies=bodies, memory=memory)
        copies = tuple(name for name in copies if name not in prepared.written)
        environment, planned, late, forget = self.environment, self.planned, self.late, self._forget
        # What a graph captured behind this segment reads is where it was at the capture.
        fixed = {name: planned[name] for name in copies} if runs_outside(self.graph, segment) else {}

        def run() -> None:
            environment.update(prepared.run(environment))
            for name in copies:
                if name in late and lies_as(environment[name], planned[name]):
                    continue
                planned[name].copy_(environment[name])
                if name in late:
                    environment[name] = planned[name]
            environment.update(fixed)
            forget(index)

        return run

    def _reads(self, segment: Segment) -> tuple[str, ...]:
        if segment.step is None:
            return tuple(i for n in segment.nodes for i in self.graph.node_by_name[n].inputs)
        return tuple(v for _, values in segment.operands for v in values)

    def _kernels(self, first: int, chained: bool) -> tuple[Callable[[], None], int]:
        """What runs a segment with a source, and the number of the next one: those of rows beside each other may be one launch."""
        segment, backend = self.segments[first], self.executables.backend
        together = alike(self.segments, first) if self.graph.tokens > 1 and self.moving is None else ()
        addresses = [{name: self.address(values) for name, values in one.operands} for one in together]
        count, source = runs_beside(together, addresses) if len(together) > 1 else 1, self.sources[segment.source]
        if count > 1 and backend is not None:
            own = [one | self.workspaces.addresses(source, run) for run, one in enumerate(addresses[:count])]
            launches = backend.prepare_runs(source, [[argument_values(launch, one) for one in own] for launch in source.launches])
            if launches is not None:
                return partial(_enqueue, launches, backend.stream), first + count
        return self._kernel(segment, chained), first + 1

    def _kernel(self, segment: Segment, chained: bool) -> Callable[[], None]:
        source = self.sources[segment.source]
        backend, kernels = self.executables.backend, self.executables.kernels
        if backend is None or source.digest not in kernels:
            raise ContractError(f"program {self.graph.name}: no built kernel for step {segment.step}")
        handle = backend.load(kernels[source.digest])
        addresses = {name: self.address(values) for name, values in segment.operands}
        addresses.update(self.workspaces.addresses(source))
        moved, early = self._moved(segment), [launch.pdl and (chained or index > 0) for index, launch in enumerate(source.launches)]
        found = [moving_launch(backend, handle, launch, addresses, moved, pdl) for launch, pdl in zip(source.launches, early, strict=True)]
        if self.moving is not None:
            self.launches += found
            return partial(enqueue, tuple(found), self.environment, backend.stream)
        return partial(_enqueue, tuple(one.run for one in found), backend.stream)

    def _moved(self, segment: Segment) -> dict[str, str]:
        """Operands whose memory is another one at every call, and whose it is."""
        if self.moving is None:
            return {}
        roots = ((name, self.roots[values[0]]) for name, values in segment.operands)
        return {name: root for name, root in roots if root in self.moving or root in self.late}

    def _call(self, segment: Segment) -> tuple[Callable[[], None], bool]:
        import torch

        assert segment.step is not None and segment.match is not None
        bound = self.executables.calls.get(call_key(segment.step, segment.version, segment.match))
        if bound is None:
            raise ContractError(f"program {self.graph.name}: nothing is bound for step {segment.step}")
        call, moved, environment = bound.run, self._moved(segment), self.environment
        operands = {name: self._operand(segment, name, values) for name, values in segment.operands if name not in moved}
        shapes = {name: self.graph.spec(values[0]).shape for name, values in segment.operands}

        def run() -> None:
            now = {name: environment[value].view(shapes[name]) for name, value in moved.items()}
            with torch.no_grad():
                call(**operands | now)

        return run, bound.capturable

    def _operand(self, segment: Segment, name: str, values: tuple[str, ...]) -> "torch.Tensor":
        """The tensor of one operand in the shape that its match gives it; several values lie behind each other."""
        import torch

        assert segment.match is not None
        operand, root = segment.match.need(name), self.roots[values[0]]
        if operand.role is Role.WEIGHT:
            return self.weights.concatenated(tuple(self.graph.by_name[self.roots[v]].source for v in values))
        if root in self.planned and len(values) > 1:
            return self.planned[root].as_strided(operand.spec.shape, torch.empty(operand.spec.shape, device="meta").stride())
        tensor = self.planned.get(root, self.environment.get(root))
        if tensor is None:
            raise ContractError(f"program {self.graph.name}: operand {name} has no tensor")
        return tensor.view(self.graph.spec(values[0]).shape)


def _of_one_token(backend: "Backend", *ops: str) -> "Callable[..., Any] | None":
    return backend.body(*ops) if ops[0] in ADVANCING else None


def _enqueue(launches: Sequence[Callable[[int], None]], stream: Callable[[], int]) -> None:
    current = stream()
    for launch in launches:
        launch(current)


def _given(tensors: "Mapping[str, torch.Tensor]", name: str, what: str) -> "torch.Tensor":
    if name not in tensors:
        raise ContractError(f"no tensor for {what} {name!r}; given: {', '.join(sorted(tensors)[:8])}")
    return tensors[name]


def bind(program: Program, weights: "WeightStore", states: "Mapping[str, torch.Tensor]", inputs: "Mapping[str, torch.Tensor]",
         executables: Executables, live: HostPosition | None = None, moves: bool = False) -> BoundProgram:
    """Give every value an address on the device, every launch its arguments and every callable its tensors.

    ``states`` maps state sources (``kv.key.0``, ``session.position``) and ``inputs`` graph input names to tensors. With ``live``
    the attention of prompt chunks runs over what is cached, up to where that says; without, over the capacity. With ``moves`` inputs
    and results can lie elsewhere at every call, see ``BoundProgram.moving``.

    Raises:
        ContractError: a kernel, callable, tensor or address is missing.
    """
    binder = _Binder(program, weights, states, inputs, executables, live, moves)
    parts = binder.parts()
    keep = [binder.planned, binder.workspaces]
    if binder.moving is not None and all(segment.step is not None and segment.source for segment in binder.segments):
        binder.moving.launches = tuple(binder.launches)
    return BoundProgram(program, parts, binder.environment, keep, binder.arena, binder.moving, binder.segments)
