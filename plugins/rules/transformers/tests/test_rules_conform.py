"""Every rule of this distribution passes the kit that the core asks third parties to pass."""

from agentcompile_rules_transformers import agentcompile_region_rules
from agentcompile_rules_transformers.testing import (
    argmax_case,
    attention_case,
    batch_norm_case,
    channel_norm_case,
    chunked_case,
    convolution_step_case,
    cross_entropy_case,
    elementwise_case,
    experts_case,
    gated_case,
    gather_case,
    linear_case,
    masked_attention_case,
    matmul_case,
    norm_case,
    pool_case,
    recurrence_step_case,
    reduction_case,
    rope_case,
    rope_heads_case,
    rope_table_case,
    router_case,
    rows_case,
    scan_case,
    scored_router_case,
    softmax_case,
    wide_linear_case,
)

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.rule_conformance import RegionRuleConformance

RULES = {rule.name: rule for rule in agentcompile_region_rules()}
LOOKUP, NORM = gather_case(columns=8, vocabulary=9)[1], norm_case(columns=8)[1]


class TestLinear(RegionRuleConformance):
    rule, unserved = RULES["linear"], (LOOKUP,)
    graphs = (linear_case(n=24, k=16, norm="rms", bias=True, residual=True)[1], linear_case(n=(8, 4, 4), k=16)[1],
              gated_case(n=12, k=16, norm="rms", dtype=DType.F32)[1], wide_linear_case(n=12, k=16, form="normed", residual=True)[1],
              wide_linear_case(n=12, k=16, form="weighted", dtype=DType.F16)[1])


class TestAttention(RegionRuleConformance):
    rule, unserved = RULES["attention"], (LOOKUP, NORM)
    graphs = (attention_case(heads=(4, 2), head_dim=16, capacity=64, rope="rms")[1],
              attention_case(heads=(2, 2), head_dim=8, capacity=40, window=8, dtype=DType.F32)[1],
              attention_case(heads=(2, 2), head_dim=16, capacity=40, rope="pairs")[1],
              attention_case(heads=(4, 2), head_dim=16, capacity=40, rope="pairs_wide", dtype=DType.BF16)[1],
              chunked_case(heads=(2, 2), head_dim=8, capacity=40, chunk=11)[1])


class TestNorm(RegionRuleConformance):
    rule, unserved = RULES["norm"], (LOOKUP,)
    graphs = (NORM, norm_case(columns=24, residual=True)[1], norm_case(columns=16, rows=3, norm="layer", dtype=DType.F32)[1],
              norm_case(columns=16, norm="rms_once")[1], channel_norm_case(shape=(2, 6, 5), groups=3)[1],
              channel_norm_case(shape=(2, 3, 4, 4), dtype=DType.F32)[1],
              channel_norm_case(shape=(2, 6, 5), groups=3, tail=("silu", "mul"))[1])


class TestRope(RegionRuleConformance):
    rule, unserved = RULES["rope"], (LOOKUP, NORM)
    graphs = (rope_case(heads=4, head_dim=16)[1], rope_case(heads=2, head_dim=16, rotary_dim=8)[1])


class TestRopeHeads(RegionRuleConformance):
    rule, unserved = RULES["rope_heads"], (LOOKUP, NORM, rope_case(heads=4, head_dim=16)[1])
    graphs = (rope_heads_case(heads=3, rotary=8, rest=6)[1], rope_heads_case(heads=3, rotary=8, rest=6, layout="apart", shared=True)[1],
              rope_heads_case(heads=2, rotary=8, rest=16, dtype=DType.BF16, table=DType.F32)[1])


class TestRopeTable(RegionRuleConformance):
    rule, unserved = RULES["rope_table"], (LOOKUP, NORM)
    graphs = (rope_table_case(half=16)[1],)


class TestElementwise(RegionRuleConformance):
    rule, unserved = RULES["elementwise"], (LOOKUP,)
    graphs = (elementwise_case(columns=30, operators=("silu", "mul", "add"))[1],
              batch_norm_case(shape=(2, 3, 5), activation="relu", dtype=DType.F32)[1])


class TestGather(RegionRuleConformance):
    rule, unserved = RULES["gather"], (NORM,)
    graphs = (LOOKUP, gather_case(columns=7, vocabulary=9, rows=3, dtype=DType.F32)[1])


class TestArgmax(RegionRuleConformance):
    rule, unserved = RULES["argmax"], (LOOKUP, NORM)
    graphs = (argmax_case(n=103)[1], argmax_case(n=103, advance=True)[1])


class TestSoftmax(RegionRuleConformance):
    rule, unserved = RULES["softmax"], (LOOKUP, NORM)
    graphs = (softmax_case(shape=(2, 3, 4, 20), scale=8.0, mask=(1, 1, 4, 20), wide=True)[1],
              softmax_case(shape=(2, 9, 5), axis=1, log=True, dtype=DType.F32)[1])


