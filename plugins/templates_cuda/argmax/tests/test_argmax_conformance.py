"""The kit of the core, applied to this family."""

from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import argmax_case, norm_case
from agentcompile_templates_cuda_argmax import ArgmaxFamily

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


class TestArgmax(TemplateFamilyConformance):
    family = ArgmaxFamily()
    cases = (argmax_case(n=5000), argmax_case(n=1001, advance=True, dtype=DType.BF16), argmax_case(n=7, dtype=DType.F32))
    rejected = (norm_case(columns=64),)
    targets = (preset("h200"), preset("a100"))
