"""Validator and backend pass the kits; what the validator must catch are mistakes in accesses, so its controls are the trials."""

from agentcompile_validator_emulation.backend import EmulationBackend
from agentcompile_validator_emulation.validator import EmulationValidator
from attrs import evolve

from agentcompile_core.testing.backend_conformance import BackendConformance
from agentcompile_core.testing.validator_conformance import ValidatorConformance

GOOD, BAD = EmulationValidator().controls(EmulationBackend())


class TestValidator(ValidatorConformance):
    validator, backend = EmulationValidator(), EmulationBackend()
    good, bad = GOOD, BAD


class TestBackend(BackendConformance):
    backend, trial = EmulationBackend(), GOOD[0]
    broken = evolve(GOOD[0].source, digest="0badc0de", code=GOOD[0].source.code.replace("staged[last", "unstaged[last"))
