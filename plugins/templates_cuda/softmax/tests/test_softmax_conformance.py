"""The kit of the core, applied to this family."""

from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import norm_case, softmax_case
from agentcompile_templates_cuda_softmax import SoftmaxFamily

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


class TestSoftmax(TemplateFamilyConformance):
    family = SoftmaxFamily()
    cases = (softmax_case(shape=(1, 2, 3, 136), scale=8.0, mask=(1, 1, 3, 136), wide=True),
             softmax_case(shape=(1, 2063), dtype=DType.BF16, log=True))
    rejected = (norm_case(columns=64),)
    targets = (preset("h200"),)
    samples = 2
