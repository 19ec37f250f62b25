"""The kit of the core, applied to these families."""

from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import elementwise_case, gather_case, norm_case, part_case
from agentcompile_templates_cuda_elementwise import ElementwiseFamily, GatherFamily

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


class TestElementwise(TemplateFamilyConformance):
    family = ElementwiseFamily()
    cases = (elementwise_case(columns=2048), elementwise_case(columns=33, rows=3, operators=("mul", "add", "gelu"), dtype=DType.BF16),
             elementwise_case(columns=100, operators=("add", "sub", "mul", "add", "sub"), dtype=DType.F32),
             part_case(heads=3, width=8), part_case(heads=8, width=64, dtype=DType.BF16))
    rejected = (norm_case(columns=64), gather_case(columns=64, vocabulary=9))
    targets = (preset("h200"), preset("a100"))


class TestGather(TemplateFamilyConformance):
    family = GatherFamily()
    cases = (gather_case(columns=2048, vocabulary=50), gather_case(columns=7, vocabulary=9, rows=3, dtype=DType.F32),
             gather_case(columns=520, vocabulary=20, rows=2, dtype=DType.BF16))
    rejected = (norm_case(columns=64), gather_case(columns=8, vocabulary=9, rows=70000))
    targets = (preset("h200"), preset("a100"))
