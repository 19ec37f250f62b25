"""Programs of one token over random graphs: parts of a value that steps read lie where the value does, and are what they are alone."""

from typing import Any

import torch
from agentcompile_rules_transformers.draft import Draft
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType, Graph, GraphKind, Node, Ref, TensorSpec, Value, ValueKind
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.region import Access, Operand, Role
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.schema import canonical
from agentcompile_core.runtime.binder import bind
from agentcompile_core.runtime.bound_program import BoundProgram
from agentcompile_core.runtime.executables import BoundCall, Executables, call_key
from agentcompile_core.runtime.make_program import with_steps
from agentcompile_core.runtime.program import Program, Segment, framework_program
from agentcompile_core.runtime.row_buffers import parts_of_operands
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.testing.doubles import fake_match

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=150)
OPERATORS = {"tanh": torch.tanh, "sin": torch.sin, "neg": torch.neg}
SIZES = (1, 3, 4, 8, 12, 32)


class Made:
    """A graph of one token: values that steps or the framework make, cut into parts, which steps or the framework read; then the next."""

    def __init__(self, draw: Any) -> None:
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.steps: list[Segment] = []
        self.calls: dict[str, BoundCall] = {}
        sizes = draw(st.lists(st.sampled_from(SIZES), min_size=2, max_size=4))
        width = sum(sizes)
        self._value("x", width, ValueKind.INPUT)
        current, late = "x", []
        for _ in range(draw(st.integers(1, 3))):
            whole = self._applied(draw, current, width)
            parts = self._cut(draw, whole, draw(st.permutations(sizes)))
            made = [self._applied(draw, part, size) for part, size in parts]
            if draw(st.booleans()):
                late.append((draw(st.sampled_from(parts)), len(self.nodes)))
            current = self._node("aten.cat.default", (tuple(map(Ref, made)), -1), width)
            if draw(st.integers(0, 3)) == 0:  # somebody reads the whole behind its parts, too
                current = self._node("aten.add.Tensor", (Ref(current), Ref(whole)), width)
        outputs = [current]
        for (part, size), _ in late:  # read when the whole is not any more
            outputs.append(self._applied(draw, part, size))
        self.graph = Graph(name="token", kind=GraphKind.DECODE, values=tuple(self.values), nodes=tuple(self.nodes), inputs=("x",),
                           outputs=tuple(dict.fromkeys(outputs))).verify()

    def _cut(self, draw: Any, whole: str, sizes: list[int], deep: bool = True) -> list[tuple[str, int]]:
        """Parts in order; some are cut again, and what is cut may be seen as another shape, or be the input as it is."""
        if deep and draw(st.integers(0, 4)) == 0:
            whole = "x"
        if draw(st.integers(0, 3)) == 0:
            whole = self._node("aten.view.default", (Ref(whole), (1, 1, sum(sizes))), sum(sizes), kind="view")
        if deep and draw(st.integers(0, 2)) == 0:
            first, rest = self._cut(draw, whole, [sizes[0], sum(sizes[1:])], deep=False)
            return [first, *self._cut(draw, rest[0], sizes[1:], deep=False)] if len(sizes) > 2 else [first, rest]
        if draw(st.booleans()):
            outputs = tuple(f"p{len(self.nodes)}.{i}" for i in range(len(sizes)))
            for name, size in zip(outputs, sizes, strict=True):
                self._value(name, size)
            self.nodes.append(canonical(Node(name=f"n{len(self.nodes)}", op="aten.split_with_sizes.default", kind="view",
                                             args=(Ref(whole), tuple(sizes), -1), outputs=outputs)))
            return list(zip(outputs, sizes, strict=True))
        found, at = [], 0
        for size in sizes:
            found.append((self._node("aten.slice.Tensor", (Ref(whole), 2, at, at + size), size, kind="view"), size))
            at += size
        return found

    def _applied(self, draw: Any, given: str, size: int) -> str:
        operator = draw(st.sampled_from(sorted(OPERATORS)))
        made = self._node(f"aten.{operator}.default", (Ref(given),), size)
        if draw(st.integers(0, 4)) > 0:
            self._step(self.nodes[-1], operator, given, made)
        return made

    def _step(self, node: Node, operator: str, given: str, made: str) -> None:
        specs = {value.name: value.spec for value in self.values}
        operands = tuple(Operand(name=name, role=role, spec=specs[value], values=(value,), access=access) for name, role, value, access in (
            ("x", Role.INPUT, given, Access.READ), ("out", Role.OUTPUT, made, Access.WRITE)))
        match = evolve(fake_match()[0], nodes=(node.name,), operands=operands, epilogue=None)
        step = Step(match_id="m", implementation=f"test/{operator}", origin=Origin.GENERATED, schedule=Schedule({}))
        self.steps.append(Segment(nodes=match.nodes, step=step, match=match, operands=tuple((o.name, o.values) for o in operands)))

        def run(x: torch.Tensor, out: torch.Tensor) -> None:
            assert x.is_contiguous() and out.is_contiguous() and (x.numel() == 1 or x.data_ptr() % 16 == 0)
            out.copy_(OPERATORS[operator](x))

        self.calls[call_key(step, 1, match)] = BoundCall(run=run)

    def _value(self, name: str, size: int, kind: ValueKind = ValueKind.INTERMEDIATE) -> str:
        self.values.append(Value(name=name, spec=TensorSpec(shape=(1, 1, size), dtype=DType.F32), kind=kind))
        return name

    def _node(self, op: str, args: tuple[Any, ...], size: int, kind: str = "") -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(canonical(Node(name=name, op=op, kind=kind or op.split(".")[1], args=args, outputs=(name,))))
        return self._value(name, size)

    @property
    def program(self) -> Program:
        return with_steps(framework_program(self.graph), [evolve(step, version=1) for step in self.steps])

    def bound(self, x: torch.Tensor) -> BoundProgram:
        return bind(self.program, WeightStore.from_tensors({}, "cpu"), {}, {"x": x}, Executables(device="cpu", calls=self.calls))


