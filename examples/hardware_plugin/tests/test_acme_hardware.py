"""Its families build, and what they compute is what their matches mean."""

import pytest
from acme_hardware.backend import ACME_ONE, AcmeBackend
from acme_hardware.families import LinearInC
from agentcompile_rules_transformers.linear import LinearRule
from agentcompile_rules_transformers.testing import Draft

from agentcompile_core.plugin_api import DType
from agentcompile_core.testing.matching import matched


@pytest.mark.parametrize("lanes", [1, 8])
def test_a_linear_layer_builds_for_every_schedule(lanes: int) -> None:
    draft, family = Draft(), LinearInC()
    product = draft.one("aten.linear.default", (draft.given("x", (1, 1, 40), DType.F32), draft.weight("w", 24, 40, dtype=DType.F32)),
                        (1, 1, 24), DType.F32)
    match, _ = matched(LinearRule(), draft.graph(product))
    assert family.accepts(match, ACME_ONE) is True
    schedule = next(p for p in family.space(match, ACME_ONE).points if p.integer("lanes") == lanes)
    source, backend = family.lower(match, schedule, ACME_ONE), AcmeBackend()
    backend.check(source, ACME_ONE)
    assert hasattr(backend.load(backend.build(source, ACME_ONE)), source.launches[0].entry)
