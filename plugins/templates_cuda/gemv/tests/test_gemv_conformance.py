"""The kit of the core, applied to the family: plain layers, and all that is taken in before and behind them."""

from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import (
    gated_case,
    linear_case,
    router_case,
    shared_norm_case,
    summed_case,
    wide_linear_case,
)
from agentcompile_templates_cuda_gemv import GemvFamily

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


class TestGemv(TemplateFamilyConformance):
    family = GemvFamily()
    cases = (
        linear_case(n=41, k=136, norm="rms", bias=True), gated_case(n=48, k=520, norm="layer", dtype=DType.BF16),
        shared_norm_case(n=(40, 24, 8), k=264, norm="rms_one_plus", dtype=DType.BF16), summed_case(n=57, k=1032, post="rms", norm="rms"),
        summed_case(n=24, k=520, post="rms_one_plus", swapped=True, dtype=DType.BF16), wide_linear_case(n=33, k=264, form="normed"),
    )
    rejected = (router_case(experts=8, slots=2),)
    targets = (preset("h200"), preset("a100"))
    samples = 1
