"""The oracle of reductions: torch's own results pass in every element type, results that are a little wrong do not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reference import DTYPES, Build

from agentcompile_core.errors import AgentCompileError
from agentcompile_core.ops.reference import Bounded, compare, oracle
from agentcompile_core.ops.reference.second_opinion import disagreement

DRAWS = settings(max_examples=6, derandomize=True, database=None, deadline=None)
OPERATORS = {
    "sum": ("aten.sum.dim_IntList", (1,)), "mean": ("aten.mean.dim", (1, 2)), "amax": ("aten.amax.default", (1,)),
    "min": ("aten.min.default",), "l1": ("aten.linalg_vector_norm.default", 1, (1,)),
    "l2": ("aten.linalg_vector_norm.default", 2, (2,), True), "norm of all": ("aten.linalg_vector_norm.default",),
    "variance": ("aten.var.correction", (1,)), "running sum": ("aten.cumsum.default", 1), "exponentials": ("aten.logsumexp.default", (1,)),
    "deviation": ("aten.std.dim", (2,), False), "variance of all": ("aten.var.default", True),
}
PLACES = {"max": ("aten.max.dim", 1), "min": ("aten.min.dim", 2, True), "argmax": ("aten.argmax.default", 1),
          "argmin": ("aten.argmin.default",)}


def called(op: tuple, x: torch.Tensor) -> tuple[Build, dict[str, Bounded]]:
    b = Build()
    found = b.call(op[0], b.given("x", x), *op[1:])
    graph = b.graph(*(found if isinstance(found, tuple) else (found,)))
    expected = oracle(graph, b.tensors)
    assert disagreement(graph, b.tensors, expected) == ""
    return b, expected


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
@DRAWS
@given(seed=st.integers(0, 2**31), columns=st.sampled_from([2, 9, 300]), mean=st.sampled_from([0.0, 50.0]),
       scale=st.sampled_from([0.05, 1.0, 90.0]))
def test_torch_passes_and_what_is_off_does_not(name: str, dtype: torch.dtype, seed: int, columns: int, mean: float, scale: float) -> None:
    x = torch.randn(3, columns, 5, generator=torch.Generator().manual_seed(seed)) * scale + mean * scale
    b, expected = called(OPERATORS[name], x.to(dtype))
    for value, bound in expected.items():
        check = compare(b.results[value], bound)
        assert check.ok, check
        off = bound.value * 1.03 + (bound.value == 0) * 0.1
        assert not compare(off.to(dtype), bound).ok


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", PLACES)
@DRAWS
@given(seed=st.integers(0, 2**31), put=st.sampled_from([0.0, float("nan"), float("inf"), -float("inf")]))
def test_places_are_the_first_of_equals(name: str, dtype: torch.dtype, seed: int, put: float) -> None:
    x = torch.randint(0, 3, (4, 6, 5), generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[1, 2, 3] = x[2, :, 4] = put
    b, expected = called(PLACES[name], x)
    for value, bound in expected.items():
        assert compare(b.results[value], bound).ok
        if not bound.value.is_floating_point():
            assert not compare((b.results[value] + 1) % 5, bound).ok


@DRAWS
@given(seed=st.integers(0, 2**31), columns=st.sampled_from([2, 30, 300]))
def test_products_inside_the_range(seed: int, columns: int) -> None:
    drawn = torch.randn(4, columns, generator=torch.Generator().manual_seed(seed))
    b, expected = called(("aten.prod.dim_int", 1), drawn.sign() * (drawn.abs() / columns**0.5).exp())
    (value, bound), = expected.items()
    assert compare(b.results[value], bound).ok and bool(bound.error.isfinite().all())
    assert not compare((bound.value * 1.001).float(), bound).ok


@DRAWS
@given(seed=st.integers(0, 2**31), columns=st.sampled_from([2, 30, 300]), put=st.sampled_from([1.0, 0.0, float("inf"), float("nan")]))
def test_running_products_inside_the_range(seed: int, columns: int, put: float) -> None:
    drawn = torch.randn(4, columns, generator=torch.Generator().manual_seed(seed))
    drawn = drawn.sign() * (drawn.abs() / columns**0.5).exp()
    drawn[2, columns // 2] = put
    b, expected = called(("aten.cumprod.default", 1), drawn)
    (value, bound), = expected.items()
    assert compare(b.results[value], bound).ok and bool(bound.error.isfinite().all())
    assert not compare((bound.value * 1.001).float(), bound).ok


def test_of_a_running_sum_that_may_leave_the_range_only_what_is_settled_is_demanded() -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[3e38, 3e38, -3e38, -inf, 1.0], [1.0, inf, 1.0, -inf, 1.0], [1.0, nan, 1.0, 1.0, 1.0]])
    _, expected = called(("aten.cumsum.default", 1), rows)
    (bound,) = expected.values()
    assert compare(torch.tensor([[3e38, inf, inf, nan, nan], [1.0, inf, inf, nan, nan], [1.0, nan, nan, nan, nan]]), bound).ok
    for row, place, wrong in ((1, 2, 9.0), (1, 3, inf), (2, 0, nan), (2, 1, 1.0), (0, 0, inf)):
        seen = torch.where(bound.value.isnan(), nan, bound.value).float()
        seen[row, place] = wrong
        assert not compare(seen, bound).ok, (row, place)


def test_of_a_product_that_may_leave_the_range_only_what_is_settled_is_demanded() -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[1e30, 1e30, 1e-30, 1e-30], [1e30, 1e30, 1e-30, nan], [0.0, 2.0, 3.0, -1.0], [inf, 0.0, 1.0, 1.0]])
    _, expected = called(("aten.prod.dim_int", 1), rows)
    (bound,) = expected.values()
    assert compare(torch.tensor([inf, nan, 0.0, nan]), bound).ok
    wrong = ((1.0, 0.0, nan), (nan, 1e-3, nan), (nan, 0.0, 0.0))
    assert [compare(torch.tensor([1.0, *rest]), bound).ok for rest in wrong] == [False] * 3


@settings(DRAWS, max_examples=40)
@given(seed=st.integers(0, 2**31), columns=st.sampled_from([5, 40, 515]), mean=st.sampled_from([-2.0, -0.1, 0.0, 0.3]),
       infinite=st.booleans())
def test_a_product_may_be_taken_in_any_order(seed: int, columns: int, mean: float, infinite: bool) -> None:
    """Also where some orders underflow before they come to an infinity, or overflow before a zero, and others do not."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(columns, generator=generator) * (mean + torch.randn(columns, generator=generator)).exp2()
    row[seed % columns] = float("inf") if infinite else row[seed % columns]
    b, expected = called(("aten.prod.dim_int", 1), row[None])
    (value, bound), = expected.items()
    assert compare(b.results[value], bound).ok
    for order in (row.abs().sort().indices, row.abs().sort(descending=True).indices, torch.randperm(columns, generator=generator)):
        one_by_one = row[order].cumprod(0)[-1:]
        assert compare(one_by_one, bound).ok, (one_by_one, bound)
    if infinite and columns == 5 and float(row.abs().min()) > 1e-6:
        assert not compare(torch.tensor([float("nan")]), bound).ok and not compare(-bound.value.float(), bound).ok


def test_places_of_computed_values_have_no_rule() -> None:
    b = Build()
    found = b.call("aten.argmax.default", b.call("aten.exp.default", b.given("x", torch.randn(4, 5))), 1)
    with pytest.raises(AgentCompileError, match="computed values"):
        oracle(b.graph(found), b.tensors)
