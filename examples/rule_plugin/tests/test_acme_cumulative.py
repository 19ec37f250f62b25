"""What the core makes of the rule's matches: checked operands, counted work, and a reference that the framework itself meets."""

import torch
from acme_cumulative import CUMULATIVE_SCALE, CumulativeRule
from agentcompile_rules_transformers.testing import Draft

from agentcompile_core.plugin_api import Case, DType, Graph, compare
from agentcompile_core.testing.matching import matched
from agentcompile_core.testing.rule_conformance import RegionRuleConformance


def scaled_sums(axis: int) -> Graph:
    draft = Draft()
    total = draft.one("aten.cumsum.default", (draft.given("x", (1, 3, 40), DType.F32), axis), (1, 3, 40), DType.F32)
    out = draft.one("aten.mul.Tensor", (total, draft.weight("factor", 40, dtype=DType.F32)), (1, 3, 40), DType.F32)
    return draft.graph(out)


class TestCumulativeRule(RegionRuleConformance):
    rule, graphs, unserved = CumulativeRule(), (scaled_sums(-1), scaled_sums(2)), (scaled_sums(1),)


def test_the_rule_finds_it_and_the_kind_knows_it() -> None:
    match, graph = matched(CumulativeRule(), scaled_sums(-1))
    assert (CUMULATIVE_SCALE.flops(match, graph), match.bytes_moved) == (3 * 40 * 2, 4 * (3 * 40 * 2 + 40))
    generator = torch.Generator().manual_seed(1)
    x = CUMULATIVE_SCALE.make(match, match.need("x"), Case(family="drift", seed=1), generator, "cpu")
    factor = torch.randn(40, generator=generator)
    (expected,) = CUMULATIVE_SCALE.reference(match, graph, {"x": x, "factor": factor}, 0).values()
    assert compare(x.cumsum(-1) * factor, expected).ok and not compare(x.cumsum(-1) * factor * 1.001, expected).ok
