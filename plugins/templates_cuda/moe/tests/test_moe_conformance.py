"""The kit of the core, applied to both families."""

from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import experts_case, linear_case, routed_experts_case, router_case, scored_router_case
from agentcompile_templates_cuda_moe import ExpertsFamily, RouterFamily

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


class TestExperts(TemplateFamilyConformance):
    family = ExpertsFamily()
    cases = (experts_case(sizes=(6, 3, 41, 136)), experts_case(sizes=(5, 2, 37, 51), down=True, bias=True, wide=True, dtype=DType.BF16),
             experts_case(sizes=(5, 2, 40, 51), down=True, bias=True, lies=("columns",)), routed_experts_case(sizes=(64, 3, 41, 136)),
             routed_experts_case(sizes=(9, 2, 24, 64), scoring="sigmoid", bias=DType.F32, expert_bias=True, dtype=DType.BF16))
    rejected = (linear_case(n=24, k=16), experts_case(sizes=(40, 33, 5, 8)))
    targets = (preset("h200"),)
    samples = 1


class TestRouter(TemplateFamilyConformance):
    family = RouterFamily()
    cases = (router_case(experts=70, slots=5), router_case(experts=8, slots=2, after=True, dtype=DType.F32),
             scored_router_case(experts=40, slots=3, bias=DType.F32, normalized="guarded", factor=2.5))
    rejected = (linear_case(n=24, k=16), router_case(experts=2000, slots=4))
    targets = (preset("h200"),)
