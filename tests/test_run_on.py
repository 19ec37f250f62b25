"""``run_on`` and ``--backend`` choose the device by themselves; targets that several plugins offer alike are one."""

from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen
from offering import Offers

from agentcompile_core.api import hardware
from agentcompile_core.configuration import Config
from agentcompile_core.errors import Reject, UsageError
from agentcompile_core.ir.target import Target
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.testing.doubles import FakeBackend
from agentcompile_core.testing.targets import FAKE

REAL = evolve(FAKE, name="real", backend="real", preference=3)


class Real(FakeBackend):
    """The accelerator's own backend: here, like the accelerator."""

    name, device, emulated, captures = "real", "npu", False, True

    def live_target(self) -> Target | None:
        return REAL


@frozen(kw_only=True)
class Settings:
    compiler: str = field(default="cc", metadata={"doc": "what builds"})


class Emulator(FakeBackend):
    name, clock, settings_class = "emulator", False, Settings

    def live_target(self) -> Target | None:
        return None

    def available(self) -> Any:
        return True if self.settings.compiler == "cc" else Reject(f"{self.settings.compiler} is no compiler")


class OtherLanguage(FakeBackend):
    name, languages = "in_c", ("c",)


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with an accelerator, its backend, and an emulator of it."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *a, **k: type("Device", (), {"type": "npu"})())
    offers = Offers((REAL,), backends=(Real(), Emulator(), OtherLanguage()))
    return load_catalog(only=(), strict=True, extra=[("outside", offers)])


def chosen(catalog: Any, run_on: str = "auto", **options: Any) -> tuple[str, str, str]:
    found = hardware.choose(Config(**options), catalog, run_on=run_on)
    return found.target.name, found.backend.name if found.backend else "", found.device


def test_without_names_the_accelerator_is_taken(catalog: Any) -> None:
    assert chosen(catalog) == chosen(catalog, run_on="framework") == ("real", "real", "npu")


@pytest.mark.parametrize("options", [{"run_on": "emulator"}, {"backend": "emulator"}, {"run_on": "emulator", "backend": "emulator"},
                                     {"run_on": "outside/emulator"}, {"run_on": "emulator", "target": "real"},
                                     {"run_on": "emulator", "device": "cpu"}], ids=str)
def test_an_emulator_that_is_named_works_on_its_own_device(catalog: Any, options: dict[str, str]) -> None:
    assert chosen(catalog, **options) == ("real", "emulator", "cpu")


def test_a_bundle_for_the_accelerator_runs_on_the_emulator(catalog: Any) -> None:
    found = hardware.choose(Config(), catalog, REAL, "emulator")
    assert (found.target, found.backend.name, found.device) == (REAL, "emulator", "cpu")


@pytest.mark.parametrize(("options", "sentence"), [
    ({"run_on": "emulator", "backend": "real"}, "steps are to run on 'emulator', which works on the device cpu, and backend real "
     "means npu"),
    ({"run_on": "emulator", "device": "npu"}, "works on the device cpu, and --device means npu; name one of them only"),
    ({"run_on": "in_c", "target": "real"}, "'in_c' runs kernels in c; those for real are in cuda"),
    ({"run_on": "emulator", "plugins": {"emulator": {"compiler": "dd"}}}, "steps cannot run on 'emulator': dd is no compiler"),
])
def test_what_contradicts_itself_is_refused_in_one_sentence(catalog: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        chosen(catalog, **options)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_equal_targets_of_several_plugins_are_one_and_different_ones_are_asked_apart() -> None:
    def named(*offers: Offers) -> Any:
        return load_catalog(only=(), extra=[(f"plugin_{i}", one) for i, one in enumerate(offers)]).find("agentcompile_targets", "real")

    assert named(Offers((REAL,)), Offers((evolve(REAL),))) == REAL
    with pytest.raises(UsageError, match="'real' is offered by several plugins: plugin_0/real, plugin_1/real"):
        named(Offers((REAL,)), Offers((evolve(REAL, sm_count=1),)))


def test_emulation_alone_knows_the_targets_that_it_emulates() -> None:
    """Without the backend of the real hardware: ``--target h200`` works with the emulator and the families."""
    alone = load_catalog(only=("emulation",), strict=True)
    found = hardware.choose(Config(target="h200"), alone)
    assert (found.target.name, found.target.backend, found.device) == ("h200", "cuda", "cpu") and found.backend.name == "emulation"
    both = load_catalog(only=("emulation", "cuda"), strict=True)
    assert hardware.choose(Config(target="h200", device="cpu"), both).target == found.target


def test_without_any_target_one_sentence_says_so() -> None:
    with pytest.raises(UsageError, match="unknown target 'h200'; no installed plugin offers any"):
        hardware.choose(Config(target="h200"), load_catalog(only=("gemv",), strict=True))
