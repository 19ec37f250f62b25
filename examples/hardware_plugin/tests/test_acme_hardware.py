"""The kit of the core, applied to the backend, and a linear layer that builds with every schedule."""

import attrs
from acme_hardware.backend import ACME_ONE, AcmeBackend
from acme_hardware.families import LinearInC
from agentcompile_rules_transformers.testing import linear_case

from agentcompile_core.plugin_api import DType, control_trials
from agentcompile_core.testing.backend_conformance import BackendConformance


class TestBackend(BackendConformance):
    backend = AcmeBackend()
    (trial,) = control_trials((backend.control(""),), ACME_ONE)
    broken = attrs.evolve(trial.source, digest="0badc0de", code="this is no source")

    def test_linear(self) -> None:
        match, _ = linear_case(n=24, k=40, dtype=DType.F32)
        for schedule in LinearInC().space(match, ACME_ONE).points:
            source = LinearInC().lower(match, schedule, ACME_ONE)
            self.backend.check(source, ACME_ONE)
            assert hasattr(self.backend.load(self.backend.build(source, ACME_ONE)), source.launches[0].entry)
