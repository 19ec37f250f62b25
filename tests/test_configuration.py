"""Configuration: which source wins, what each source may set, and what the refusals say."""

import re
import typing
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.configuration import CacheLimits, Config, resolve
from agentcompile_core.configuration.values import CACHE_NAMES, NAMES, said
from agentcompile_core.errors import UsageError

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "advisor": st.sampled_from(["heuristic", "litellm", "replay"]), "budget_plans": st.integers(1, 999), "rounds": st.integers(1, 9),
    "budget_s": st.floats(1, 999, allow_nan=False), "validators": st.lists(st.sampled_from(["numerics", "emulation"]), max_size=2),
    "seed": st.integers(-9, 9),
}
LAYER = st.fixed_dictionaries({}, optional=VALUES)


def toml(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {value!r}\n".replace("'", '"') for key, value in values.items())


def written(tmp_path: Any, user: str = "", project: str = "") -> dict[str, Any]:
    (tmp_path / "project").mkdir(exist_ok=True)
    (tmp_path / "user.toml").write_text(user)
    (tmp_path / "project" / "agentcompile.toml").write_text(project)
    return {"folder": tmp_path / "project", "environ": {"AGENTCOMPILE_CONFIG": str(tmp_path / "user.toml")}}


def variables(values: dict[str, Any]) -> dict[str, str]:
    return {f"AGENTCOMPILE_{key.upper()}": ",".join(value) if isinstance(value, list) else str(value) for key, value in values.items()}


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(LAYER, LAYER, LAYER, LAYER)
def test_a_stronger_source_wins_and_every_value_knows_its_source(tmp_path_factory, user, project, environment, flags):
    sources = written(tmp_path_factory.mktemp("layers"), toml(user), toml(project))
    found = resolve(flags, folder=sources["folder"], environ={**sources["environ"], **variables(environment)})
    for key in VALUES:
        layers = [(flags, "argument"), (environment, f"AGENTCOMPILE_{key.upper()}"), (project, "agentcompile.toml"), (user, "user.toml")]
        value, origin = next(((layer[key], name) for layer, name in layers if key in layer), (getattr(Config(), key), "default"))
        assert getattr(found.config, key) == (tuple(value) if isinstance(value, list) else value)
        assert found.origin(key).endswith(origin)


@pytest.mark.parametrize(("text", "says"), [
    ('advisr = "litellm"', "did you mean advisor"),
    ("advisor = 3", "expected a text"),
    ("rounds = 2.5", "expected a whole number"),
    ('validators = "numerics"', "expected a list, each a text"),
    ("budget_s = true", "expected a number"),
    ("advisor = ", "not valid TOML"),
    ('plugin = "litellm"', "[plugin.NAME]"),
])
def test_what_cannot_be_set_is_one_sentence(tmp_path, text, says):
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        resolve(**written(tmp_path, project=text))
    assert "agentcompile.toml" in str(caught.value)


def test_the_users_own_mistakes_are_named_with_what_was_meant(tmp_path):
    with pytest.raises(UsageError, match=r"user\.toml sets 'cache\.foldr'.*did you mean cache\.folder"):
        resolve(**written(tmp_path, user="[cache]\nfoldr = 1"))


@pytest.mark.parametrize("name", ["api_key", "key", "token", "openai_api_key", "secret", "password", "authorization", "credentials"])
@pytest.mark.parametrize("section", ["", "[plugin.litellm]\n"])
@pytest.mark.parametrize("whose", ["user", "project"])
def test_keys_stand_in_no_file(tmp_path, name, section, whose):
    with pytest.raises(UsageError, match="environment variable") as caught:
        resolve(**written(tmp_path, **{whose: f'{section}{name} = "sk-canary"'}))
    assert "sk-canary" not in str(caught.value)


@pytest.mark.parametrize("text", [
    '[cache]\nfolder = "elsewhere"', "[cache]\nmax_bytes = 1", '[plugin.litellm]\napi_base = "http://example"',
    '[plugin.litellm]\nbase_url = "http://example"', "trust_kernels = true", "[trust]\nkernels = true", '[plugin.x]\nproxy = "http://p"',
])
def test_a_project_may_not_redirect_requests_move_the_cache_or_trust(tmp_path, text):
    with pytest.raises(UsageError, match="only your own file"):
        resolve(**written(tmp_path, project=text))


def test_the_user_may_set_what_a_project_may_not(tmp_path):
    text = '[cache]\nfolder = "here"\n[plugin.litellm]\napi_base = "http://127.0.0.1"\n'
    config = resolve(**written(tmp_path, user=text)).config
    assert (config.cache.folder, config.settings("litellm")) == (str(tmp_path / "here"), {"api_base": "http://127.0.0.1"})


def test_sections_of_plugins_are_laid_over_each_other_setting_by_setting(tmp_path):
    sources = written(tmp_path, user='[plugin.litellm]\nmodel = "a/b"\ntimeout_s = 5\n', project='[plugin.litellm]\nmodel = "c/d"\n')
    sources["environ"]["AGENTCOMPILE_LITELLM__TIMEOUT_S"] = "7"
    found = resolve(**sources)
    assert found.config.settings("litellm") == {"model": "c/d", "timeout_s": "7"}
    assert found.origin("plugin.litellm.timeout_s") == "AGENTCOMPILE_LITELLM__TIMEOUT_S"


def test_a_project_is_found_from_inside_it_and_not_beyond_its_root(tmp_path):
    (tmp_path / "agentcompile.toml").write_text('advisor = "outside"')
    inner = tmp_path / "checkout" / "deep" / "er"
    inner.mkdir(parents=True)
    (tmp_path / "checkout" / ".git").mkdir()
    environ = {"AGENTCOMPILE_CONFIG": ""}
    assert resolve(folder=inner, environ=environ).config.advisor == "heuristic"
    (tmp_path / "checkout" / "pyproject.toml").write_text('[tool.agentcompile]\nadvisor = "replay"\nmodule = "model.py"\n')
    assert resolve(folder=inner, environ=environ).config.advisor == "replay"
    (tmp_path / "checkout" / "deep" / "agentcompile.toml").write_text('advisor = "random"')
    assert resolve(folder=inner, environ=environ).config.advisor == "random"


def test_a_pyproject_of_another_tool_says_nothing(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.other]\nadvisor = "x"\n[tool]\n')
    assert resolve(folder=tmp_path, environ={"AGENTCOMPILE_CONFIG": ""}).origins == ()


def test_a_file_that_was_named_and_is_missing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="AGENTCOMPILE_CONFIG names"):
        resolve(folder=tmp_path, environ={"AGENTCOMPILE_CONFIG": str(tmp_path / "no.toml")})


