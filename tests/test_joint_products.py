"""Products of the same rows become one only where nobody can tell, and where their weights lie behind each other."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType, Graph, GraphKind, Node, Ref, TensorSpec, Value, ValueKind
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.joint_products import Memory, with_joint_products

LINEAR, SILU, MUL, FILL, VIEW, COPY = (f"aten.{name}" for name in (
    "linear.default", "silu.default", "mul.Tensor", "fill_.Scalar", "view.default", "clone.default"))
ROWS, WIDTH, COLUMNS = 3, 8, 4
X = TensorSpec(shape=(1, ROWS, WIDTH), dtype=DType.F32)


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape=shape, dtype=DType.F32)


class Built:
    """A graph of products of ``x`` and what reads them."""

    def __init__(self, biased: bool = False) -> None:
        self.values = [Value(name="x", spec=X, kind=ValueKind.INPUT)]
        self.nodes: list[Node] = []
        self.biased = biased

    def weight(self, name: str, columns: int = COLUMNS) -> None:
        self.values.append(Value(name=name, spec=spec(columns, WIDTH), kind=ValueKind.WEIGHT, source=name))
        if self.biased:
            self.values.append(Value(name=f"{name}_bias", spec=spec(columns), kind=ValueKind.WEIGHT, source=f"{name}_bias"))

    def node(self, op: str, *args: Any, shape: tuple[int, ...], mutates: tuple[str, ...] = (), **how: Any) -> str:
        return self.several(op, *args, shapes=[shape], mutates=mutates, **how)[0]

    def several(self, op: str, *args: Any, shapes: list[tuple[int, ...]], mutates: tuple[str, ...] = (), **how: Any) -> list[str]:
        """A node of several values."""
        names = [f"v{len(self.nodes)}{'.' + str(i) if i else ''}" for i in range(len(shapes))]
        self.values += [Value(name=name, spec=spec(*shape)) for name, shape in zip(names, shapes, strict=True)]
        found = tuple(Ref(a) if isinstance(a, str) else a for a in args)
        self.nodes.append(Node(name=f"n{len(self.nodes)}", op=op, kind=op.split(".")[1], args=found, kwargs=tuple(how.items()),
                               outputs=tuple(names), mutates=mutates))
        return names

    def product(self, weight: str, x: str = "x", columns: int = COLUMNS) -> str:
        bias = (f"{weight}_bias",) if self.biased else ()
        return self.node(LINEAR, x, weight, *bias, shape=(1, ROWS, columns))

    def graph(self, *outputs: str) -> Graph:
        return Graph(name="g", kind=GraphKind.PREFILL, tokens=ROWS, values=tuple(self.values), nodes=tuple(self.nodes), inputs=("x",),
                     outputs=outputs)


def memory(graph: Graph, order: list[str], gaps: set[str] = frozenset()) -> dict[str, torch.Tensor]:  # type: ignore[assignment]
    """Weights in one piece of memory in ``order``, biases likewise; a gap in front of some."""
    found: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(len(order))
    for behind in ("", "_bias"):
        names = [name + behind for name in order if name + behind in graph.by_name]
        if not names:
            continue
        sizes = [graph.spec(name).numel for name in names]
        piece, at = torch.randn(sum(sizes) + 16 * len(names), generator=generator), 0
        for name, size in zip(names, sizes, strict=True):
            at += 16 if name.removesuffix("_bias") in gaps else 0
            found[name] = piece[at : at + size].view(graph.spec(name).shape)
            at += size
    return found


def check(graph: Graph, weights: dict[str, torch.Tensor]) -> int:
    """How many products ran, after looking that the results are those of each one alone."""
    x = torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = compile_nodes(graph, device="cpu").run({"x": x.clone(), **weights})
    joint = compile_nodes(graph, device="cpu", memory=Memory(weights=weights)).run({"x": x.clone(), **weights})
    for name in graph.outputs:
        torch.testing.assert_close(joint[name], plain[name], rtol=1e-5, atol=1e-6)
    nodes, _, _ = with_joint_products(graph, graph.nodes, graph.outputs, Memory(weights=weights))
    return sum(node.op == LINEAR for node in nodes)


def gated(biased: bool = False, reads: Any = None) -> Graph:
    built = Built(biased)
    built.weight("gate")
    built.weight("up")
    gate, up = built.product("gate"), built.product("up")
    if reads is not None:
        return built.graph(*reads(built, gate, up))
    return built.graph(built.node(MUL, built.node(SILU, gate, shape=(1, ROWS, COLUMNS)), up, shape=(1, ROWS, COLUMNS)))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("order", [["gate", "up"], ["up", "gate"]])
def test_what_lies_behind_each_other_is_one_product_in_either_order(order: list[str], biased: bool) -> None:
    graph = gated(biased)
    assert check(graph, memory(graph, order)) == 1


@pytest.mark.parametrize("biased", [False, True])
def test_what_lies_apart_stays_apart(biased: bool) -> None:
    graph = gated(biased)
    assert check(graph, memory(graph, ["gate", "up"], {"up"})) == 2
    apart = {name: tensor.clone() for name, tensor in memory(graph, ["gate", "up"]).items()}
    assert check(graph, apart) == 2
    if biased:
        weights = memory(graph, ["gate", "up"])
        assert check(graph, {**weights, "up_bias": weights["up_bias"].clone()}) == 2


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("lies", ["matrix", "matrix, other order", "apart", "one of both", "rows apart"])
def test_results_are_written_where_they_are_wanted_if_they_are_columns_of_one_matrix(lies: str, biased: bool) -> None:
    graph = gated(biased)
    weights, order = memory(graph, ["gate", "up"]), ["v0", "v1"][:: -1 if "other" in lies else 1]
    matrix = torch.full((ROWS * (2 if "rows" in lies else 1), 2 * COLUMNS), 7.0)[:: 2 if "rows" in lies else 1]
    columns = dict(zip(order, matrix.unsqueeze(0).split(COLUMNS, -1), strict=True))
    into = {"apart": {name: one.clone() for name, one in columns.items()}, "one of both": {"v0": columns["v0"]}}.get(lies, columns)
    names = (*graph.outputs, *columns)
    prepared = compile_nodes(graph, device="cpu", outputs=names, memory=Memory(weights=weights, results=into))
    x = torch.randn(1, ROWS, WIDTH)
    found, plain = prepared.run({"x": x, **weights}), compile_nodes(graph, device="cpu", outputs=names).run({"x": x, **weights})
    assert prepared.written == (frozenset(columns) if lies == "matrix" else frozenset())
    for name in names:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-5, atol=1e-6)
    for name in columns:
        assert (found[name].data_ptr() == columns[name].data_ptr()) == (name in prepared.written)


def test_a_single_product_is_written_where_it_is_wanted() -> None:
    graph = gated(reads=lambda built, gate, up: (gate, up))
    weights, into = memory(graph, ["gate", "up"], {"up"}), {"v0": torch.zeros(1, ROWS, COLUMNS), "v1": torch.zeros(1, COLUMNS, ROWS).mT}
    prepared = compile_nodes(graph, device="cpu", memory=Memory(weights=weights, results=into))
    x = torch.randn(1, ROWS, WIDTH)
    found = prepared.run({"x": x, **weights})
    assert prepared.written == {"v0"} and found["v0"].data_ptr() == into["v0"].data_ptr()  # the other one is no matrix of rows
    torch.testing.assert_close(found["v1"], torch.nn.functional.linear(x, weights["up"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("lies", ["one", "joint", "wanted"])
def test_a_body_of_the_device_is_asked_for_each_product(lies: str, serves: bool, biased: bool) -> None:
    """Alone, for several at once, and with the place where the result is wanted; what it refuses the framework computes."""
    graph = gated(biased)
    weights, asked = memory(graph, ["gate", "up"], {"up"} if lies == "one" else set()), []

    def body(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None) -> Any:
        asked.append((tuple(x.shape), tuple(weight.shape), bias is not None, out is not None))
        found = torch.nn.functional.linear(x, weight, bias) if serves else None
        return found if out is None or found is None else out.copy_(found)

    columns = dict(zip(("v0", "v1"), torch.zeros(1, ROWS, 2 * COLUMNS).split(COLUMNS, -1), strict=True)) if lies == "wanted" else {}
    names = (*graph.outputs, *columns)
    prepared = compile_nodes(graph, device="cpu", outputs=names, memory=Memory(weights=weights, results=columns),
                             bodies=lambda *ops: body if ops == (LINEAR,) else None)
    x = torch.randn(1, ROWS, WIDTH)
    found, plain = prepared.run({"x": x, **weights}), compile_nodes(graph, device="cpu", outputs=names).run({"x": x, **weights})
    for name in names:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-5, atol=1e-6)
    rows, wide = (ROWS, WIDTH) if lies == "wanted" else (1, ROWS, WIDTH), COLUMNS if lies == "one" else 2 * COLUMNS
    assert asked == [(rows, (wide, WIDTH), biased, lies == "wanted")] * (2 if lies == "one" else 1)


def test_a_body_is_not_asked_for_a_product_with_a_matrix_that_is_made() -> None:
    """It may read matrices before anything runs that is in front of it."""
    built = Built()
    built.weight("w", columns=WIDTH)
    made = built.node(SILU, "w", shape=(WIDTH, WIDTH))
    graph = built.graph(built.node(LINEAR, "x", made, shape=(1, ROWS, WIDTH)), built.node(LINEAR, "x", "w", shape=(1, ROWS, WIDTH)))
    weights, asked = memory(graph, ["w"]), list[torch.Tensor]()

    def body(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None) -> Any:
        asked.append(weight)

    for known in (None, Memory(weights=weights)):
        prepared = compile_nodes(graph, device="cpu", memory=known, bodies=lambda *ops: body if ops == (LINEAR,) else None)
        prepared.run({"x": torch.randn(1, ROWS, WIDTH), **weights})
    assert len(asked) == 2 and all(one is weights["w"] for one in asked)


def shape() -> tuple[int, ...]:
    return 1, ROWS, COLUMNS


@pytest.mark.parametrize("reads", [
    lambda g, gate, up: (g.node(MUL, gate, up, shape=shape()), up),  # returned
    lambda g, gate, up: (g.node(MUL, gate, g.node(FILL, up, 2.0, shape=shape(), mutates=(up,)), shape=shape()),),  # written to
    lambda g, gate, up: (g.node(MUL, g.node(VIEW, gate, (ROWS * COLUMNS,), shape=(ROWS * COLUMNS,)),
                                g.node(VIEW, up, (ROWS * COLUMNS,), shape=(ROWS * COLUMNS,)), shape=(ROWS * COLUMNS,)),),  # no rows
    lambda g, gate, up: (g.node(MUL, g.node("aten.cumsum.default", gate, 1, shape=shape()), up, shape=shape()),),  # an unknown reader
    lambda g, gate, up: (g.node(MUL, g.node("aten.slice.Tensor", gate, 1, 0, ROWS, shape=shape()), up, shape=shape()),
                         g.node("aten.slice.Tensor", gate, 1, 0, ROWS, shape=shape())),  # a view of it is returned
])
def test_what_a_reader_could_tell_stays_apart(reads: Any) -> None:
    graph = gated(reads=reads)
    assert check(graph, memory(graph, ["gate", "up"])) == 2


def test_rows_that_change_between_two_products_keep_them_apart() -> None:
    built = Built()
    built.weight("gate")
    built.weight("up")
    x = built.node(COPY, "x", shape=X.shape)
    gate = built.product("gate", x)
    built.node(FILL, x, 3.0, shape=X.shape, mutates=(x,))
    graph = built.graph(built.node(MUL, gate, built.product("up", x), shape=shape()))
    assert check(graph, memory(graph, ["gate", "up"])) == 2


@given(st.data())
def test_any_products_of_any_rows_in_any_order_compute_what_they_did(data: st.DataObject) -> None:
    draw, built = data.draw, Built(data.draw(st.booleans()))
    count = draw(st.integers(2, 5))
    sizes = [COLUMNS * draw(st.integers(1, 3)) for _ in range(count)]
    rows = ["x", built.node(SILU, "x", shape=X.shape)]
    for i, columns in enumerate(sizes):
        built.weight(f"w{i}", columns)
    outputs = []
    for i, columns in enumerate(sizes):
        product = built.product(f"w{i}", draw(st.sampled_from(rows)), columns)
        heads = built.node(VIEW, product, (1, ROWS, columns // COLUMNS, COLUMNS), shape=(1, ROWS, columns // COLUMNS, COLUMNS))
        read = draw(st.sampled_from([product, heads]))
        outputs.append(built.node(SILU, read, shape=built.values[[v.name for v in built.values].index(read)].spec.shape))
    graph = built.graph(*outputs)
    order = draw(st.permutations([f"w{i}" for i in range(count)]))
    check(graph, memory(graph, order, draw(st.sets(st.sampled_from(order)))))
