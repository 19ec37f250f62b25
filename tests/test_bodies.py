"""Two operators become one call only where nobody can tell."""

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType, Graph, GraphKind, Node, Ref, TensorSpec, Value, ValueKind
from agentcompile_core.ops import operators
from agentcompile_core.ops.bodies import _pairs
from agentcompile_core.ops.interpreter import compile_nodes

SPEC = TensorSpec(shape=(4,), dtype=DType.F32)
SILU, MUL, FILL = "aten.silu.default", "aten.mul.Tensor", "aten.fill_.Scalar"
ADD, NORM = "aten.add.Tensor", "agentcompile.rms_norm.default"
SUM = "aten.sum.dim_IntList"


def graph_of(steps: list[tuple[str, tuple[Any, ...]]], outputs: tuple[str, ...]) -> Graph:
    nodes, values = [], [Value(name=n, spec=SPEC, kind=ValueKind.INPUT) for n in ("a", "b")]
    for i, (op, args) in enumerate(steps):
        mutates = (args[0],) if op == FILL else ()
        values.append(Value(name=f"v{i}", spec=SPEC))
        nodes.append(Node(name=f"n{i}", op=op, kind=op.split(".")[1], args=tuple(Ref(a) if isinstance(a, str) else a for a in args),
                          outputs=(f"v{i}",), mutates=mutates))
    return Graph(name="g", kind=GraphKind.PREFILL, tokens=4, values=tuple(values), nodes=tuple(nodes), inputs=("a", "b"), outputs=outputs)


