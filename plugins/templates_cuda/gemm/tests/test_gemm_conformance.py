"""The kit of the core, applied to this family."""

from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import linear_case, matmul_case, norm_case, rows_case
from agentcompile_templates_cuda_gemm import GemmFamily

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


class TestGemm(TemplateFamilyConformance):
    family = GemmFamily()
    cases = (rows_case(rows=(2, 21), n=72, k=88, bias=True, activation="gelu", residual=True),
             matmul_case(shapes=((2, 3, 37, 19), (2, 3, 45, 19)), turned="b", dtype=DType.F32))
    rejected = (norm_case(columns=64), linear_case(n=24, k=16))
    targets = (preset("h200"),)
    samples = 1
