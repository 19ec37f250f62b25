"""The router family: what it chooses and weighs is what torch does, ties and NaN included; wrong kernels are seen."""

import math
import sys
from pathlib import Path

import pytest
import torch
from agentcompile_rules_transformers.kinds import ROUTER
from agentcompile_rules_transformers.testing import router_case
from agentcompile_templates_cuda_moe import RouterFamily
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import Case, DType, Graph, Match

pytest.importorskip("agentcompile_validator_emulation")
from agentcompile_validator_emulation.module import SCHEDULES, EmulationError

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from moe_cases import H200, budget_use, drawn, ran, replaced

FAMILY = RouterFamily()
FEW = settings(max_examples=6, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
FORMS = {"all": {}, "all, f32": {"narrow": False, "dtype": DType.BF16}, "normalized": {"normalized": True},
         "after": {"after": True}, "after, f32": {"after": True, "dtype": DType.F32}}


def lowered(match: Match) -> object:
    return FAMILY.lower(match, FAMILY.space(match, H200).points[0], H200)


def routed(form: str, experts: int, slots: int, logits: torch.Tensor) -> tuple[Match, Graph, dict[str, torch.Tensor]]:
    match, graph = router_case(experts=experts, slots=slots, **FORMS[form])
    tensors = drawn(match, 1)
    tensors["logits"].copy_(logits.reshape(1, -1))
    tensors["experts"].fill_(-1)
    return match, graph, tensors


@pytest.mark.parametrize("form", FORMS)
@FEW
@given(experts=st.sampled_from((33, 50, 64)), seed=st.integers(0, 999), order=st.sampled_from(SCHEDULES), data=st.data())
def test_it_chooses_and_weighs_as_torch_does(form: str, experts: int, seed: int, order: object, data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, min(experts, 9)), "slots")
    logits = torch.randn(experts, generator=torch.Generator().manual_seed(seed)) * 3
    match, graph, tensors = routed(form, experts, slots, logits)
    ran(lowered(match), match, tensors, order)
    given_ = tensors["logits"].float().flatten()
    scores, best = given_.topk(slots)
    assert budget_use(match, graph, tensors) <= 1.0
    assert torch.equal(given_[tensors["experts"].flatten()], scores) and len(set(tensors["experts"].flatten().tolist())) == len(best)


@pytest.mark.parametrize(("experts", "slots"), [(1, 1), (2, 2), (31, 9), (32, 32)])
def test_few_experts(experts: int, slots: int) -> None:
    match, graph, tensors = routed("all", experts, slots, torch.linspace(-2.0, 2.0, experts))
    ran(lowered(match), match, tensors)
    assert budget_use(match, graph, tensors) <= 1.0
    assert tensors["experts"].flatten().tolist() == list(range(experts))[::-1][:slots]


@FEW
@given(levels=st.integers(1, 3), seed=st.integers(0, 999))
def test_equal_logits_are_taken_in_their_order(levels: int, seed: int) -> None:
    logits = torch.randint(0, levels, (70,), generator=torch.Generator().manual_seed(seed)).float()
    match, graph, tensors = routed("normalized", 70, 8, logits)
    ran(lowered(match), match, tensors)
    assert budget_use(match, graph, tensors) <= 1.0
    assert tensors["experts"].flatten().tolist() == sorted(range(70), key=lambda i: (-logits[i], i))[:8]


def test_the_later_of_equals_would_be_seen_though_the_budget_allows_it() -> None:
    match, graph, tensors = routed("normalized", 70, 8, torch.zeros(70))
    ran(replaced(lowered(match), "keys[i] > best.key", "keys[i] >= best.key"), match, tensors)
    assert tensors["experts"].flatten().tolist() != list(range(8)) and budget_use(match, graph, tensors) <= 1.0


def test_the_same_expert_twice_is_refused_even_among_equals() -> None:
    match, graph, tensors = routed("after", 8, 3, torch.zeros(8))
    ran(lowered(match), match, tensors)
    assert tensors["experts"].flatten().tolist() == [0, 1, 2] and budget_use(match, graph, tensors) <= 1.0
    for wrong in ([0, 1, 1], [5, 5, 2], [0, 1, 8], [0, 1, -1]):
        tensors["experts"].copy_(torch.tensor(wrong).reshape(1, 3))
        assert budget_use(match, graph, tensors) > 1.0
    tensors["experts"].copy_(torch.tensor([[7, 3, 5]]))
    assert budget_use(match, graph, tensors) <= 1.0, "equals may come in any order"


@pytest.mark.parametrize("put", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_as_in_torch(put: float) -> None:
    for form in FORMS:
        match, graph, tensors = routed(form, 33, 4, torch.linspace(-2, 2, 33).index_fill(0, torch.tensor([3, 32]), put))
        ran(lowered(match), match, tensors)
        assert budget_use(match, graph, tensors) <= 1.0
        assert all(0 <= chosen < 33 for chosen in tensors["experts"].flatten().tolist())


@pytest.mark.parametrize("type_", ["__half", "__nv_bfloat16"])
def test_a_sum_that_lanes_keep_in_half_precision_is_refused_by_the_case_for_it(type_: str) -> None:
    dtype = DType.F16 if type_ == "__half" else DType.BF16
    match, graph = router_case(experts=128, slots=4, dtype=dtype)
    tensors = drawn(match, 1)
    case = Case(family=ROUTER.lasting_families(match)[0], seed=1)
    tensors["logits"].copy_(ROUTER.make(match, match.need("logits"), case, torch.Generator(), "cpu"))
    ran(lowered(match), match, tensors)
    assert budget_use(match, graph, tensors) <= 1.0
    term = "expf(values[i] - largest)"
    ran(replaced(lowered(match), f"part += {term};", f"part = ac::round_to<{type_}>(part + {term});"), match, tensors)
    assert budget_use(match, graph, tensors) > 1.0


WRONG = {  # what is wrong: text, with what it is replaced
    "an expert is chosen twice": ("taken |= 1u << (best.index / ac::warp_size)", "taken |= 0u"),
    "logits behind the last are chosen": ("unsigned taken = missing;", "unsigned taken = 0u;"),
    "logits behind the last are added": ("if (!(missing >> i & 1u)) part +=", "part +="),
    "weights are not divided": ("weight / total", "weight"),
    "the largest is not subtracted": ("largest = value_of(best_of(keys, missing, lane).key)", "largest = 0.0f"),
    "the dependency is not waited for": ("  ac::grid_dependency_wait();\n", ""),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_kernel_is_seen(what: str) -> None:
    logits = torch.randn(45, generator=torch.Generator().manual_seed(2)) - 40.0 * what.startswith("logits")
    match, graph, tensors = routed("all", 45, 4, logits)
    if what == "the largest is not subtracted":
        tensors["logits"][0, :3] = 60000.0
        tensors["logits"][0, 3:] = -60000.0
    try:
        ran(replaced(lowered(match), *WRONG[what]), match, tensors)
    except EmulationError:
        return
    assert budget_use(match, graph, tensors) > 1.0
