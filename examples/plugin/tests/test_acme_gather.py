"""The kit of the core, applied to this family."""

from acme_gather import WarpRows
from agentcompile_rules_transformers.testing import gather_case, norm_case

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.conformance import TemplateFamilyConformance


class TestWarpRows(TemplateFamilyConformance):
    family = WarpRows()
    cases = (gather_case(columns=1024, vocabulary=50), gather_case(columns=7, vocabulary=9, rows=3, dtype=DType.F32),
             gather_case(columns=520, vocabulary=20, rows=2, dtype=DType.BF16))
    rejected = (norm_case(columns=64), gather_case(columns=8, vocabulary=9, rows=70000))
