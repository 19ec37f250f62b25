"""The kit of the core, applied to these families."""

from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import norm_case, rope_case, rope_heads_case, rope_table_case
from agentcompile_templates_cuda_rope import RopeFamily, RopeTableFamily

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


class TestRope(TemplateFamilyConformance):
    family = RopeFamily()
    cases = (rope_case(heads=16, head_dim=128), rope_case(heads=3, head_dim=80, rotary_dim=32, dtype=DType.BF16),
             rope_case(heads=2, head_dim=64, dtype=DType.F32), rope_case(heads=2, head_dim=64, rotary_dim=32, interleaved=True),
             rope_heads_case(heads=2, rotary=8, rest=8, dtype=DType.BF16, table=DType.F32))
    rejected = (norm_case(columns=64), rope_table_case(half=32))
    targets = (preset("h200"), preset("a100"))


class TestRopeTable(TemplateFamilyConformance):
    family = RopeTableFamily()
    cases = (rope_table_case(half=64), rope_table_case(half=48, dtype=DType.F32), rope_table_case(half=8, dtype=DType.BF16),
             rope_table_case(half=8, dtype=DType.BF16, interleaved=True))
    rejected = (norm_case(columns=64), rope_case(heads=2, head_dim=64))
    targets = (preset("h200"), preset("a100"))
