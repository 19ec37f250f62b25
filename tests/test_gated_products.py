"""Gate, up and what becomes of both are one call of the device only where nobody else reads what lies between."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_joint_products import COLUMNS, COPY, FILL, LINEAR, MUL, ROWS, SILU, WIDTH, Built, X, memory, shape, spec
from torch import Tensor

from agentcompile_core.ir.graph import Graph, Value, ValueKind
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.joint_products import Memory

GELU, RELU, CHUNK, SPLIT, SIZES = (f"aten.{name}" for name in (
    "gelu.default", "relu.default", "chunk.default", "split.Tensor", "split_with_sizes.default"))
ACTIVATIONS: dict[str, Any] = {SILU: torch.nn.functional.silu, GELU: torch.nn.functional.gelu, RELU: torch.relu}


class Device:
    """Bodies of a device: gated products, if it ``serves`` them, and gates of two results, if it ``gates``; ``calls`` names what ran."""

    def __init__(self, serves: bool = True, gates: bool = True) -> None:
        self.serves, self.gates, self.calls = serves, gates, list[str]()

    def __call__(self, *ops: str) -> Any:
        by = ACTIVATIONS.get(ops[-2] if len(ops) > 1 else "")
        if len(ops) == 2 and ops[0] == MUL:
            return self.never
        return by and {(LINEAR, MUL): partial(self.product, by), (MUL,): partial(self.gate, by)}.get((*ops[:-2], ops[-1]))

    def product(self, by: Any, x: Tensor, gate: Tensor, up: Tensor, **how: Any) -> Tensor | None:
        assert gate.is_contiguous() and up.is_contiguous()
        self.calls.append("product" if self.serves else "refused")
        return by(x @ gate.T, **how) * (x @ up.T) if self.serves else None

    def gate(self, by: Any, left: Tensor, right: Tensor, **how: Any) -> Tensor | None:
        self.calls.append("gate" if self.gates else "no gate")
        return by(left, **how) * right if self.gates else None

    def never(self, *_: Any) -> None:
        raise AssertionError("a call of the rows alone is no product of two values")


def check(graph: Graph, weights: dict[str, Tensor], device: Device) -> list[str]:
    """What ran on the device, after looking that the results are the framework's."""
    x = torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = compile_nodes(graph, device="cpu").run({"x": x.clone(), **weights})
    found = compile_nodes(graph, device="cpu", bodies=device, memory=Memory(weights=weights)).run({"x": x.clone(), **weights})
    for name in graph.outputs:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-5, atol=1e-6)
    return device.calls


def parts(built: Built, value: str, columns: int, count: int, way: str) -> list[str]:
    """``count`` equal parts of the columns of a value."""
    each = columns // count
    given = {CHUNK: count, SPLIT: each, SIZES: [each] * count}[way]
    return built.several(way, value, given, 2 if way == SPLIT else -1, shapes=[(1, ROWS, each)] * count)


def gated(turned: bool = False, biased: bool = False, up_first: bool = False, behind: Any = None) -> Graph:
    """silu(x gate) * (x up), its factors ``turned`` or not; ``behind`` may add nodes, and returns outputs."""
    built = Built(biased)
    built.weight("gate")
    built.weight("up")
    first = built.product("up" if up_first else "gate")
    second = built.product("gate" if up_first else "up")
    gate, up = (second, first) if up_first else (first, second)
    active = built.node(SILU, gate, shape=shape())
    product = built.node(MUL, *((up, active) if turned else (active, up)), shape=shape())
    return built.graph(*(behind(built, gate, active, up, product) if behind else (product,)))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("up_first", [False, True])
@pytest.mark.parametrize("order, gaps", [(["gate", "up"], set()), (["up", "gate"], set()), (["gate", "up"], {"up"})])
def test_both_products_and_the_gate_are_one_call(turned: bool, up_first: bool, order: list[str], gaps: set[str]) -> None:
    graph = gated(turned, up_first=up_first)
    assert check(graph, memory(graph, order, gaps), Device()) == ["product"]
    assert check(graph, memory(graph, order, gaps), Device(serves=False)) == ["refused", "gate"]
    products = []
    with pytest.MonkeyPatch.context() as patch:
        linear = torch.nn.functional.linear
        patch.setattr(torch.nn.functional, "linear", lambda *args: products.append(1) or linear(*args))
        compile_nodes(graph, device="cpu", bodies=Device(serves=False), memory=Memory(weights=memory(graph, order, gaps))).run(
            {"x": torch.randn(1, ROWS, WIDTH), **memory(graph, order, gaps)})
    assert len(products) == (2 if gaps else 1)
    assert check(graph, memory(graph, order, gaps), Device(serves=False, gates=False)) == ["refused", "no gate"]


@pytest.mark.parametrize("behind", [
    lambda g, gate, active, up, product: (product, gate),
    lambda g, gate, active, up, product: (product, active),
    lambda g, gate, active, up, product: (product, up),
    lambda g, gate, active, up, product: (product, g.node(SILU, up, shape=shape())),
    lambda g, gate, active, up, product: (product, g.node(MUL, gate, gate, shape=shape())),
    lambda g, gate, active, up, product: (product, g.node(MUL, active, up, shape=shape())),
])
def test_what_somebody_else_reads_is_made(behind: Any) -> None:
    graph = gated(behind=behind)
    assert "product" not in check(graph, memory(graph, ["gate", "up"]), Device())


