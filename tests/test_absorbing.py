"""Prologues: what is taken in before a match computes what the graph did, and nothing that others read is taken."""

import pytest
import torch
from agentcompile_rules_transformers.testing import Draft, softmax_case
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.expression import PointwiseKind
from agentcompile_core.ir.graph import DType, Graph
from agentcompile_core.ops.absorbing import Prologue, prologues
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.region_view import RegionView

SHAPE = (2, 3, 4)
UNARY = ("neg", "relu", "sigmoid", "tanh", "exp")
OTHERS = ((2, 3, 4), (3, 4), (1, 3, 4), (4,), (1,), (1, 1, 4))
NARROWER = ((2, 1, 1), (3, 1), (2, 3, 1))  # not repeated along leading axes

OPERATIONS = {
    PointwiseKind.NEG: torch.neg, PointwiseKind.RELU: torch.relu, PointwiseKind.SIGMOID: torch.sigmoid, PointwiseKind.TANH: torch.tanh,
    PointwiseKind.EXP: torch.exp, PointwiseKind.ADD: torch.add, PointwiseKind.SUB: torch.sub, PointwiseKind.MUL: torch.mul,
}


def chain(steps: list[tuple[str, tuple[int, ...] | None]]) -> tuple[Graph, str]:
    """A softmax behind ``steps``: a unary operator, or a binary one with another input of a shape."""
    draft = Draft()
    x = draft.given("x", SHAPE, DType.F32)
    for i, (name, other) in enumerate(steps):
        more = (draft.given(f"other{i}", other, DType.F32),) if other is not None else ()
        x = draft.one(f"aten.{name}.{'Tensor' if more else 'default'}", (x, *more), SHAPE, DType.F32)
    return draft.graph(draft.one("aten.softmax.int", (x, -1), SHAPE, DType.F32)), x.value


def found(graph: Graph, value: str, limit: int = 6) -> list[Prologue]:
    return list(prologues(RegionView(graph=graph), value, frozenset({graph.nodes[-1].name}), limit=limit))


def evaluated(prologue: Prologue, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The expression over every element, inputs modulo their sizes."""
    every = torch.arange(torch.Size(SHAPE).numel())
    known: dict[str | int, torch.Tensor] = {
        f"in{j}": values[name].reshape(-1)[every % values[name].numel()] for j, name in enumerate(prologue.inputs)}
    last: str | int = "in0"
    for last, operation in enumerate(prologue.expression.operations if prologue.expression else ()):
        known[last] = OPERATIONS[operation.kind](*(known[o] for o in operation.operands if not isinstance(o, float)))
    return known[last].reshape(SHAPE)


@settings(max_examples=25)
@given(steps=st.lists(st.one_of(st.tuples(st.sampled_from(UNARY), st.none()),
                                st.tuples(st.sampled_from(("add", "sub", "mul")), st.sampled_from(OTHERS))), max_size=5))
def test_every_prologue_computes_what_the_graph_did(steps: list[tuple[str, tuple[int, ...] | None]]) -> None:
    graph, value = chain(steps)
    tensors = {name: torch.randn(graph.spec(name).shape, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(graph.inputs)}
    outputs = [node.outputs[0] for node in graph.nodes]
    every = {**tensors, **compile_nodes(graph, device="cpu", outputs=outputs).run(dict(tensors))}
    offered = found(graph, value)
    assert offered[0].nodes == () and len(offered) == 1 + len(steps)
    for prologue in offered:
        assert torch.allclose(evaluated(prologue, every), every[value], rtol=1e-5, atol=1e-6)
    assert all(len(p.inputs) <= 2 for p in found(graph, value, limit=2))


@pytest.mark.parametrize("other", NARROWER)
def test_what_repeats_otherwise_stays_outside(other: tuple[int, ...]) -> None:
    graph, value = chain([("exp", None), ("mul", other), ("neg", None)])
    assert [p.nodes for p in found(graph, value)] == [(), ("neg_2",)]


def test_what_others_read_is_computed_once() -> None:
    draft = Draft()
    x = draft.one("aten.exp.default", (draft.given("x", SHAPE, DType.F32),), SHAPE, DType.F32)
    scaled = draft.one("aten.mul.Tensor", (x, 2.0), SHAPE, DType.F32)
    graph = draft.graph(draft.one("aten.softmax.int", (scaled, -1), SHAPE, DType.F32), x)
    assert [p.nodes for p in found(graph, scaled.value)] == [(), ("mul_1",)]


def test_a_softmax_takes_in_scale_mask_and_the_casts_around_it() -> None:
    match, graph = softmax_case(shape=(2, 3, 4, 20), scale=8.0, mask=(1, 1, 4, 20), wide=True)
    assert len(match.nodes) == len(graph.nodes) == 4
    assert [(o.name, o.spec.dtype) for o in match.operands] == [("in0", DType.F16), ("in1", DType.F16), ("out", DType.F16)]
