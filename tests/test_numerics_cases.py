"""What the cases of a candidate cover: positions of its schedule, input families, risks; and what an attention may not drop."""

import pytest
import torch
from agentcompile_rules_transformers import testing as cases
from agentcompile_rules_transformers.kinds import KINDS
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.ir.advice import Risk
from agentcompile_core.ir.candidate import Launch, StepSource
from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.plan import Schedule
from agentcompile_core.ir.verdict import Case, InputFamily
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.ops.reference import compare, oracle
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.worker.operands import graph_values, make_inputs

BY_NAME = {kind.name: kind for kind in KINDS}


def source(periods=(), grid=(1, 1, 1), block=(32, 1, 1)):
    return StepSource(digest="d", code="", launches=(Launch(entry="d", grid=grid, block=block, arguments=()),), periods=periods)


@given(tile=st.integers(2, 300), splits=st.integers(1, 12))
@settings(max_examples=25, derandomize=True, database=None, deadline=None)
def test_the_rounds_of_a_schedule_are_tried_at_their_ends(tile: int, splits: int) -> None:
    match, _ = cases.attention_case(heads=(2, 1), head_dim=16, capacity=4096)
    found = cases_for(match, BY_NAME["attention"], "seed", source=source((tile, tile * splits)))
    positions = {case.position for case in found}
    for period in {tile, tile * splits}:
        assert {period - 1, period, period - 2} <= positions  # full, one over, one short
        last = 4096 // period * period
        assert last - 1 in positions and (last in positions or last == 4096)
    lasting = BY_NAME["attention"].lasting_families(match)
    assert {0, 4095} <= positions and len([case for case in found if case.family not in (*lasting, "nan")]) <= 38 and len(lasting) <= 3
    assert len([case for case in found if case.family == "nan"]) <= 2 + len(match.operands)


def test_a_family_that_states_no_period_gets_positions_from_all_its_integers() -> None:
    match, _ = cases.attention_case(heads=(2, 1), head_dim=16, capacity=4096)
    found = cases_for(match, BY_NAME["attention"], "s", source=source(grid=(6, 1, 1), block=(96, 1, 1)), schedule=Schedule({"depth": 7}))
    positions = {case.position for case in found}
    assert {95, 96, 94} <= positions and {6, 5} <= positions


def test_positions_that_no_schedule_knows_are_in_the_fixed_set_too() -> None:
    table, _ = cases.rope_table_case(half=8)
    assert max(case.position for case in cases_for(table, BY_NAME[table.kind], "s", emulated=True)) > 4095
    match, _ = cases.argmax_case(n=50, advance=True)  # a history of 65
    assert {1, 0, 62, 63, 64} <= {case.position for case in cases_for(match, BY_NAME["argmax"], "s", emulated=True)}


@given(risks=st.lists(st.sampled_from(list(Risk)), max_size=10), capacity=st.integers(2, 300))
@settings(max_examples=25, derandomize=True, database=None, deadline=None)
def test_advice_only_adds_cases(risks: list[Risk], capacity: int) -> None:
    match, _ = cases.attention_case(heads=(2, 1), head_dim=16, capacity=capacity)
    plain = cases_for(match, BY_NAME["attention"], "s", emulated=True)
    assert cases_for(match, BY_NAME["attention"], "s", risks, emulated=True)[: len(plain)] == plain
    assert len(cases_for(match, BY_NAME["attention"], "s", risks, emulated=True)) == len(plain) + len(risks)


