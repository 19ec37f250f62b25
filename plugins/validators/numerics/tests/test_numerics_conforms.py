"""The validator passes the kit for validators; its controls are CUDA text, which the emulator runs."""

from agentcompile_validator_numerics import NumericsValidator

from agentcompile_core.testing.validator_conformance import ValidatorConformance


class TestNumerics(ValidatorConformance):
    validator = NumericsValidator()
    controls_on = "emulation"
