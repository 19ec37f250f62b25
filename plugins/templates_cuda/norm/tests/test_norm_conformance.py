"""The kit of the core, applied to this family."""

import pytest
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import gather_case, norm_case, norms_beside_case
from agentcompile_templates_cuda_norm import NormFamily
from attrs import evolve

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


@pytest.mark.slow
class TestNorm(TemplateFamilyConformance):
    family = NormFamily()
    cases = (norm_case(columns=2048), norm_case(columns=128, rows=16, norm="rms_one_plus", dtype=DType.BF16),
             norm_case(columns=768, norm="layer"), norm_case(columns=40, rows=2, norm="rms_bare", dtype=DType.BF16),
             norm_case(columns=512, norm="layer_one_plus", residual=True, dtype=DType.BF16),
             norm_case(columns=72, rows=3, norm="layer_one_plus"),
             norm_case(columns=1000, residual=True), norm_case(columns=96, rows=3, dtype=DType.F32),
             norm_case(columns=264, norm="rms_once", tail=("add", "mul"), weights=DType.F32, dtype=DType.BF16),
             norm_case(columns=72, norm="rms_one_plus", residual=True, tail=("silu", "add")),
             norms_beside_case(columns=(640, 128), norm="rms_once", dtype=DType.BF16))
    rejected = (gather_case(columns=64, vocabulary=9), norms_beside_case(columns=(1 << 18, 1 << 18)))
    targets = (preset("h200"), preset("a100"))
    samples = 2


class TestLongRows(TemplateFamilyConformance):
    family = NormFamily()
    cases = (norm_case(columns=17000, norm="layer", dtype=DType.F32), norm_case(columns=33003, residual=True),
             norm_case(columns=17000, norm="layer_one_plus", dtype=DType.F32),
             norm_case(columns=36000, rows=2, norm="rms_once", tail=("add",), weights=DType.F32, dtype=DType.BF16))
    rejected = ()
    targets = (evolve(preset("h200"), sm_count=6), evolve(preset("a100"), sm_count=6))
    samples = 2


class TestManyRows(TemplateFamilyConformance):
    family = NormFamily()
    cases = (norm_case(columns=256, rows=200, norm="layer"), norm_case(columns=333, rows=150, norm="rms_one_plus", dtype=DType.F32),
             norm_case(columns=256, rows=17, norm="layer_one_plus", dtype=DType.F32),
             norm_case(columns=600, rows=25, residual=True, dtype=DType.BF16))
    rejected = ()
    targets = (evolve(preset("h200"), sm_count=1),)
    samples = 2
