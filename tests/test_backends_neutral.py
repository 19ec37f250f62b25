"""The core knows no backend: no name of one, no CUDA text for another, limits and environment as each backend says."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from agentcompile_runtime_cuda.backend import CudaBackend
from agentcompile_validator_emulation.backend import EmulationBackend
from attrs import evolve

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import ContractError
from agentcompile_core.installation.building import builder
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.region import Region
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.processes import environment, toolchain
from agentcompile_core.processes.environment import child_environment
from agentcompile_core.runtime.sources import source_of
from agentcompile_core.stages import plan
from agentcompile_core.store import Store
from agentcompile_core.testing.doubles import FakeBackend, FakeFamily, FakeRule, fake_match, fake_source
from agentcompile_core.testing.targets import FAKE

CORE = Path(__file__).parents[1] / "agentcompile_core"
NAMES = {"emulation", "flashkv", "cudagraph", "numerics", "cuda"}
DEFAULTS = CORE / "configuration" / "defaults.py"
# Words of one vendor's hardware and tools: not even in a comment, since what a core says is what it assumes.
VENDORS = re.compile(r"cuda|nvidia|nvrtc|nvcc|ptxas|cubin|\bsm_\d|rocm|\bhip\b|ascend|oneapi", re.IGNORECASE)
C_TARGET = evolve(FAKE, name="c_machine", backend="c_backend", languages=("c",))


class CBackend(FakeBackend):
    name, languages, emulated, environment = "c_backend", ("c",), False, ("ACME_HOME", "ACME_API_KEY")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def check(self, source: Any, target: Any) -> None:
        self.seen.append(source.language)
        if source.launches[0].block[0] > 64:
            raise ContractError("64 threads at most")


class CFamily(FakeFamily):
    name, language, behaviours = "c_family", "c", ("honest",)
    threads = 32

    def lower(self, match: Any, schedule: Any, target: Any) -> Any:
        source = fake_source("honest")
        return evolve(source, language="c", launches=(evolve(source.launches[0], block=(self.threads, 1, 1)),))


class Both:
    @hookimpl
    def agentcompile_region_rules(self) -> Any:
        return (FakeRule(),)

    @hookimpl
    def agentcompile_template_families(self) -> Any:
        return (FakeFamily(), CFamily())

    @hookimpl
    def agentcompile_backends(self) -> Any:
        return (FakeBackend(), CBackend())

    @hookimpl
    def agentcompile_targets(self) -> Any:
        return (FAKE, C_TARGET)


def context(target: Any) -> Context:
    catalog = load_catalog(only=(), strict=True, extra=[("both", Both())])
    return Context(catalog=catalog, target=target, config=Config(), store=Store(None), backend=catalog.backend_of(target))


def literals(path: Path) -> set[str]:
    return {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_no_module_of_the_core_names_a_backend_runtime_or_validator() -> None:
    modules = [path for path in CORE.rglob("*.py") if path != DEFAULTS]
    assert len(modules) > 100
    assert {str(path): found for path in modules if (found := literals(path) & NAMES)} == {}
    assert {str(path): found for path in modules if (found := VENDORS.findall(path.read_text()))} == {}


def test_the_default_list_in_the_configuration_holds_no_more_than_it_must() -> None:
    assert literals(DEFAULTS) & NAMES == {"cuda", "numerics"}
    assert sorted(VENDORS.findall(DEFAULTS.read_text())) == ["cuda", "cuda"], "the default language, and how operators of one library begin"


def test_children_get_no_variables_of_a_vendor_unless_a_backend_names_them() -> None:
    assert not [name for name in (*environment.PASSED, *toolchain.PASSED) if VENDORS.search(name)]
    assert {"CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"} <= set(CudaBackend.environment)
    assert {"CUDA_HOME", "CUDA_PATH"} <= set(EmulationBackend.environment), "where its headers may be"


@pytest.mark.parametrize(("target", "family"), [(FAKE, "both/fake_family"), (C_TARGET, "both/c_family")])
def test_with_two_languages_installed_each_target_gets_its_own(target: Any, family: str) -> None:
    match, graph = fake_match()
    region = Region(signature="r", name="r", graph=graph, matches=(match,), instances=())
    ctx = context(target)
    found = plan.plan(region, frozenset({Origin.GENERATED}), ctx)
    assert {step.implementation for step in found.steps} == {family}
    assert any("written in" in reason for _, name, reason in found.rejects if name != family)
    assert builder(ctx).name == target.backend


def test_a_source_in_another_language_than_its_family_says_is_refused_before_any_backend_sees_it() -> None:
    ctx, (match, _) = context(C_TARGET), fake_match()
    step = Step(match_id=match.id, implementation="both/fake_family", origin=Origin.GENERATED,
                schedule=Schedule({"behave": "honest", "us": 5.0}))
    with pytest.raises(ContractError, match="lowered to cuda; c_machine runs c"):
        source_of(step, match, ctx.catalog, C_TARGET)
    assert ctx.backend.seen == [] and ctx.backend.builds == 0


def test_limits_are_those_of_the_targets_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, (match, _) = context(C_TARGET), fake_match()
    step = Step(match_id=match.id, implementation="both/c_family", origin=Origin.GENERATED, schedule=Schedule({}))
    assert source_of(step, match, ctx.catalog, C_TARGET).language == "c"
    monkeypatch.setattr(CFamily, "threads", 65)
    with pytest.raises(ContractError, match="64 threads at most"):
        source_of(step, match, ctx.catalog, C_TARGET)


def test_children_get_the_variables_that_a_backend_names_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_HOME", "/opt/acme")
    monkeypatch.setenv("ACME_API_KEY", "canary")
    assert "ACME_HOME" not in child_environment()
    found = child_environment(CBackend.environment)
    assert found["ACME_HOME"] == "/opt/acme" and "ACME_API_KEY" not in found


def test_the_defaults_of_a_backend_are_those_of_a_processor() -> None:
    backend, calls = CBackend(), []
    times = backend.time_from_host(calls.append, repetitions=3, runs_per_repetition=4)
    assert calls == [0] * 12 and len(times) == 3 and all(t >= 0 for t in times)
    assert not backend.is_lost() and backend.identity() == "cpu" and not backend.captures
    assert backend.cause_of(RuntimeError("any")) is None and backend.control("") is None