made_graphs = st.composite(Made)()


@SETTINGS
@given(made_graphs)
def test_parts_are_what_they_are_alone(made: Made) -> None:
    x = torch.randn(made.graph.spec("x").shape, generator=torch.Generator().manual_seed(3))
    wanted = compile_nodes(made.graph, device="cpu").run({"x": x})
    bound = made.bound(x)
    for _ in range(2):  # nothing of the first run is left where the second one needs something else
        bound.poison()
        bound.run()
        for index, name in enumerate(made.graph.outputs):
            assert torch.equal(bound.output(index), wanted[name]), name


@SETTINGS
@given(made_graphs)
def test_each_step_finds_its_operands_by_name(made: Made) -> None:
    """As a check that runs steps one by one does, beside the framework's operators on the same values."""
    x = torch.randn(made.graph.spec("x").shape, generator=torch.Generator().manual_seed(4))
    bound = made.bound(x)
    for segment, part in zip(bound.segments, bound.parts, strict=True):
        if segment.step is not None:
            given = {name: bound.environment[name].clone() for _, names in segment.operands[:1] for name in names}
            wanted = compile_nodes(made.graph, segment.nodes, device="cpu").run(given)
        part.run()
        for name, tensor in wanted.items() if segment.step is not None else ():
            assert torch.equal(bound.environment[name], tensor), name


@SETTINGS
@given(made_graphs, st.randoms(use_true_random=False))
def test_the_order_of_steps_does_not_matter(made: Made, order: Any) -> None:
    """Parts of parts may be read before the parts themselves."""
    order.shuffle(made.steps)
    made.bound(torch.zeros(made.graph.spec("x").shape))


def test_a_part_of_a_state_is_what_the_state_is_when_it_is_cut() -> None:
    draft = Draft()
    state = draft.given("state", (1, 1, 32), DType.F32, ValueKind.STATE)
    fresh = draft.given("x", (1, 1, 32), DType.F32)
    half = draft.one("aten.slice.Tensor", (state, 2, 0, 16), (1, 1, 16), DType.F32, kind="view")
    first = draft.one("aten.tanh.default", (half,), (1, 1, 16), DType.F32)
    draft.call("aten.copy_.default", (state, fresh), (1, 1, 32), dtype=DType.F32, mutates=("state",))
    part = draft.one("aten.slice.Tensor", (half, 2, 4, 8), (1, 1, 4), DType.F32, kind="view")
    graph = draft.graph(first, draft.one("aten.sin.default", (part,), (1, 1, 4), DType.F32))
    segments = with_steps(framework_program(graph), [evolve(one, version=1) for one in steps_of(graph, ("tanh", "sin"))]).segments
    assert parts_of_operands(graph, segments) == {}


def steps_of(graph: Graph, names: tuple[str, ...]) -> list[Segment]:
    """A step for each operator of those names."""
    found = []
    for node in graph.nodes:
        if node.kind in names:
            reads = Operand(name="x", role=Role.INPUT, spec=graph.spec(node.inputs[0]), values=node.inputs, access=Access.READ)
            writes = Operand(name="out", role=Role.OUTPUT, spec=graph.spec(node.outputs[0]), values=node.outputs, access=Access.WRITE)
            match = evolve(fake_match()[0], nodes=(node.name,), operands=(reads, writes), epilogue=None)
            step = Step(match_id="m", implementation=f"test/{node.kind}", origin=Origin.GENERATED, schedule=Schedule({}))
            found.append(Segment(nodes=match.nodes, step=step, match=match, operands=(("x", reads.values), ("out", writes.values))))
    return found


def test_cuts_that_only_steps_read_are_no_segments() -> None:
    seen = {"taken": 0, "dropped": 0}

    @settings(SETTINGS, max_examples=150)
    @given(made_graphs)
    def look(made: Made) -> None:
        taken = parts_of_operands(made.graph, made.program.segments)
        seen["taken"] += len(taken)
        bound = made.bound(torch.zeros(made.graph.spec("x").shape))
        seen["dropped"] += len(made.program.segments) - len(bound.segments)

    look()
    assert all(count >= 10 for count in seen.values()), seen