def run(graph: Graph, serves: bool = True) -> tuple[list[tuple[torch.Tensor, ...]], dict[str, torch.Tensor]]:
    """The pairs that the merged body was called with, and what the graph returned."""
    calls: list[tuple[torch.Tensor, ...]] = []

    def both(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
        calls.append((x, other))
        return torch.nn.functional.silu(x) * other if serves else None

    def normed(left: torch.Tensor, right: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor] | None:
        calls.append((left, right, weight))
        return (left + right, operators.rms_norm(left + right, weight, eps)) if serves else None

    def weighed(left: torch.Tensor, right: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor | None:
        calls.append((left, right))
        return (left * right).sum(axes) if serves else None

    def bodies(*ops: str) -> Any:
        return {(SILU, MUL): both, (ADD, NORM): normed, (MUL, SUM): weighed}.get(ops)

    given_ = {"a": torch.arange(4.0), "b": torch.arange(4.0) - 2}
    found = compile_nodes(graph, device="cpu", bodies=bodies).run({k: v.clone() for k, v in given_.items()})
    plain = compile_nodes(graph, device="cpu").run({k: v.clone() for k, v in given_.items()})
    assert all(torch.equal(found[name], plain[name]) for name in graph.outputs)
    return calls, found


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("order", [("v0", "b"), ("b", "v0")])
def test_a_pair_is_one_call_in_either_order(order: tuple[str, str], serves: bool) -> None:
    calls, _ = run(graph_of([(SILU, ("a",)), (MUL, order)], ("v1",)), serves)
    assert len(calls) == 1 and torch.equal(calls[0][0], torch.arange(4.0))


@pytest.mark.parametrize("steps, outputs", [
    ([(SILU, ("a",)), (MUL, ("v0", "b"))], ("v1", "v0")),  # returned too
    ([(SILU, ("a",)), (MUL, ("v0", "b")), (MUL, ("v0", "v1"))], ("v2",)),  # read again
    ([(SILU, ("a",)), (MUL, ("v0", "v0"))], ("v1",)),  # by itself
    ([(SILU, ("a",)), (MUL, ("v0", 2.0))], ("v1",)),  # no tensor
    ([(SILU, ("a",)), (FILL, ("a", 3.0)), (MUL, ("v0", "b"))], ("v2",)),  # its argument changes in between
    ([(ADD, ("a", "b")), (FILL, ("b", 3.0)), (NORM, ("v0", "b", 1e-6))], ("v0", "v2")),  # so does the weight
    ([(ADD, ("a", "b")), (FILL, ("v0", 3.0)), (NORM, ("v0", "b", 1e-6))], ("v2",)),  # so does the sum
    ([(ADD, ("a", "b")), (SILU, ("v0",)), (NORM, ("v0", "v1", 1e-6))], ("v2",)),  # the weight is made behind the sum
    ([(ADD, ("a", 2.0)), (NORM, ("v0", "b", 1e-6))], ("v1",)),  # no tensor
    ([(MUL, ("a", "b")), (SUM, ("v0", (0,)))], ("v1", "v0")),  # the product is returned too
    ([(MUL, ("a", "b")), (SUM, ("v0", (0,))), (ADD, ("v0", "v1"))], ("v2",)),  # or read again
    ([(MUL, ("a", 2.0)), (SUM, ("v0", (0,)))], ("v1",)),  # no tensor
    ([(MUL, ("a", "b")), (FILL, ("b", 3.0)), (SUM, ("v0", (0,)))], ("v2",)),  # a factor changes in between
])
def test_what_somebody_would_notice_stays_apart(steps: list[tuple[str, tuple[Any, ...]]], outputs: tuple[str, ...]) -> None:
    assert run(graph_of(steps, outputs))[0] == []


@pytest.mark.parametrize("serves", [True, False])
def test_a_sum_and_its_norm_are_one_call_whoever_else_reads_the_sum(serves: bool) -> None:
    """Before the norm, behind it, as its own second norm, and as what is returned."""
    steps = [(ADD, ("a", "b")), (SILU, ("v0",)), (NORM, ("v0", "b", 1e-6)), (MUL, ("v0", "v2")), (NORM, ("v0", "a", 1e-6)),
             (ADD, ("v3", "v4"))]
    calls, _ = run(graph_of(steps, ("v0", "v1", "v2", "v5")), serves)
    assert len(calls) == 1 and torch.equal(calls[0][2], torch.arange(4.0) - 2)


@pytest.mark.parametrize("serves", [True, False])
def test_a_product_that_is_only_added_up_is_one_call(serves: bool) -> None:
    calls, found = run(graph_of([(MUL, ("a", "b")), (ADD, ("a", "b")), (SUM, ("v0", (0,)))], ("v1", "v2")), serves)
    assert len(calls) == 1 and float(found["v2"]) == float((torch.arange(4.0) * (torch.arange(4.0) - 2)).sum())


@given(st.lists(st.tuples(st.sampled_from([SILU, MUL, ADD, NORM]), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
       st.integers(0, 9))
def test_any_graph_computes_what_it_did(choices: list[tuple[str, int, int]], extra: int) -> None:
    steps: list[tuple[str, tuple[Any, ...]]] = []
    for i, (op, x, y) in enumerate(choices):
        names = ["a", "b", *(f"v{j}" for j in range(i))]
        given_ = tuple(names[n % len(names)] for n in ((x,) if op == SILU else (x, y)))
        steps.append((op, (*given_, 1e-6) if op == NORM else given_))
    last = len(steps) - 1
    run(graph_of(steps, tuple(dict.fromkeys((f"v{last}", f"v{extra % len(steps)}")))))


GELU = "aten.gelu.default"


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("how", [(), (("approximate", "none"),), (("approximate", "tanh"),)])
def test_what_the_first_one_takes_by_name_reaches_the_body_and_the_framework(serves: bool, how: tuple[tuple[str, Any], ...]) -> None:
    graph = graph_of([(GELU, ("a",)), (MUL, ("v0", "b"))], ("v1",))
    graph = evolve(graph, nodes=(evolve(graph.nodes[0], kwargs=how), graph.nodes[1]))
    told: list[dict[str, Any]] = []

    def both(x: torch.Tensor, other: torch.Tensor, **given: Any) -> torch.Tensor | None:
        told.append(given)
        return torch.nn.functional.gelu(x, **given) * other if serves else None

    given_ = {"a": torch.linspace(-3, 3, 4), "b": torch.arange(4.0) - 2}
    bodies = {(GELU, MUL): both}
    found = compile_nodes(graph, device="cpu", bodies=lambda *ops: bodies.get(ops)).run(given_)
    assert told == [dict(how)] and torch.equal(found["v1"], torch.nn.functional.gelu(given_["a"], **dict(how)) * given_["b"])


@pytest.mark.parametrize("given_", [Ref("b"), (1, 2), [Ref("a")]])
def test_a_first_one_with_more_than_plain_values_by_name_is_no_pair(given_: Any) -> None:
    node = Node(name="n", op=GELU, kind="gelu", args=(Ref("a"),), kwargs=(("approximate", given_),), outputs=("v0",))
    second = Node(name="m", op=MUL, kind="mul", args=(Ref("v0"), Ref("b")), outputs=("v1",))
    assert _pairs(second, {"v0": node}) == []
    assert len(_pairs(second, {"v0": evolve(node, kwargs=(("approximate", "tanh"),))})) == 1
