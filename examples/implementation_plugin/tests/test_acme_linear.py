"""The kit of the core, applied to this implementation."""

from acme_linear import AcmeLinear
from agentcompile_rules_transformers.testing import linear_case, norm_case
from attrs import evolve

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.implementation_conformance import ImplementationConformance

PLAIN = linear_case(n=8, k=16)
OUT = PLAIN[0].need("out")
WIDE = evolve(PLAIN[0], operands=(*(o for o in PLAIN[0].operands if o is not OUT), evolve(OUT, spec=evolve(OUT.spec, dtype=DType.F32))))


class TestAcmeLinear(ImplementationConformance):
    implementation = AcmeLinear()
    cases = (linear_case(n=33, k=48), linear_case(n=7, k=5, dtype=DType.F32))
    rejected = (norm_case(columns=64), linear_case(n=8, k=16, bias=True), (WIDE, PLAIN[1]))
