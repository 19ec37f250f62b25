"""Targets from outside: offered by plugins, chosen by name, preference or presence; families are asked for their language only."""

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from offering import Offers

from agentcompile_core.api import hardware
from agentcompile_core.configuration import Config
from agentcompile_core.errors import ContractError, Reject, UsageError
from agentcompile_core.ir import serial
from agentcompile_core.ir.candidate import Feature
from agentcompile_core.ir.source_check import check_source
from agentcompile_core.ir.target import NO_TARGET, Target
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.stages.plan import unfit
from agentcompile_core.testing.doubles import FakeBackend, FakeFamily, fake_match, fake_source
from agentcompile_core.testing.targets import FAKE, OLDER_FAKE

ACME = Target(name="acme_one", arch="acme-v1 (rev. B)", backend="acme", languages=("c",), capabilities=("vector_engine",))


class AcmeBackend(FakeBackend):
    name, languages, emulated, here = "acme", ("c",), False, True

    def available(self) -> Any:
        return True if self.here else Reject("there is no accelerator of Acme's in this machine")

    def live_target(self) -> Target | None:
        return ACME if self.here else None


class AbsentBackend(AcmeBackend):
    name, here, device = "absent", False, "npu"


def catalog_of(*targets: Any, backends: tuple[Any, ...] = (), strict: bool = True) -> Any:
    return load_catalog(only=(), strict=strict, extra=[("outside", Offers(targets, backends))])


def chosen(catalog: Any, **options: Any) -> hardware.Hardware:
    return hardware.choose(Config(**options), catalog)


def test_a_target_needs_a_name_and_an_architecture_only() -> None:
    target = Target(name="plain", arch="whatever v2")
    assert target.floor_us(1 << 30) == 0.0 and target.lanes == 1 and not target.has("bulk_copy")
    assert serial.loads(serial.dumps(ACME), Target) == ACME
    with pytest.raises(ValueError, match="arch"):
        Target(name="nothing", arch="")


@given(st.text(max_size=12))
def test_capabilities_are_words(text: str) -> None:
    is_word = text.isascii() and bool(text) and text[0].islower() and all(c.islower() or c.isdigit() or c == "_" for c in text)
    if is_word:
        assert Target(name="t", arch="a", capabilities=(text,)).has(text)
    else:
        with pytest.raises(ValueError, match="lower_snake_case"):
            Target(name="t", arch="a", capabilities=(text,))


def test_a_plugin_offers_targets_and_the_message_of_an_unknown_one_lists_them() -> None:
    catalog = catalog_of(ACME, FAKE, backends=(AcmeBackend(),))
    assert catalog.targets == {"outside/acme_one": ACME, "outside/fake": FAKE}
    assert "Target:acme_one" in next(p.offers for p in catalog.plugins if p.name == "outside")
    with pytest.raises(UsageError, match=r"unknown target 'gtx280'; installed: acme_one, fake"):
        chosen(catalog, target="gtx280")


def test_what_is_no_target_is_refused_at_loading() -> None:
    catalog = catalog_of("h200", evolve(FAKE, name="Bad Name"), strict=False)
    assert catalog.targets == {}
    assert {"expected Target, got str", "bad name 'Bad Name'; use lower_snake_case"} <= {
        f.message.removeprefix("ContractError: ") for f in catalog.failures}


def test_the_target_chooses_its_backend_and_device() -> None:
    found = chosen(catalog_of(ACME, FAKE, backends=(FakeBackend(), AcmeBackend())), target="acme_one")
    assert (found.target, found.backend.name, found.device) == (ACME, "acme", "cpu")


def test_hardware_that_is_here_is_preferred_and_otherwise_the_preference_decides() -> None:
    better = evolve(FAKE, name="better", backend="none", preference=7)
    assert chosen(catalog_of(better, ACME, backends=(AcmeBackend(),)), device="cpu").target == ACME
    found = chosen(catalog_of(FAKE, better, OLDER_FAKE), device="cpu")
    assert (found.target, found.backend) == (better, None)
    assert chosen(catalog_of(), device="cpu").target == NO_TARGET


def test_an_emulator_serves_targets_of_its_language_only() -> None:
    elsewhere = evolve(FAKE, backend="somewhere_else")
    backends = (FakeBackend(),)
    assert chosen(catalog_of(elsewhere, backends=backends), target="fake", device="cpu").backend.name == "fake"
    assert chosen(catalog_of(evolve(ACME, backend="gone"), backends=backends), target="acme_one", device="cpu").backend is None


def test_devices_are_those_of_installed_backends_and_torch() -> None:
    catalog = catalog_of(ACME, backends=(AcmeBackend(), AbsentBackend()))
    with pytest.raises(UsageError, match=r"unknown device 'tpu'; installed backends and torch know: cpu,.*npu"):
        chosen(catalog, device="tpu")
    with pytest.raises(UsageError, match="npu was asked for and there is none here"):
        chosen(catalog, device="npu")


def test_families_are_asked_for_their_language_and_features_only() -> None:
    class NeedsEngine(FakeFamily):
        language, features = "c", ("vector_engine", "matrix_engine")

    assert unfit(FakeFamily(), FAKE) is None
    assert "written in cuda; acme_one runs c" in unfit(FakeFamily(), ACME).reason
    assert "needs matrix_engine, which acme_one lacks" in unfit(NeedsEngine(), ACME).reason
    assert unfit(NeedsEngine(), evolve(ACME, capabilities=("matrix_engine", "vector_engine"))) is None


def test_a_source_may_use_what_its_target_has_and_nothing_else() -> None:
    match, _ = fake_match()
    for feature in (Feature.BULK_COPY, "vector_engine"):
        source = evolve(fake_source("honest"), features=(feature,))
        check_source(match, source, evolve(FAKE, capabilities=(feature,)))
        with pytest.raises(ContractError, match=f"uses {feature}, which fake"):
            check_source(match, source, evolve(FAKE, capabilities=()))


def test_what_is_emulated_is_planned_without_what_the_emulator_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the emulator refuses would else take the first tries of every search on a machine without a GPU, and fail."""
    catalog = load_catalog()
    emulator = catalog.find("agentcompile_backends", "emulation")
    whole = catalog.find("agentcompile_targets", "h200")
    more = evolve(whole, capabilities=(*whole.capabilities, "vector_engine"))
    for name in [name for name, one in catalog.targets.items() if one == whole]:
        monkeypatch.setitem(catalog.targets, name, more)
    found = hardware.choose(Config(target="h200", device="cpu"), catalog)
    assert found.backend is emulator and set(found.target.capabilities) == set(more.capabilities) & set(emulator.features)
    assert found.target.has(Feature.WGMMA) and not found.target.has("vector_engine")
    assert found.target.has(Feature.BF16) and found.target.arch == whole.arch
