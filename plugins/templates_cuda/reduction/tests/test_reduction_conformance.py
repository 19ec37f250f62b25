"""The kit of the core, applied to this family."""

from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import norm_case, reduction_case, scan_case
from agentcompile_templates_cuda_reduction import ReductionFamily

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


class TestReduction(TemplateFamilyConformance):
    family = ReductionFamily()
    cases = (reduction_case(shape=(3, 2063), before=("mul",)),
             reduction_case(shape=(2, 131, 35), op="aten.var.correction", dim=1, keepdim=True, dtype=DType.BF16),
             scan_case(shape=(2, 37, 24), axis=1, reverse=True, dtype=DType.BF16))
    rejected = (norm_case(columns=64),)
    targets = (preset("h200"),)
    samples = 2
