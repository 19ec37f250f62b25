"""Budgets of products of matrices: honest sums that are added one by one are inside, however many there are; what is wrong is not."""

import math

import torch
from agentcompile_rules_transformers.kinds import MATMUL
from agentcompile_rules_transformers.testing import Draft, rows_case
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import compare, oracle
from agentcompile_core.ops.reference.bounded import COUNTED_IN, SPREAD, U32, sum_size, worst_among
from agentcompile_core.ops.reference.second_opinion import disagreement
from agentcompile_core.plugin_api import Case, DType, Graph
from agentcompile_core.worker.operands import graph_values, make_inputs

UNIT = 2.0**-24


def test_one_huge_activation_is_budgeted_where_every_later_sum_rounds_beside_it() -> None:
    match, graph = rows_case(rows=(64,), n=256, k=196, dtype=DType.F32)
    x, weight = (match.need(name).values[0] for name in "ab")
    for seed in (8, 16):
        values = graph_values(match, graph, make_inputs(match, MATMUL, Case(family="one_huge", seed=seed), "cpu"))
        (expected,) = oracle(graph, values).values()
        assert compare(one_by_one(values[x], values[weight].t()), expected).ok
        assert not compare(values[x].half().float() @ values[weight].t(), expected).ok


def one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product with fp32 sums of fused multiply-adds, term by term."""
    sums = torch.zeros(a.shape[0], b.shape[1])
    for t in range(a.shape[1]):
        sums = (sums.double() + a[:, t, None].double() * b[t].double()).float()
    return sums


def test_the_worst_of_many_sums_has_room_and_one_lost_term_has_none() -> None:
    generator = torch.Generator().manual_seed(1)
    for rows, most in ((64, 1.35), (512, 1.5)):
        match, graph = rows_case(rows=(rows,), n=128, k=8, dtype=DType.F32)
        x, weight = (torch.randn(shape, generator=generator) for shape in ((rows, 8), (128, 8)))
        values = dict(zip((match.need("a").values[0], match.need("b").values[0]), (x, weight), strict=True))
        (expected,) = oracle(graph, values).values()
        size = torch.minimum(x.double().abs() @ weight.double().abs().t(),
                             expected.value.abs() + 2.0 * ((x.double() ** 2) @ (weight.double() ** 2).t()).sqrt())
        factor = (expected.error - 1.1 * UNIT * (expected.value.abs() + expected.error)) / (0.9 * 8**0.5 * UNIT * size)
        assert float(factor.min()) > 0.99 and float(factor.median()) <= most
        assert compare(one_by_one(x, weight.t()), expected).ok
        assert not compare(x[:, 1:] @ weight[:, 1:].t(), expected).ok


@settings(max_examples=12, derandomize=True, database=None, deadline=None)
@given(st.sampled_from(("bij,jk->bik", "bhd,bwd->bhw", "ij,ij->i", "hbd,bdn->bhn")), st.floats(-2.0, 2.0), st.integers(0, 99))
def test_rules_of_products_agree_with_the_framework(equation: str, factor: float, seed: int) -> None:
    extents = dict(zip("bijkhdwn", (2, 3, 4, 5, 3, 4, 2, 5), strict=True))
    sides, out = equation.split("->")
    shapes = [tuple(extents[label] for label in side) for side in (*sides.split(","), out)]
    draft = Draft()
    factors = tuple(draft.given(name, shape, DType.F32) for name, shape in zip("xy", shapes[:2], strict=True))
    graph = draft.graph(draft.one("aten.einsum.default", (equation, factors), shapes[2], DType.F32))
    check(graph, seed)
    draft = Draft()
    c, a, b = (draft.given(name, shape, DType.F32) for name, shape in (("c", (2, 3, 5)), ("a", (2, 3, 4)), ("b", (2, 4, 5))))
    check(draft.graph(draft.call("aten.baddbmm.default", (c, a, b), (2, 3, 5), dtype=DType.F32, beta=factor, alpha=2.0)[0]), seed)


def check(graph: Graph, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(graph.spec(name).shape, generator=generator) for name in graph.inputs}
    expected = oracle(graph, values)
    assert disagreement(graph, values, expected) == ""
    found = compile_nodes(graph, device="cpu").run(dict(values))
    (out,) = graph.outputs
    assert compare(found[out], expected[out]).ok and not compare(found[out] * 1.0001, expected[out]).ok


def test_bounds_of_many_sums_grow_as_fast_as_large_errors_get_rare() -> None:
    """Products are added one by one where there are many rows: of millions of such sums none may be refused for the worst one's error."""
    depth, count, generator = 48, 1 << 20, torch.Generator().manual_seed(7)
    total, magnitudes, squares, added = (torch.zeros(count, dtype=torch.float64) for _ in range(4))
    for _ in range(depth):
        product = torch.randn(count, generator=generator).double() * torch.randn(count, generator=generator).double()
        total, magnitudes, squares = total + product, magnitudes + product.abs(), squares + product**2
        added = (added + product).float().double()
    used = (added - total).abs() / (SPREAD * depth**0.5 * U32 * sum_size(total, magnitudes, squares))
    rarer = math.log(float((used > 0.4).sum()) / float((used > 0.65).sum())) / 0.25
    assert worst_among(2 * COUNTED_IN) - 1.0 >= 0.95 * math.log(2.0) / rarer
    assert worst_among(2 * COUNTED_IN) - 1.0 <= 1.5 * math.log(2.0) / rarer
    assert float(used.max()) <= 0.75 * worst_among(count)
