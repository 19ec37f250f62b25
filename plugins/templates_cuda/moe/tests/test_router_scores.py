"""The router by scores: sigmoid or softmax, with the bias that only chooses, guards of the sum and a factor."""

import sys
from pathlib import Path

import pytest
from agentcompile_rules_transformers.testing import scored_router_case
from agentcompile_templates_cuda_moe import RouterFamily
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, Graph, Match

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import EmulationError

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from moe_cases import H200, budget_use, drawn, ran, replaced

FAMILY = RouterFamily()
FEW = settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def lowered(match: Match) -> object:
    assert FAMILY.accepts(match, H200) is True
    return FAMILY.lower(match, FAMILY.space(match, H200).points[0], H200)


def routed(match: Match, graph: Graph, seed: int, source: object) -> float:
    tensors = drawn(match, seed)
    tensors["experts"].fill_(-1)
    ran(source, match, tensors)
    return budget_use(match, graph, tensors)


@FEW
@given(experts=st.sampled_from((3, 33, 64)), slots=st.integers(1, 3), scoring=st.sampled_from(("sigmoid", "softmax")),
       bias=st.sampled_from((DType.F32, DType.BF16)), normalized=st.sampled_from(("", "plain", "guarded", "floored")),
       factor=st.sampled_from((1.0, 2.5)), dtype=st.sampled_from((DType.F32, DType.BF16)), seed=st.integers(0, 999))
def test_it_chooses_by_score_and_bias_and_weighs_by_score(
    experts: int, slots: int, scoring: str, bias: DType, normalized: str, factor: float, dtype: DType, seed: int
) -> None:
    match, graph = scored_router_case(experts=experts, slots=slots, scoring=scoring, bias=bias, normalized=normalized, factor=factor,
                                      dtype=dtype)
    assert routed(match, graph, seed, lowered(match)) <= 1.0


@pytest.mark.parametrize("normalized", ["", "plain"])
def test_a_sigmoid_without_a_bias(normalized: str) -> None:
    match, graph = scored_router_case(experts=40, slots=4, normalized=normalized)
    assert match.operand("bias") is None and routed(match, graph, 1, lowered(match)) <= 1.0


WRONG = {  # what is wrong: text, with what it is replaced
    "the bias is weighed": ("== i ? chances[i]", "== i ? values[i]"),
    "the bias does not choose": ("values[i] = chances[i] + biases[i]", "values[i] = chances[i]"),
    "the sum has no guard": ("total + eps", "total"),
    "there is no factor": ("weight / total * factor", "weight / total"),
    "the dependency is not waited for": ("  ac::grid_dependency_wait();\n", ""),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    match, graph = scored_router_case(experts=40, slots=4, bias=DType.F32, normalized="guarded", factor=2.5)
    try:
        assert routed(match, graph, 2, replaced(lowered(match), *WRONG[what])) > 1.0
    except EmulationError:
        return
