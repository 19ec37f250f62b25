"""The kit of the core, applied to both families."""

from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import convolution_step_case, linear_case, recurrence_step_case
from agentcompile_templates_cuda_recurrence import ConvolutionStepFamily, RecurrenceStepFamily

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


class TestRecurrenceStep(TemplateFamilyConformance):
    family = RecurrenceStepFamily()
    cases = (recurrence_step_case(heads=64, width=1, terms=16, gated=True), recurrence_step_case(heads=4, width=32, terms=64, groups=2),
             recurrence_step_case(heads=4, width=32, terms=32, groups=2, form="delta", dtype=DType.F16),
             recurrence_step_case(heads=2, width=16, terms=16, form="bare", dtype=DType.F32))
    rejected = (linear_case(n=24, k=16), recurrence_step_case(heads=3, width=5, terms=10))
    targets = (preset("h200"), preset("a100"))
    samples = 2


class TestConvolutionStep(TemplateFamilyConformance):
    family = ConvolutionStepFamily()
    cases = (convolution_step_case(channels=130), convolution_step_case(channels=33, width=3, bias=False, silu=False, dtype=DType.F32),
             convolution_step_case(channels=64, dtype=DType.F16))
    rejected = (linear_case(n=24, k=16), convolution_step_case(channels=8, width=65))
    targets = (preset("h200"), preset("a100"))