def test_biases_and_other_rows_are_no_gated_product() -> None:
    graph = gated(biased=True)
    assert "product" not in check(graph, memory(graph, ["gate", "up"]), Device())
    built = Built()
    built.weight("gate")
    built.weight("up")
    other = built.node(SILU, "x", shape=X.shape)
    active = built.node(SILU, built.product("gate"), shape=shape())
    graph = built.graph(built.node(MUL, active, built.product("up", other), shape=shape()))
    assert "product" not in check(graph, memory(graph, ["gate", "up"]), Device())


@pytest.mark.parametrize("way", [CHUNK, SPLIT, SIZES])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("activation, how", [(SILU, {}), (GELU, {}), (GELU, {"approximate": "tanh"}), (RELU, {})])
def test_parts_of_one_product_are_two_and_the_activation_keeps_what_it_is_told(way: str, first: int, activation: str, how: Any) -> None:
    built = Built()
    built.weight("both", 2 * COLUMNS)
    both = parts(built, built.product("both", columns=2 * COLUMNS), 2 * COLUMNS, 2, way)
    active = built.node(activation, both[first], shape=shape(), **how)
    graph = built.graph(built.node(MUL, both[1 - first], active, shape=shape()))
    assert check(graph, memory(graph, ["both"]), Device()) == ["product"]
    assert check(graph, memory(graph, ["both"]), Device(serves=False)) == ["refused", "gate"]
    assert check(graph, memory(graph, ["both"]), Device(serves=False, gates=False)) == ["refused", "no gate"]


def test_a_third_part_that_somebody_reads_and_parts_of_rows_are_no_gated_product() -> None:
    for read in (False, True):
        built = Built()
        built.weight("all", 3 * COLUMNS)
        gate, up, third = parts(built, built.product("all", columns=3 * COLUMNS), 3 * COLUMNS, 3, CHUNK)
        product = built.node(MUL, built.node(SILU, gate, shape=shape()), up, shape=shape())
        graph = built.graph(*((product, third) if read else (product,)))
        assert ("product" in check(graph, memory(graph, ["all"]), Device())) is not read
    built = Built()
    built.weight("w")
    one, rest = (1, 1, COLUMNS), (1, ROWS - 2, COLUMNS)
    gate, up, _ = built.several(SIZES, built.product("w"), [1, 1, ROWS - 2], 1, shapes=[one, one, rest])
    graph = built.graph(built.node(MUL, built.node(SILU, gate, shape=one), up, shape=one))
    assert "product" not in check(graph, memory(graph, ["w"]), Device())


def test_factors_of_other_widths_and_weights_of_one_axis_are_no_gated_product() -> None:
    built = Built()
    built.weight("gate")
    built.weight("up", 1)
    gate, up = built.product("gate"), built.product("up", columns=1)
    graph = built.graph(built.node(MUL, built.node(SILU, gate, shape=shape()), up, shape=shape()))
    assert "product" not in check(graph, memory(graph, ["gate", "up"]), Device())
    built = Built()
    built.values += [Value(name=name, spec=spec(WIDTH), kind=ValueKind.WEIGHT, source=name) for name in ("gate", "up")]
    gate, up = (built.node(LINEAR, "x", name, shape=(1, ROWS)) for name in ("gate", "up"))
    graph = built.graph(built.node(MUL, built.node(SILU, gate, shape=(1, ROWS)), up, shape=(1, ROWS)))
    assert "product" not in check(graph, memory(graph, ["gate", "up"]), Device())


def test_rows_that_change_meanwhile_are_read_before() -> None:
    built = Built()
    built.weight("gate")
    built.weight("up")
    x = built.node(COPY, "x", shape=X.shape)
    gate, up = built.product("gate", x), built.product("up", x)
    built.node(FILL, x, 3.0, shape=X.shape, mutates=(x,))
    graph = built.graph(built.node(MUL, built.node(SILU, gate, shape=shape()), up, shape=shape()))
    assert "product" not in check(graph, memory(graph, ["gate", "up"]), Device())


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(st.data())
def test_any_graph_of_products_and_gates_computes_what_it_did(data: st.DataObject) -> None:
    draw, built = data.draw, Built(data.draw(st.booleans()))
    count = draw(st.integers(2, 4))
    for i in range(count):
        built.weight(f"w{i}")
    built.weight("wide", 2 * COLUMNS)
    values = [built.product(f"w{draw(st.integers(0, count - 1))}") for _ in range(draw(st.integers(2, 5)))]
    for _ in range(draw(st.integers(0, 2))):
        wide = built.product("wide", columns=2 * COLUMNS)
        values += parts(built, wide, 2 * COLUMNS, 2, draw(st.sampled_from([CHUNK, SPLIT, SIZES])))
    for _ in range(draw(st.integers(1, 8))):
        one, other = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        how = {"approximate": "tanh"} if draw(st.booleans()) else {}
        values.append(draw(st.sampled_from([
            lambda one=one, other=other: built.node(MUL, one, other, shape=(1, ROWS, COLUMNS)),
            lambda one=one: built.node(SILU, one, shape=(1, ROWS, COLUMNS)),
            lambda one=one, how=how: built.node(GELU, one, shape=(1, ROWS, COLUMNS), **how)]))())
    graph = built.graph(*draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True)))
    check(graph, memory(graph, [*(f"w{i}" for i in range(count)), "wide"]), Device(draw(st.booleans()), draw(st.booleans())))
