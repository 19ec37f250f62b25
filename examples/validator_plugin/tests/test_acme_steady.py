"""The kit of the core, applied to this validator: it must see what stays unwritten, and its controls run on the emulator."""

from acme_steady import SteadyValidator

from agentcompile_core.testing.doubles import fake_trial
from agentcompile_core.testing.validator_conformance import ValidatorConformance


class TestSteady(ValidatorConformance):
    validator = SteadyValidator()
    bad = (fake_trial("unwritten"),)
    controls_on = "emulation"
