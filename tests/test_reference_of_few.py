"""Attention whose scores few products make, and whose weight lies on few positions: honest sums in any order are inside the budget."""

import torch
from agentcompile_rules_transformers import testing as cases
from agentcompile_rules_transformers.kinds import KINDS
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.verdict import Case
from agentcompile_core.ops.reference import compare, oracle
from agentcompile_core.worker.operands import graph_values, make_inputs

ATTENTION = next(kind for kind in KINDS if kind.name == "attention")
DIM = 64


def dealt_out(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, order: torch.Tensor, scale: float,
              accumulators: int) -> torch.Tensor:
    """Attention of one row in float32 [H, D], products of a score added in ``order`` by so many accumulators; every step is rounded."""
    scores = [torch.zeros(q.shape[0], keys.shape[0]) for _ in range(accumulators)]
    for place, d in enumerate(order.tolist()):
        scores[place % accumulators] += q[:, d, None] * keys[None, :, d]
    return (sum(scores) * scale).softmax(-1) @ values


@settings(max_examples=60, deadline=None, derandomize=True)
@given(position=st.integers(1, 63), seed=st.integers(0, 10**6), few=st.lists(st.integers(2, 12), min_size=1, max_size=4),
       alike=st.booleans(), first=st.booleans(), accumulators=st.sampled_from((4, 8, 16)))
def test_scores_added_in_any_order_are_inside(position: int, seed: int, few: list[int], alike: bool, first: bool, accumulators: int):
    """``few`` powers of two in q; ``alike``: beside the same number in every key, so that the weight lies on many positions.

    Four accumulators are the fewest of any family; what a single one errs, to which the large terms come first: docs/budgets.md.
    """
    match, graph = cases.attention_case(heads=(2, 1), head_dim=DIM, capacity=64, rope="", dtype=DType.F32)
    values = graph_values(match, graph, make_inputs(match, ATTENTION, Case(family="normal", seed=seed, position=position), "cpu"))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(DIM, generator=generator)
    large = order[: len(few)]
    values["q"][..., large] = 2.0 ** torch.tensor(few, dtype=torch.float32)
    if alike:
        values["k"][..., large] = values["k_cache"][..., large] = 1.01
    if not first:
        order = order[torch.randperm(DIM, generator=generator)]
    keys, held = (torch.cat((values[f"{x}_cache"][0, :position, 0], values[x].reshape(1, DIM))) for x in ("k", "v"))
    found = dealt_out(values["q"][0, 0], keys, held, order, match.number("scale"), accumulators)
    expected = oracle(graph, values)[graph.outputs[0]]
    assert compare(found, expected).ok, compare(found, expected).detail
