"""Settings of plugins: strictly read, from the right source, in the worker too, for one run only, and part of the keys of results."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.api import arguments
from agentcompile_core.configuration import Config, resolve
from agentcompile_core.errors import UsageError
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.plugin import settings as plugin_settings
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.hookspecs import hookimpl
from agentcompile_core.store import keys
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Job, Worker

STEP = Step(match_id="elementwise:add+1:add", implementation="doubles/fake_family", origin=Origin.GENERATED,
            schedule=Schedule({"behave": "honest"}))
PLUGIN = '''
from attrs import field, frozen
from agentcompile_core.plugin_api import Backend, Outcome, Validator, Verdict, hookimpl
from agentcompile_core.testing import doubles


@frozen
class Settings:
    words: tuple[str, ...] = ()
    limit: int = 3
    share: float = 0.5


class Saying(doubles.SimpleValidator):
    name = "saying"
    settings_class = Settings

    def controls(self, backend):
        return (doubles.fake_trial("honest", 1.0),), (doubles.fake_trial("honest", 2.0),)

    def check(self, trial, run):
        if trial.source.code.endswith("us=1.0"):
            return Verdict(validator=self.name, outcome=Outcome.PASS)
        return Verdict(validator=self.name, outcome=Outcome.FAIL, message=repr(self.settings))


@hookimpl
def agentcompile_backends():
    return [doubles.FakeBackend()]


@hookimpl
def agentcompile_region_rules():
    return [doubles.FakeRule()]


@hookimpl
def agentcompile_validators():
    return [Saying()]
'''


@frozen(kw_only=True)
class Options:
    """Settings of every type that is allowed."""

    model: str = ""
    count: int = 1
    share: float = 0.5
    on: bool = False
    words: tuple[str, ...] = ()
    file: Path | None = None
    where: str = field(default="", metadata={"user_only": True})
    named: str = field(default="", metadata={"variable": "ACME_NAMED"})


class Acme(doubles.SimpleValidator):
    """A validator with settings."""

    name = "acme_check"
    settings_class = Options


class Plain(doubles.SimpleValidator):
    """A validator without."""

    name = "plain"


class Plugin:
    """Offers both."""

    @hookimpl
    def agentcompile_validators(self) -> list[Any]:
        """The two validators."""
        return [Acme(), Plain()]


@pytest.fixture
def catalog() -> Catalog:
    return load_catalog(only=(), extra=[("acme", Plugin())])


def effective(catalog: Catalog, tmp_path: Path, *, user: str = "", project: str = "", environ: dict[str, str] | None = None, **flags: Any):
    """The prepared configuration of these sources, and the notes."""
    (tmp_path / "project").mkdir(exist_ok=True)
    (tmp_path / "user.toml").write_text(user)
    (tmp_path / "project" / "agentcompile.toml").write_text(project)
    environment = {"AGENTCOMPILE_CONFIG": str(tmp_path / "user.toml"), **(environ or {})}
    found = resolve(flags, folder=tmp_path / "project", environ=environment)
    return plugin_settings.prepared(found, catalog, environment)


def settings_of(catalog: Catalog, config: Config) -> Options:
    return plugin_settings.configured(catalog, config)[0].find("agentcompile_validators", "acme_check").settings


VALUES = st.fixed_dictionaries({}, optional={
    "model": st.text("abc/-", max_size=5), "count": st.integers(-9, 9), "share": st.floats(0, 1), "on": st.booleans(),
    "words": st.lists(st.sampled_from(["a", "bc"]), max_size=3)})


@settings(derandomize=True, deadline=None, max_examples=40, database=None)
@given(VALUES, VALUES, VALUES, st.sampled_from(["acme", "acme_check", "acme/acme_check"]))
def test_what_a_file_or_a_variable_says_arrives_by_type(tmp_path_factory, user, project, environment, section) -> None:
    catalog = load_catalog(only=(), extra=[("acme", Plugin())])
    texts = [f'[plugin."{name}"]\n' + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
             for name, values in (("acme_check", user), (section, project))]
    environment = {name: value for name, value in environment.items() if value not in ("", [])}
    variables = {f"AGENTCOMPILE_ACME__{k.upper()}": ",".join(v) if isinstance(v, list) else str(v) for k, v in environment.items()}
    found, notes = effective(catalog, tmp_path_factory.mktemp("s"), user=texts[0], project=texts[1], environ=variables)
    wanted = {**user, **project, **environment}
    assert settings_of(catalog, found.config) == Options(**{k: tuple(v) if isinstance(v, list) else v for k, v in wanted.items()})
    assert notes == ()
    there = plugin_settings.from_document(catalog, json.loads(json.dumps(plugin_settings.document(
        plugin_settings.configured(catalog, found.config)[0]))))
    assert there.find("agentcompile_validators", "acme_check").settings == settings_of(catalog, found.config)
    origins = {row.key.rpartition(".")[2]: row.origin for row in plugin_settings.rows(found, catalog)}
    for name in wanted:
        source = f"AGENTCOMPILE_ACME__{name.upper()}" if name in environment else "agentcompile.toml" if name in project else "user.toml"
        assert origins[name].endswith(source)


@pytest.mark.parametrize(("text", "says"), [
    ('[plugin.acme]\nmodl = "x"', "did you mean plugin.acme.model"),
    ("[plugin.acme]\nsomething_else = 1", "known: plugin.acme.count"),
    ('[plugin.acme]\ncount = "3"', "expected a whole number"),
    ("[plugin.acme]\nshare = true", "expected a number"),
    ('[plugin.acme_chek]\nmodel = "x"', "did you mean acme_check?"),
    ("[plugin.plain]\nx = 1", "plain takes no settings"),
    ("[plugin.heuristic]\nx = 1", "heuristic takes no settings"),
    ('[plugin.acme]\nwhere = "x"', "only your own file"),
    ('[plugin."acme/acme_check"]\nwhere = "x"', "only your own file"),
    ('[plugin.acme]\napi_key = "sk-canary"', "environment variable"),
    ('[[plugin.acme.words]]\napi_key = "sk-canary"', "environment variable"),
])
def test_a_projects_file_that_asks_for_what_is_not_there_is_refused(catalog, tmp_path, text, says) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        effective(catalog, tmp_path, project=text)
    assert "agentcompile.toml" in str(caught.value) and "sk-canary" not in str(caught.value)


def test_a_key_in_a_variable_is_refused_and_not_said(catalog, tmp_path) -> None:
    with pytest.raises(UsageError, match="AGENTCOMPILE_ACME__API_KEY") as caught:
        effective(catalog, tmp_path, environ={"AGENTCOMPILE_ACME__API_KEY": "sk-canary"})
    assert "sk-canary" not in str(caught.value)


def test_settings_of_what_is_not_installed_are_a_note(catalog, tmp_path) -> None:
    found, notes = effective(catalog, tmp_path, user="[plugin.somebody_elses]\nx = 1\n")
    assert len(notes) == 1 and "somebody_elses" in notes[0] and "user.toml" in notes[0]
    assert plugin_settings.configured(catalog, found.config)[1] == ()


def test_a_path_in_a_file_is_beside_it_and_a_variable_of_the_plugin_beats_files(catalog, tmp_path) -> None:
    found, _ = effective(catalog, tmp_path, project='[plugin.acme]\nfile = "a/b.json"\nnamed = "file"', environ={"ACME_NAMED": "variable"})
    options = settings_of(catalog, found.config)
    assert (options.file, options.named) == (tmp_path / "project" / "a" / "b.json", "variable")
    assert found.origin("plugin.acme/acme_check.named") == "ACME_NAMED"


def test_settings_of_one_run_are_those_of_no_other(catalog) -> None:
    shared = catalog.find("agentcompile_validators", "acme_check")
    one = plugin_settings.configured(catalog, Config(plugins={"acme": {"count": 7}}))[0]
    two = plugin_settings.configured(catalog, Config())[0]
    assert [c.find("agentcompile_validators", "acme_check").settings.count for c in (one, two, catalog)] == [7, 1, 1]
    assert shared.settings == Options() and two.find("agentcompile_validators", "acme_check") is shared


def test_settings_are_part_of_the_keys_of_results_and_defaults_are_not(catalog) -> None:
    def key(**values: Any) -> str:
        offer = plugin_settings.configured(catalog, Config(plugins={"acme": values}))[0].find("agentcompile_validators", "acme_check")
        return keys.environment(doubles.FakeBackend(), (("acme_check", 1, *plugin_settings.identity(offer)),))

    assert key() == key(count=1) == keys.environment(doubles.FakeBackend(), (("acme_check", 1),))
    assert len({key(), key(count=2), key(count=3), key(words=("a",))}) == 4


@pytest.mark.parametrize(("cls", "says"), [
    (frozen(type("Options", (), {"__annotations__": {"model": str}})), "need a default"),
    (frozen(type("Options", (), {"__annotations__": {"api_key": str}, "api_key": ""})), "keys are no settings"),
    (dict, "must be a frozen attrs class"),
])
def test_a_settings_class_that_cannot_be_is_refused_when_the_plugin_is_loaded(cls, says) -> None:
    offer = type("Wrong", (doubles.SimpleValidator,), {"name": "wrong", "settings_class": cls})
    plugin = type("P", (), {"agentcompile_validators": hookimpl(lambda self: [offer()])})()
    loaded = load_catalog(only=(), strict=False, extra=[("wrong", plugin)])
    assert [says in f.message for f in loaded.failures] == [True] and "wrong/wrong" not in loaded.validators


def test_in_python_files_are_read_without_config_and_not_with_it(catalog, tmp_path, monkeypatch) -> None:
    (tmp_path / "agentcompile.toml").write_text("budget_plans = 7\n[plugin.acme]\ncount = 5\n")
    monkeypatch.chdir(tmp_path)
    read, _ = arguments.chosen(None, {"rounds": 3, "plugins": {"acme": {"share": 1}}}, catalog)
    assert (read.budget_plans, read.rounds, settings_of(catalog, read)) == (7, 3, Options(count=5, share=1.0))
    given, _ = arguments.chosen(Config(), {"rounds": 3}, catalog)
    assert given == Config(rounds=3)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution ``saying`` that this process and its children find."""
    site = tmp_path / "site"
    (site / "saying-1.dist-info").mkdir(parents=True)
    (site / "saying.py").write_text(PLUGIN)
    (site / "saying-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: saying\nVersion: 1\n")
    (site / "saying-1.dist-info" / "entry_points.txt").write_text("[agentcompile.v1]\nsaying = saying\n")
    monkeypatch.setenv("AGENTCOMPILE_PLUGINS", "saying")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop("saying", None)