def test_every_family_is_drawn_and_holds_what_it_says() -> None:
    match, _ = cases.norm_case(columns=256)
    kind = BY_NAME["norm"]
    tried = [case for case in cases_for(match, kind, "s", emulated=True) if case.carrier in ("", "x")]
    drawn = {case.family: make_inputs(match, kind, case, "cpu")["x"].float() for case in tried}
    assert set(drawn) >= set(InputFamily)
    assert int(drawn["nan"].isnan().sum()) == 1 and {float("inf"), float("-inf")} <= set(drawn["infinite"].reshape(-1).tolist())
    assert bool((drawn["all_minus_inf"] == -torch.inf).all()) and bool((drawn["max_finite"].abs() == 65504).any())
    assert 1000 < float(drawn["large_mean"].mean()) < 1050 and 0.5 < float(drawn["large_mean"].std()) < 10
    assert -1050 < float(drawn["large_mean_below"].mean()) < -1000
    assert float(drawn["one_huge"].abs().max()) == 2**14 and int((drawn["ties"] == drawn["ties"].max()).sum()) > 1


# ---- attention at the length where a few positions are lost in the noise of the others

@pytest.mark.parametrize(("dtype", "rope", "dropped"), [
    (DType.BF16, "rms", (8175, 8191)), (DType.F16, "rms", (4096, 4112)), (DType.BF16, "", (0, 16)), (DType.F16, "rms", (5000, 5001))])
def test_positions_that_are_not_attended_are_refused_at_capacity_8192(dtype: DType, rope: str, dropped: tuple[int, int]) -> None:
    match, graph = cases.attention_case(heads=(2, 1), head_dim=64, capacity=8192, rope=rope, dtype=dtype)
    case = Case(family="every_position", seed=5, position=8191)
    values = graph_values(match, graph, make_inputs(match, BY_NAME["attention"], case, "cpu"))
    expected, out = oracle(graph, values), graph.outputs[0]
    honest = compile_nodes(graph, device="cpu").run({n: t.clone() for n, t in values.items()})
    assert compare(honest[out], expected[out]).ok
    start, end = dropped
    lame = {n: t.clone() for n, t in values.items()}
    for name in ("k_cache", "v_cache"):
        lame[name] = torch.cat((lame[name][:, :start], lame[name][:, end:], lame[name][:, : end - start]), 1)
    lame["position"] = lame["position"] - (end - start)
    assert not compare(compile_nodes(graph, device="cpu").run(lame)[out], expected[out]).ok


# ---- errors that all positions, or all heads, share

def softmax_result(tensors: dict[str, torch.Tensor], position: int, over_heads: bool = False) -> torch.Tensor:
    """Attention of 2 heads over one KV head as HuggingFace's eager path computes it: fp32 softmax, weights in the element type."""
    q = tensors["q"].reshape(2, 64).float()
    rows = [torch.cat((tensors[f"{n}_cache"][0, :position, 0].float(), tensors[n].reshape(1, 64).float())) for n in ("k", "v")]
    scores = q @ rows[0].T * 64**-0.5
    highest = scores.max() if over_heads else scores.amax(-1, keepdim=True)
    weights = (scores - highest).exp()
    return (weights / weights.sum(-1, keepdim=True)).to(tensors["q"].dtype).float() @ rows[1]


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("family", ["level", "apart"])
def test_errors_that_all_weights_share_are_refused_and_honest_ones_are_not(dtype: DType, family: str) -> None:
    match, graph = cases.attention_case(heads=(2, 1), head_dim=64, capacity=96, dtype=dtype)
    step = 2.0**-11 if dtype is DType.F16 else 2.0**-8
    for seed in range(20):
        case = Case(family=family, seed=seed, position=60 + seed)
        tensors = make_inputs(match, BY_NAME["attention"], case, "cpu")
        values, out = graph_values(match, graph, tensors), graph.outputs[0]
        expected = oracle(graph, values)[out]
        framework = compile_nodes(graph, device="cpu").run({n: t.clone() for n, t in values.items()})[out]
        assert compare(framework, expected).ok and compare(softmax_result(tensors, case.position).to(framework.dtype), expected).ok
        wrong = expected.value * (1 + 0.9 * step) if family == "level" else softmax_result(tensors, case.position, over_heads=True)
        assert not compare(wrong.to(framework.dtype), expected).ok
