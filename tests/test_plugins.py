"""The loader: no plugin can stop another, or the host; what is wrong is recorded and named."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from agentcompile_core.errors import AgentCompileError, Cause, Failure, StageName, UsageError
from agentcompile_core.plugin import hookspecs
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import Advisor

CORE = {"core_frontends", "core_runtimes", "core_advisors"}
GOOD = """
from agentcompile_core.ir.advice import Advice
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.plugin.interfaces import Advisor

class Quiet(Advisor):
    name = "quiet"
    def advise(self, question):
        return Advice()

@hookimpl
def agentcompile_advisors():
    return [Quiet()]
"""
HOOK = "from agentcompile_core.plugin.hookspecs import hookimpl\n"
HEAD = GOOD.split("@hookimpl")[0] + "\n"
BROKEN = {  # module text, cause, part of the message
    "broken_import": ("import a_module_that_is_not_there", Cause.IMPORT, "a_module_that_is_not_there"),
    "exits": ("raise SystemExit(3)", Cause.IMPORT, "SystemExit: 3"),
    "syntax": ("def (", Cause.IMPORT, "SyntaxError"),
    "wrong_type": ("from agentcompile_core.plugin.hookspecs import hookimpl\n@hookimpl\ndef agentcompile_advisors():\n    return ['quiet']",
                   Cause.CONTRACT, "expected Advisor, got str"),
    "a_class": (HEAD + "@hookimpl\ndef agentcompile_advisors():\n    return [Quiet]", Cause.CONTRACT, "expected Advisor, got ABCMeta"),
    "wrong_shelf": (HEAD + "@hookimpl\ndef agentcompile_validators():\n    return [Quiet()]",
                    Cause.CONTRACT, "expected Validator, got Quiet"),
    "twice": (HEAD + "@hookimpl\ndef agentcompile_advisors():\n    return [Quiet(), Quiet()]",
              Cause.CONTRACT, "'twice/quiet' is offered twice"),
    "bad_name": (HEAD.replace('"quiet"', '"Quiet One"') + "@hookimpl\ndef agentcompile_advisors():\n    return [Quiet()]",
                 Cause.CONTRACT, "bad name 'Quiet One'"),
    "no_name": (HEAD.replace('    name = "quiet"\n', "") + "@hookimpl\ndef agentcompile_advisors():\n    return [Quiet()]",
                Cause.CONTRACT, "bad name None"),
    "number_name": (HEAD.replace('"quiet"', "7") + "@hookimpl\ndef agentcompile_advisors():\n    return [Quiet()]",
                    Cause.CONTRACT, "bad name 7"),
    "bad_version": (HEAD.replace('name = "quiet"', 'name = "quiet"; version = "2"') +
                    "@hookimpl\ndef agentcompile_advisors():\n    return [Quiet()]", Cause.CONTRACT, "bad version '2'"),
    "unknown_hook": ("from agentcompile_core.plugin.hookspecs import hookimpl\n@hookimpl\ndef agentcompile_advisers():\n    return []",
                     Cause.CONTRACT, "unknown hook 'agentcompile_advisers'; known: agentcompile_frontends"),
    "wrong_arguments": (HOOK + "@hookimpl\ndef agentcompile_advisors(model):\n    return []",
                        Cause.CONTRACT, "model"),
    "raises": ("from agentcompile_core.plugin.hookspecs import hookimpl\n@hookimpl\ndef agentcompile_advisors():\n    raise OSError('no')",
               Cause.EXCEPTION, "OSError: no"),
    "raises_late": (HOOK + "@hookimpl\ndef agentcompile_advisors():\n    yield from [1 / 0]",
                    Cause.EXCEPTION, "ZeroDivisionError"),
    "nothing": ("from agentcompile_core.plugin.hookspecs import hookimpl\n@hookimpl\ndef agentcompile_advisors():\n    return None",
                Cause.EXCEPTION, "None"),
    "too_new": ("AGENTCOMPILE_API = (1, 99)\n" + GOOD, Cause.API, "needs hook API (1, 99), this core has (1, 0); upgrade"),
    "odd_api": ("AGENTCOMPILE_API = '2'\n" + GOOD, Cause.API, "AGENTCOMPILE_API is '2'"),
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``install(name, text, ...)``: a fake installed distribution; only those, and the core, are seen."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not Path(p, "agentcompile_core.egg-info").exists())])
    for name in ("AGENTCOMPILE_PLUGINS", "AGENTCOMPILE_BLOCK_PLUGINS", "AGENTCOMPILE_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr("agentcompile_core.plugin.discovery.metadata.distributions", lambda: _distributions(tmp_path))

    def make(name: str, text: str = GOOD, *, group: str = hookspecs.GROUP, distribution: str = "", module: str = "") -> None:
        module = module or f"plugin_{name}_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(text)
        folder = tmp_path / f"{distribution or name}-1.2.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution or name}\nVersion: 1.2\n")
        with (folder / "entry_points.txt").open("a") as file:
            file.write(f"[{group}]\n{name} = {module}\n")

    return make


def _distributions(folder: Path):
    from importlib.metadata import MetadataPathFinder

    return MetadataPathFinder.find_distributions(MetadataPathFinder.Context(path=[str(folder)]))


def states(catalog) -> dict[str, str]:
    return {p.name: p.state for p in catalog.plugins if p.name not in CORE}


def test_an_installed_plugin_is_found_and_named(install) -> None:
    install("calm", distribution="acme-calm")
    catalog = load_catalog()
    (info,) = [p for p in catalog.plugins if p.name == "calm"]
    assert (info.distribution, info.state, info.offers, info.message) == ("acme-calm 1.2", "loaded", ("Advisor:quiet",), "")
    assert set(catalog.advisors) == {"core_advisors/heuristic", "calm/quiet"}
    assert catalog.find("agentcompile_advisors", "quiet") is catalog.find("agentcompile_advisors", "calm/quiet")
    assert {p.name for p in catalog.plugins} == CORE | {"calm"} and not catalog.failures


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_recorded_and_stops_nobody(install, name: str) -> None:
    text, cause, message = BROKEN[name]
    install("a_good_one")
    install(name, text)
    install("z_good_one")
    catalog = load_catalog(strict=False)
    (failure,) = catalog.failures
    assert (failure.stage, failure.cause, failure.plugin, failure.distribution) == (StageName.LOAD, cause, name, f"{name} 1.2")
    assert message in failure.message
    (info,) = [p for p in catalog.plugins if p.name == name]
    assert message in info.message
    kept = {"twice/quiet"} if name == "twice" else set()
    assert set(catalog.advisors) == {"core_advisors/heuristic", "a_good_one/quiet", "z_good_one/quiet"} | kept
    assert states(catalog)["a_good_one"] == states(catalog)["z_good_one"] == "loaded"
    assert info.state == "failed" or name == "twice"


@pytest.mark.parametrize("name", BROKEN)
def test_strict_raises_what_a_run_would_survive(install, name: str) -> None:
    install(name, BROKEN[name][0])
    with pytest.raises((Exception, SystemExit)) as caught:
        load_catalog(strict=True)
    assert BROKEN[name][2].split(": ")[-1] in f"{type(caught.value).__name__}: {caught.value}"


def test_strict_by_the_environment(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("broken_import", BROKEN["broken_import"][0])
    monkeypatch.setenv("AGENTCOMPILE_STRICT", "1")
    with pytest.raises(ModuleNotFoundError):
        load_catalog()


def test_two_plugins_with_one_name_are_both_named(install) -> None:
    install("calm", distribution="acme-one", module="one_module")
    install("calm", distribution="acme-two", module="two_module")
    catalog = load_catalog(strict=False)
    (failure,) = catalog.failures
    assert {failure.distribution.split()[0], *(w.strip(",;") for w in failure.message.split())} >= {"acme-one", "acme-two"}
    assert [p.state for p in catalog.plugins if p.name == "calm"] == ["loaded", "failed"]
    assert set(catalog.advisors) == {"core_advisors/heuristic", "calm/quiet"}


def test_a_plugin_cannot_take_the_name_of_one_of_the_cores(install) -> None:
    install("core_advisors")
    catalog = load_catalog(strict=False)
    assert "two plugins are called 'core_advisors'" in catalog.failures[0].message
    assert set(catalog.advisors) == {"core_advisors/heuristic"}


def test_one_short_name_of_two_plugins_must_be_written_in_full(install) -> None:
    install("calm")
    install("calmer")
    catalog = load_catalog()
    with pytest.raises(UsageError, match="offered by several plugins: calm/quiet, calmer/quiet; name one of them in full"):
        catalog.find("agentcompile_advisors", "quiet")
    assert catalog.find("agentcompile_advisors", "calmer/quiet").name == "quiet"
    with pytest.raises(UsageError, match="unknown advisor 'gpt'; installed: heuristic, quiet"):
        catalog.find("agentcompile_advisors", "gpt")


def test_another_generation_is_listed_and_never_imported(install, tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    for group in ("agentcompile.v0", "agentcompile.v2"):
        install(group.replace(".", "_"), f"open({str(marker)!r}, 'w')", group=group)
    catalog = load_catalog(strict=True)
    assert states(catalog) == {"agentcompile_v0": "other generation", "agentcompile_v2": "other generation"}
    messages = {p.name: p.message for p in catalog.plugins}
    assert messages["agentcompile_v0"] == "built for hook API 0, this core speaks 1; upgrade agentcompile_v0 1.2"
    assert messages["agentcompile_v2"] == "built for hook API 2, this core speaks 1; upgrade agentcompile-core"
    assert not marker.exists()


def test_only_and_block(install, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "three"):
        install(name)
    assert states(load_catalog(block=("two",))) == {"one": "loaded", "two": "blocked", "three": "loaded"}
    assert states(load_catalog(only=("two",))) == {"one": "blocked", "two": "loaded", "three": "blocked"}
    monkeypatch.setenv("AGENTCOMPILE_PLUGINS", "one, two")
    assert states(load_catalog()) == {"one": "loaded", "two": "loaded", "three": "blocked"}
    monkeypatch.setenv("AGENTCOMPILE_BLOCK_PLUGINS", "one")
    assert states(load_catalog()) == {"one": "blocked", "two": "loaded", "three": "blocked"}
    monkeypatch.setenv("AGENTCOMPILE_PLUGINS", "")
    assert set(states(load_catalog()).values()) == {"blocked"}
    assert "core_advisors/heuristic" in load_catalog().advisors  # the core's own are always there


def test_a_blocked_plugin_is_not_imported(install, tmp_path: Path) -> None:
    marker = tmp_path / "imported"
    install("blocked", f"open({str(marker)!r}, 'w')")
    load_catalog(block=("blocked",))
    assert not marker.exists()
    load_catalog()
    assert marker.exists()


def plugin(**hooks) -> ModuleType:
    module = ModuleType("a_plugin")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    return module


class Quiet(Advisor):
    name = "quiet"

    def advise(self, question):
        raise NotImplementedError


def test_plugins_given_by_the_caller(install) -> None:
    catalog = load_catalog(extra=(("mine", plugin(agentcompile_advisors=lambda: (Quiet() for _ in range(1)))),))
    assert isinstance(catalog.advisors["mine/quiet"], Quiet)


def test_events_reach_every_listener_and_none_can_stop_the_run(install) -> None:
    heard: list[object] = []

    def bad(failure) -> None:
        raise RuntimeError("this listener is broken")

    def exits() -> None:
        raise SystemExit(1)

    def good(failure) -> None:
        heard.append(failure)

    catalog = load_catalog(strict=False, extra=(
        ("first", plugin(agentcompile_failed=good)), ("broken", plugin(agentcompile_failed=bad)),
        ("exits", plugin(agentcompile_failed=exits)), ("last", plugin(agentcompile_failed=good))))
    failure = Failure(stage=StageName.PLAN, cause=Cause.EXCEPTION, plugin="x", subject="y", message="z")
    catalog.fail(failure)
    assert heard == [failure, failure]
    kept, *of_listeners = catalog.failures
    assert kept == failure and {(f.stage, f.plugin) for f in of_listeners} == {(StageName.EVENTS, "broken"), (StageName.EVENTS, "exits")}


def test_guard_records_and_returns_nothing_or_raises_when_strict(install) -> None:
    def call() -> int:
        raise ValueError("a secret of the plugin")

    catalog = load_catalog(strict=False)
    common = {"stage": StageName.PLAN, "plugin": "p", "subject": "s"}
    assert catalog.guard(lambda: 7, **common) == 7 and catalog.guard(call, **common) is None
    assert catalog.failures[0].message == "ValueError: a secret of the plugin" and "in call" in catalog.failures[0].traceback
    strict = load_catalog(strict=True)
    with pytest.raises(ValueError, match="a secret"):
        strict.guard(call, **common)
    with pytest.raises(AgentCompileError, match=r"\[plan/exception\] p on s: z"):
        strict.fail(Failure(stage=StageName.PLAN, cause=Cause.EXCEPTION, plugin="p", subject="s", message="z"))


def test_the_installed_distributions_load_without_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGENTCOMPILE_PLUGINS", "AGENTCOMPILE_BLOCK_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    catalog = load_catalog(strict=True)
    assert {p.state for p in catalog.plugins} <= {"loaded", "other generation"}
    assert isinstance(catalog.find("agentcompile_advisors", "heuristic"), Advisor)


def test_metadata_that_cannot_be_read_stops_nobody(install, monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaged:
        name, version = "damaged", "0"

        @property
        def entry_points(self):
            raise OSError("unreadable entry_points.txt")

    good = SimpleNamespace(name="good", version="1", entry_points=())
    monkeypatch.setattr("agentcompile_core.plugin.discovery.metadata.distributions", lambda: iter((Damaged(), good)))
    catalog = load_catalog(strict=True)
    (info,) = [p for p in catalog.plugins if p.name not in CORE]
    assert info.state == "unreadable" and "unreadable entry_points.txt" in info.message


def test_a_name_that_was_asked_for_and_is_not_there_is_listed(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("calm")
    monkeypatch.setenv("AGENTCOMPILE_PLUGINS", "clam")
    assert states(load_catalog()) == {"calm": "blocked", "clam": "not installed"}


def test_a_slash_in_a_name_is_refused(install) -> None:
    install("core_advisors/heuristic", distribution="acme", module="slashed")
    catalog = load_catalog(strict=False)
    assert "must not hold a slash" in catalog.failures[0].message and len(catalog.advisors) == 1