def test_a_validator_sees_its_settings_inside_the_worker(installed: Path, monkeypatch) -> None:
    (installed / "agentcompile.toml").write_text('[plugin.saying]\nwords = ["x", "y z"]\nlimit = 8\n')
    monkeypatch.chdir(installed)
    catalog = load_catalog()
    config, _ = arguments.chosen(None, {}, catalog)
    document = plugin_settings.document(plugin_settings.configured(catalog, config)[0])
    with Worker(settings=document, builders=1) as worker:
        ((_, found),) = worker.evaluate([Job(trial=doubles.fake_trial("honest"), step=STEP, backend="fake", validators=("saying",))])
    assert found.verdicts[0].message == "Settings(words=('x', 'y z'), limit=8, share=0.5)"


def test_the_command_line_shows_settings_with_their_origin(installed: Path, cli, monkeypatch) -> None:
    project = installed / "agentcompile.toml"
    project.write_text('rounds = 5\n[plugin.saying]\nlimit = 8\n')
    monkeypatch.chdir(installed)
    monkeypatch.setenv("AGENTCOMPILE_SAYING__SHARE", "0.25")
    code, out, err = cli("config", "--json")
    assert (code, err) == (0, "")
    found = {row["key"]: (row["value"], row["origin"]) for row in json.loads(out)["values"]}
    assert found["rounds"] == (5, str(project)) and found["plugin.saying.limit"] == (8, str(project))
    assert found["plugin.saying.share"] == (0.25, "AGENTCOMPILE_SAYING__SHARE") and found["plugin.saying.words"] == ([], "default")
    assert re.search(r"plugin\.saying\.limit +8 +\S+agentcompile\.toml", cli("config")[1])
    assert cli("config", "--path")[1] == f"project: {project}\n"
    assert f"default:5,from{project}" in re.sub(r"\s+", "", cli("compile", "--help")[1])


@pytest.mark.parametrize(("text", "says"), [
    ("rounds = ", "not valid TOML"), ('[plugin.saying]\nlimt = 1', "did you mean plugin.saying.limit"),
    ('api_key = "sk-canary"', "environment variable"), ('[cache]\nfolder = "x"', "only your own file"),
    ("trust_kernels = true", "only your own"),
    ("rounds = 0", "must be positive"), ('origins = ["mine"]', "unknown origin 'mine'"), ('advisor = "oracle"', "unknown advisor 'oracle'"),
])
def test_the_command_line_refuses_a_broken_file_in_one_sentence(installed: Path, cli, monkeypatch, text: str, says: str) -> None:
    (installed / "agentcompile.toml").write_text(text)
    monkeypatch.chdir(installed)
    for command in (("config",), ("compile", "nothing")):
        code, out, err = cli(*command)
        if (command, text) == (("config",), 'advisor = "oracle"'):
            continue  # it is shown, so that it can be found
        assert (code, out) == (2, "") and says in err and "agentcompile.toml" in err and "sk-canary" not in err
