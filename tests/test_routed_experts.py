"""Routers are taken into the layer behind them where nothing lies between; where an expert is in doubt, so is what it makes."""

from typing import Any

import pytest
import torch
from agentcompile_rules_transformers.draft import Draft
from agentcompile_rules_transformers.experts import ExpertRule
from agentcompile_rules_transformers.testing import routed_experts_case

from agentcompile_core.plugin_api import DType, Match, Ref, Symbol, compare, operator_names, oracle
from agentcompile_core.testing.doubles import FAKE

COUNT, SLOTS, N, K = 6, 2, 8, 16


def found(graph: Any) -> list[Match]:
    return list(ExpertRule().find(graph, FAKE))


def layer(draft: Draft, x: Ref, chosen: Ref) -> Ref:
    matrices = draft.weight("weight", COUNT, 2 * N, K, dtype=DType.F16)
    return draft.one(operator_names.EXPERT_LINEAR, (x, matrices, chosen, None, False), (1, SLOTS, 2 * N), DType.F16)


def router(draft: Draft, count: int = COUNT) -> tuple[Ref, Ref]:
    logits = draft.given("logits", (1, count), DType.F16)
    scores = draft.one("aten.softmax.int", (logits, -1, Symbol("dtype", "float32")), (1, count), DType.F32)
    best, chosen = draft.call("aten.topk.default", (scores, SLOTS), (1, SLOTS), (1, SLOTS), dtype=DType.F32)
    draft.retype(chosen, DType.I64)
    return best, chosen


def test_a_layer_is_offered_with_and_without_its_router() -> None:
    draft = Draft()
    best, chosen = router(draft)
    graph = draft.graph(layer(draft, draft.given("x", (1, 1, K), DType.F16), chosen), best, chosen)
    assert sorted(match.flag("routed") for match in found(graph)) == [False, True]


def test_a_layer_whose_rows_are_weighed_before_it_keeps_its_router_apart() -> None:
    """Llama 4 multiplies the rows with the scores first."""
    draft = Draft()
    best, chosen = router(draft)
    rows = (draft.given("x", (1, SLOTS, K), DType.F16), draft.cast(best, (1, SLOTS), DType.F16))
    scaled = draft.one("aten.mul.Tensor", rows, (1, SLOTS, K), DType.F16)
    assert [match.flag("routed") for match in found(draft.graph(layer(draft, scaled, chosen), best))] == [False]


@pytest.mark.parametrize("count", [COUNT - 2, COUNT + 3])
def test_a_router_of_fewer_or_more_logits_than_matrices_stays_apart(count: int) -> None:
    """Some experts return what they are given and have no matrix; a layer with its router in it reads a logit for each matrix."""
    draft = Draft()
    best, chosen = router(draft, count)
    graph = draft.graph(layer(draft, draft.given("x", (1, 1, K), DType.F16), chosen), best, chosen)
    assert [match.flag("routed") for match in found(graph)] == [False]


def test_experts_that_no_router_chooses_are_read() -> None:
    draft = Draft()
    graph = draft.graph(layer(draft, draft.given("x", (1, 1, K), DType.F16), draft.given("experts", (1, SLOTS), DType.I64)))
    assert [match.flag("routed") for match in found(graph)] == [False]


@pytest.mark.parametrize("equal", [(), (3, 4), (2, 3, 4)])
def test_of_rows_of_experts_in_doubt_nothing_is_known_and_all_of_others(equal: tuple[int, ...]) -> None:
    match, graph = routed_experts_case(sizes=(COUNT, SLOTS, N, K), dtype=DType.F16)
    generator = torch.Generator().manual_seed(1)
    values = {operand.values[0]: torch.randn(operand.spec.shape, generator=generator).half() for operand in match.operands
              if operand.access.value == "read"}
    logits = torch.tensor([[-1.0, 0.0, 1.0, 2.0, 3.0, 5.0]]).half()
    logits[0, list(equal)] = 4.0
    values[match.need("logits").values[0]] = logits
    expected = oracle(graph, values)[match.need("out").values[0]]
    weight = values[match.need("weight").values[0]].double()
    x = values[match.need("x").values[0]].double().flatten()

    def rows_of(*experts: int) -> torch.Tensor:
        gate, up = ((weight[list(experts), part * N:(part + 1) * N] @ x) for part in (0, 1))
        return (torch.nn.functional.silu(gate) * up).reshape(match.need("out").spec.shape).half()

    for second in equal or (4,):
        assert compare(rows_of(5, second), expected).ok, second
        assert not compare(rows_of(second, 5), expected).ok, "the best comes first"
    assert equal or not compare(rows_of(5, 3), expected).ok
