"""Programs of several rows over random graphs: whatever lies inside something else, every value is what the graph alone computes."""

from typing import Any

import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType, Graph, GraphKind, Node, Ref, TensorSpec, Value, ValueKind
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.region import Access, Operand, Role
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.schema import canonical
from agentcompile_core.runtime.binder import bind
from agentcompile_core.runtime.executables import BoundCall, Executables, call_key
from agentcompile_core.runtime.make_program import with_steps
from agentcompile_core.runtime.program import Program, Segment, framework_program
from agentcompile_core.runtime.row_buffers import joined_results, products_by_rows, rows_of_operands
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.testing.doubles import fake_match

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=150)
OPERATORS = {"tanh": torch.tanh, "sin": torch.sin, "neg": torch.neg}


class NoBodies:
    """As much of a backend as products that may be one ask for."""

    def body(self, *_: str) -> None:
        return None


class Made:
    """A graph of ``rows`` rows: products, an operator for each row of each of them as a step or not, the rows together again."""

    def __init__(self, draw: Any) -> None:
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.steps: list[Segment] = []
        self.calls: dict[str, BoundCall] = {}
        self.rows = draw(st.integers(2, 4))
        width = draw(st.sampled_from((32, 64, 128)))
        self._value("x", (1, self.rows, width), ValueKind.INPUT)
        current, late = "x", []
        for _ in range(draw(st.integers(1, 3))):
            current = self._layer(draw, current, width, late)
        for value in late:  # it is read when what it is a part of is not any more
            current = self._node("aten.add.Tensor", (Ref(current), Ref(value)), (1, self.rows, width))
        outputs = (current, *draw(st.lists(st.sampled_from(late), unique=True, max_size=2) if late else st.just([])))
        self.graph = Graph(name="rows", kind=GraphKind.DECODE, tokens=self.rows, values=tuple(self.values), nodes=tuple(self.nodes),
                           inputs=("x",), outputs=outputs).verify()

    def _layer(self, draw: Any, current: str, width: int, late: list[str]) -> str:
        count, first = draw(st.integers(1, 3)), len(self.weights)
        has_bias = draw(st.booleans())
        together = torch.randn(count * width, width, generator=torch.Generator().manual_seed(first)) / width**0.5
        biases = torch.randn(count * width)
        products = []
        for place in range(count):
            names = [f"w{first + place}", f"b{first + place}"][: 1 + has_bias]
            for name, of in zip(names, (together, biases), strict=False):
                self.weights[name] = of[place * width : (place + 1) * width]
                self._value(name, tuple(self.weights[name].shape), ValueKind.WEIGHT, source=name)
            products.append(self._node("aten.linear.default", (Ref(current), *map(Ref, names)), (1, self.rows, width)))
        whole = draw(st.integers(0, 5))
        if whole < 2:  # somebody reads one of them as a whole, too
            self._node("aten.tanh.default", (Ref(products[0]),), (1, self.rows, width))
            wholly = self.nodes[-1].name
            if whole:
                self._step(self.nodes[-1:], "tanh", products[0], wholly)
            late.append(wholly)
        for product in products:
            operator, is_step = draw(st.sampled_from(sorted(OPERATORS))), draw(st.integers(0, 4)) > 0
            parts = [self._row(product, row, width, operator, is_step, draw(st.booleans())) for row in range(self.rows)]
            if draw(st.integers(0, 3)) == 0:
                late.append(draw(st.sampled_from(parts)))
            order = parts if draw(st.integers(0, 4)) else parts[::-1]
            joined = self._node("aten.cat.default", (tuple(map(Ref, order)), 1), (1, self.rows, width))
            current = self._node("aten.add.Tensor", (Ref(joined), Ref(current)), (1, self.rows, width))
        return current

    def _row(self, product: str, row: int, width: int, operator: str, is_step: bool, views: bool) -> str:
        taken = self._node("aten.slice.Tensor", (Ref(product), 1, row, row + 1), (1, 1, width))
        inner = [len(self.nodes)]
        shape = (1, 1, 4, width // 4) if views else (1, 1, width)
        value = self._node("aten.view.default", (Ref(taken), shape), shape) if views else taken
        value = self._node(f"aten.{operator}.default", (Ref(value),), shape)
        value = self._node("aten.view.default", (Ref(value), (1, 1, width)), (1, 1, width)) if views else value
        if is_step:
            self._step(self.nodes[inner[0] :], operator, taken, value)
        return value

    def _step(self, nodes: list[Node], operator: str, given: str, made: str) -> None:
        specs = {value.name: value.spec for value in self.values}
        operands = tuple(Operand(name=name, role=role, spec=specs[value], values=(value,), access=access) for name, role, value, access in (
            ("x", Role.INPUT, given, Access.READ), ("out", Role.OUTPUT, made, Access.WRITE)))
        match = evolve(fake_match()[0], nodes=tuple(n.name for n in nodes), operands=operands, epilogue=None)
        step = Step(match_id="m", implementation=f"test/{operator}", origin=Origin.GENERATED, schedule=Schedule({}))
        self.steps.append(Segment(nodes=match.nodes, step=step, match=match, operands=tuple((o.name, o.values) for o in operands)))

        def run(x: torch.Tensor, out: torch.Tensor) -> None:
            assert x.data_ptr() % 64 == 0 and x.is_contiguous() and out.is_contiguous()
            out.copy_(OPERATORS[operator](x))

        self.calls[call_key(step, 1, match)] = BoundCall(run=run)

    def _value(self, name: str, shape: tuple[int, ...], kind: ValueKind = ValueKind.INTERMEDIATE, source: str = "") -> str:
        self.values.append(Value(name=name, spec=TensorSpec(shape=shape, dtype=DType.F32), kind=kind, source=source))
        return name

    def _node(self, op: str, args: tuple[Any, ...], shape: tuple[int, ...]) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(canonical(Node(name=name, op=op, kind=op.split(".")[1], args=args, outputs=(name,))))
        return self._value(name, shape)

    @property
    def program(self) -> Program:
        steps = [evolve(step, version=1) for step in self.steps]
        return with_steps(framework_program(self.graph), steps)


made_graphs = st.composite(Made)()


@SETTINGS
@given(made_graphs)
def test_values_inside_others_are_what_they_are_alone(made: Made) -> None:
    x = torch.randn(1, made.rows, made.graph.spec("x").shape[2], generator=torch.Generator().manual_seed(3))
    wanted = compile_nodes(made.graph, device="cpu").run({"x": x, **made.weights})
    weights = WeightStore.from_tensors(made.weights, "cpu")
    executables = Executables(device="cpu", backend=NoBodies(), calls=made.calls)  # type: ignore[arg-type]
    bound = bind(made.program, weights, {}, {"x": x}, executables)
    for _ in range(2):  # nothing of the first run is left where the second one needs something else
        bound.poison()
        bound.run()
        for index, name in enumerate(made.graph.outputs):
            assert torch.allclose(bound.output(index), wanted[name], rtol=1e-4, atol=1e-4), name


def test_rows_results_and_products_do_lie_inside_others() -> None:
    """What the test above runs over is there: as often as rows are wide enough for kernels to read vectors."""
    seen = {"taken": 0, "joined": 0, "products": 0}

    @settings(SETTINGS, max_examples=60)
    @given(made_graphs)
    def look(made: Made) -> None:
        segments = made.program.segments
        taken = rows_of_operands(made.graph, segments)
        joined = joined_results(made.graph, segments)
        products = products_by_rows(made.graph, segments, taken, made.weights)
        wide = made.graph.spec("x").shape[2] * 4 % 256 == 0
        assert wide or not (products or joined)
        for name, found in (("taken", taken), ("joined", joined), ("products", [p for p in products if len(p) > 1])):
            seen[name] += len(found)

    look()
    assert all(count >= 10 for count in seen.values()), seen
