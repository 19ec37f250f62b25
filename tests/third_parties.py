"""What third parties write: a model, an advisor and a validator with settings, and the files that install and configure them."""

MODULE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return torch.relu(self.linear(x))

def get_inputs():
    return [torch.randn(1, 64)]

def get_init_inputs():
    return []
"""
ADVISOR = """
from attrs import frozen
from agentcompile_core.plugin_api import Advice, Advisor, hookimpl

@frozen
class Settings:
    first: tuple[str, ...] = ()

class Told(Advisor):
    name = "told"
    settings_class = Settings

    def advise(self, question):
        return Advice(order=self.settings.first)

@hookimpl
def agentcompile_advisors():
    return [Told()]
"""
VALIDATOR = """
from attrs import evolve, frozen
from agentcompile_core.plugin_api import NO_TARGET, Cause, Outcome, Validator, Verdict, control_trials, hookimpl

@frozen
class Settings:
    kind: str = ""

class Strict(Validator):
    name = "strict"
    settings_class = Settings

    def applies(self, trial):
        return True

    def controls(self, backend):
        (trial,) = control_trials((backend.control(""),), NO_TARGET)
        other, named = (evolve(trial, match=evolve(trial.match, kind=kind)) for kind in ("other", self.settings.kind))
        return (other,), (named,)

    def check(self, trial, run):
        if trial.match.kind != self.settings.kind:
            return Verdict(validator=self.name, outcome=Outcome.PASS)
        return Verdict(validator=self.name, outcome=Outcome.FAIL, cause=Cause.TOLERANCE, message=f"no {self.settings.kind} passes here")

@hookimpl
def agentcompile_validators():
    return [Strict()]
"""
TOML = """
advisor = "told"
validators = ["numerics", "strict"]
target = "acme_one"
rounds = 1
margin = -1  # what passed is taken, so that no clock decides what is tested

[plugin.acme_told]
first = ["vendor/linear", "acme_hardware/c_linear"]

[plugin.acme_strict]
kind = "elementwise"
"""
PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "1.0"
dependencies = ["agentcompile-core"]

[project.entry-points."agentcompile.v1"]
{name} = "{name}"

[tool.setuptools]
py-modules = ["{name}"]
"""