@pytest.mark.parametrize(("variable", "text"), [("AGENTCOMPILE_ROUNDS", "many"), ("AGENTCOMPILE_BUDGET_S", "soon")])
def test_an_environment_variable_of_the_wrong_kind_is_refused(tmp_path, variable, text):
    with pytest.raises(UsageError, match=f"{variable} is '{text}'"):
        resolve(folder=tmp_path, environ={"AGENTCOMPILE_CONFIG": "", variable: text})


def test_a_broken_pyproject_is_a_sentence(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.agentcompile\n")
    with pytest.raises(UsageError, match="not valid TOML"):
        resolve(folder=tmp_path, environ={"AGENTCOMPILE_CONFIG": ""})


def test_the_page_of_the_documentation_lists_every_key_with_its_type_and_default():
    def shown(value: Any) -> str:
        if isinstance(value, tuple):
            return "[" + ", ".join(f'"{item}"' for item in value) + "]"
        return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)

    wanted = []
    for cls, prefix in ((Config, ""), (CacheLimits, "cache.")):
        hints = typing.get_type_hints(cls)
        for one in attrs.fields(cls):
            if "doc" in one.metadata:
                wanted.append(f"| `{prefix}{one.name}` | {said(hints[one.name])} | `{shown(one.default)}` | {one.metadata['doc']} |")
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| `")] == wanted
    assert {*NAMES, *(f"cache.{name}" for name in CACHE_NAMES)} == {line.split("`")[1] for line in wanted}