class TestReduction(RegionRuleConformance):
    rule, unserved = RULES["reduction"], (LOOKUP, NORM)
    graphs = (reduction_case(shape=(2, 3, 40), before=("mul", "neg"))[1], reduction_case(shape=(2, 9, 5), op="aten.max.dim", dim=1)[1],
              reduction_case(shape=(2, 9, 5), op="aten.std.correction", dim=(1, 2), keepdim=True, dtype=DType.F32)[1])


class TestScan(RegionRuleConformance):
    rule, unserved = RULES["scan"], (LOOKUP, NORM)
    graphs = (scan_case(shape=(2, 3, 40), before=("mul", "neg"), reverse=True)[1], scan_case(shape=(2, 9, 5), axis=1)[1],
              scan_case(shape=(2, 40), product=True, dtype=DType.F32)[1])


class TestPool(RegionRuleConformance):
    rule, unserved = RULES["pool"], (LOOKUP, NORM)
    graphs = (pool_case(shape=(2, 3, 9, 8), windows=((3, 3, 1), (2,)), before=("tanh",))[1],
              pool_case(shape=(2, 3, 9), windows=((2, 2, 0, 3),), op="largest", dtype=DType.F32)[1],
              pool_case(shape=(2, 4, 6, 8), windows=((2,), (2,), (2,)), op="inside", dtype=DType.F32)[1])


class TestCrossEntropy(RegionRuleConformance):
    rule, unserved = RULES["cross_entropy"], (LOOKUP, NORM)
    graphs = (cross_entropy_case(rows=9, columns=40, dtype=DType.F32)[1],
              cross_entropy_case(rows=9, columns=40, reduction="none", before="tanh", dtype=DType.F32)[1])


class TestMatmul(RegionRuleConformance):
    rule, unserved = RULES["matmul"], (LOOKUP, linear_case(n=24, k=16, bias=True)[1])
    graphs = (rows_case(rows=(2, 3), n=24, k=16, bias=True, activation="gelu", residual=True)[1],
              matmul_case(shapes=((2, 3, 5, 16), (3, 9, 16)), turned="b", bias=(5, 9), dtype=DType.F32)[1],
              matmul_case(shapes=((16, 5), (16, 9)), turned="a", dtype=DType.BF16)[1])


class TestExperts(RegionRuleConformance):
    rule, unserved = RULES["expert_linear"], (LOOKUP, linear_case(n=24, k=16, bias=True)[1])
    graphs = (experts_case(sizes=(6, 3, 24, 16), lies=("interleaved", "columns"), bias=True)[1],
              experts_case(sizes=(4, 2, 9, 8), dtype=DType.BF16)[1],
              experts_case(sizes=(6, 3, 24, 16), down=True, wide=True)[1], experts_case(sizes=(6, 3, 5, 8), activation="")[1])


class TestRouter(RegionRuleConformance):
    rule, unserved = RULES["router"], (LOOKUP, softmax_case(shape=(1, 20))[1])
    graphs = (router_case(experts=20, slots=3)[1], router_case(experts=20, slots=3, normalized=True, narrow=False)[1],
              router_case(experts=9, slots=9, after=True, dtype=DType.F32)[1],
              scored_router_case(experts=20, slots=3, bias=DType.F32, normalized="guarded", factor=2.5)[1],
              scored_router_case(experts=20, slots=3, scoring="softmax", bias=DType.BF16, normalized="floored")[1])


class TestMaskedAttention(RegionRuleConformance):
    rule, unserved = RULES["masked_attention"], (LOOKUP, attention_case(heads=(2, 2), head_dim=8, capacity=40)[1])
    graphs = (masked_attention_case(sizes=(2, 4, 2, 5, 7, 8), mask=(2, 1, 1, 7))[1],
              masked_attention_case(sizes=(1, 2, 2, 3, 3, 8), value_dim=4, causal=True, turned=False, dtype=DType.F32)[1],
              masked_attention_case(sizes=(1, 2, 1, 3, 9, 8), mask=(3, 9), added=True, dtype=DType.BF16)[1])


class TestRecurrenceStep(RegionRuleConformance):
    rule, unserved = RULES["recurrence_step"], (LOOKUP, NORM)
    graphs = (recurrence_step_case(heads=8, width=1, terms=16, gated=True)[1],
              recurrence_step_case(heads=4, width=8, terms=16, groups=2)[1],
              recurrence_step_case(heads=4, width=8, terms=16, groups=2, form="delta", dtype=DType.F16)[1],
              recurrence_step_case(heads=2, width=8, terms=16, form="bare", dtype=DType.F32)[1])


class TestConvolutionStep(RegionRuleConformance):
    rule, unserved = RULES["convolution_step"], (LOOKUP, NORM)
    graphs = (convolution_step_case(channels=24)[1],
              convolution_step_case(channels=9, width=3, bias=False, silu=False, dtype=DType.F32)[1])


def test_no_rule_is_left_out() -> None:
    assert {kit.rule.name for kit in RegionRuleConformance.__subclasses__() if kit.__module__ == __name__} == set(RULES)
