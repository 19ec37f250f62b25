"""The kit of the core, applied to this family."""

import pytest
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import attention_case, chunked_case, norm_case, sloped_case
from agentcompile_templates_cuda_attention import AttentionFamily

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


@pytest.mark.slow
class TestAttention(TemplateFamilyConformance):
    family = AttentionFamily()
    cases = (attention_case(heads=(4, 2), head_dim=64, capacity=160, rope="rms"),
             attention_case(heads=(9, 1), head_dim=32, capacity=96, window=40, softcap=5.0, dtype=DType.BF16),  # whole and in parts
             attention_case(heads=(2, 2), head_dim=128, capacity=64, rope="none", dtype=DType.F32),
             attention_case(heads=(4, 2), head_dim=64, capacity=64, rope="pairs", dtype=DType.F32),
             attention_case(heads=(2, 1), head_dim=64, capacity=96, rope="pairs_wide", dtype=DType.BF16),
             sloped_case(heads=(4, 2), head_dim=48, value_dim=32, capacity=96, slopes=(0.5, 0.25, 0.06, 0.01)),
             chunked_case(heads=(4, 2), head_dim=32, capacity=96, chunk=41, dtype=DType.BF16))
    rejected = (norm_case(columns=64), attention_case(heads=(2, 2), head_dim=12, capacity=64))
    targets = (preset("h200"), preset("a100"))
    samples = 2
