"""Both implementations pass the kit for implementations."""

from agentcompile_rules_transformers.testing import attention_case, chunked_case, gated_case, linear_case, norm_case
from agentcompile_runtime_vendor import VendorAttention, VendorLinear

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.implementation_conformance import ImplementationConformance


class TestLinear(ImplementationConformance):
    implementation = VendorLinear()
    cases = (linear_case(n=33, k=48), linear_case(n=20, k=17, residual=True, dtype=DType.F32))
    rejected = (norm_case(columns=64), gated_case(n=8, k=16), linear_case(n=8, k=16, norm="rms"))


class TestAttention(ImplementationConformance):
    implementation = VendorAttention()
    cases = (attention_case(heads=(4, 2), head_dim=16, capacity=64),
             attention_case(heads=(2, 2), head_dim=8, capacity=40, window=8, dtype=DType.F32),
             chunked_case(heads=(2, 2), head_dim=8, capacity=40, chunk=11))
    rejected = (linear_case(n=8, k=16), attention_case(heads=(2, 2), head_dim=8, capacity=40, rope="none"))
