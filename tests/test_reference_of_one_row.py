"""Budgets of the sums of a single row: honest orders are inside whatever the row, bounds are a few errors wide, short sums are outside."""

import torch
from agentcompile_rules_transformers import testing as cases
from agentcompile_rules_transformers.kinds import KINDS
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.verdict import Case, InputFamily
from agentcompile_core.ops.reference import Bounded, compare, oracle
from agentcompile_core.worker.operands import graph_values, make_inputs

LINEAR = next(kind for kind in KINDS if kind.name == "linear")
COUNT = 256
ENDS = (InputFamily.ONE_HOT, InputFamily.MAX_FINITE, InputFamily.NAN, InputFamily.INFINITE, InputFamily.ALL_MINUS_INF)
FAMILIES = st.sampled_from([family for family in InputFamily if family not in ENDS])
EVEN = st.sampled_from((InputFamily.NORMAL, InputFamily.NORMAL_SMALL, InputFamily.NORMAL_LARGE, InputFamily.LARGE_MEAN, InputFamily.TIES))
LENGTHS = st.one_of(st.sampled_from([1, 2, 3, 5, 63, 64, 65, 127, 129, 512, 1024, 2048]), st.integers(1, 700))


def products(family: InputFamily, k: int, seed: int) -> tuple[torch.Tensor, Bounded]:
    """The terms [k, COUNT] of a linear layer of one row in float64, where they are exact, and the reference of their sums."""
    match, graph = cases.linear_case(n=COUNT, k=k, dtype=DType.F32)
    tensors = make_inputs(match, LINEAR, Case(family=family, seed=seed), "cpu")
    (expected,) = oracle(graph, graph_values(match, graph, tensors)).values()
    return tensors["weight"].double().reshape(COUNT, k).T * tensors["x"].double().reshape(k, 1), expected


def added(terms: torch.Tensor, lanes: int, together: bool, fused: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sums over terms [k, n] by ``lanes`` accumulators of ``dtype``, which are then folded in float32.

    ``together``: each adds neighbouring terms, else terms are dealt out by turns; ``fused``: products are not rounded before.
    """
    missing = -len(terms) % lanes
    padded = torch.cat((terms if fused else terms.float().double(), terms.new_zeros(missing, terms.shape[1])))
    rounds = padded.unflatten(0, (lanes, -1)).transpose(0, 1) if together else padded.unflatten(0, (-1, lanes))
    sums = torch.zeros(rounds.shape[1:], dtype=torch.float64)
    for some in rounds:
        sums = (sums + some).to(dtype).double()
    sums = sums.float()
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(family=FAMILIES, k=LENGTHS, seed=st.integers(0, 10**6), lanes=st.sampled_from([1, 1, 2, 4, 8, 16, 32]), together=st.booleans(),
       fused=st.booleans())
def test_honest_sums_of_a_row_are_inside(family: InputFamily, k: int, seed: int, lanes: int, together: bool, fused: bool) -> None:
    terms, expected = products(family, k, seed)
    seen = compare(added(terms, lanes, together, fused), expected)
    assert seen.ok, f"{family}, {k} terms by {lanes} accumulators: {seen.detail}"


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(family=FAMILIES, k=LENGTHS, seed=st.integers(0, 10**6), lanes=st.sampled_from([4, 8, 16, 32]), fused=st.booleans())
def test_sums_of_a_row_in_any_order_are_inside_where_four_accumulators_share_it(
        family: InputFamily, k: int, seed: int, lanes: int, fused: bool) -> None:
    terms, expected = products(family, k, seed)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    seen = compare(added(terms[order], lanes, False, fused), expected)
    assert seen.ok, f"{family}, {k} terms by {lanes} accumulators: {seen.detail}"


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(family=EVEN, k=st.integers(128, 2048), seed=st.integers(0, 10**6))
def test_the_budget_of_a_row_is_a_few_errors_of_adding_it_one_by_one_and_no_sum_in_half_precision_fits(
        family: InputFamily, k: int, seed: int) -> None:
    terms, expected = products(family, k, seed)
    bound = expected.error.reshape(-1)
    error = (added(terms, 1, True, True).double() - terms.sum(0)).abs()
    assert float((bound / error.clamp_min(1e-300)).median()) < 12.0
    assert not compare(terms[1:].sum(0).float(), expected).ok, "a term is lost"
    for dtype in (torch.float16, torch.bfloat16):
        assert not compare(added(terms, 32, False, True, dtype), expected).ok
