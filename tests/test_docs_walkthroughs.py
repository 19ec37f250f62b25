"""The walk-throughs show the files of their examples as they are, name only what exists, and import from the plugin's own modules."""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

from agentcompile_core import plugin_api
from agentcompile_core.configuration import Config
from agentcompile_core.plugin import interfaces
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.settings import configured
from agentcompile_core.testing.advisor_conformance import AdvisorConformance

ROOT = Path(__file__).parent.parent
PAGES = {
    "writing_a_rule.md": "rule_plugin", "writing_a_validator.md": "validator_plugin", "writing_an_advisor.md": "advisor_plugin",
    "writing_an_implementation.md": "implementation_plugin", "writing_a_plugin.md": "plugin", "writing_a_target.md": "hardware_plugin",
}
MAY_IMPORT = ("agentcompile_core.plugin_api", "agentcompile_core.testing", "agentcompile_cuda_kit",
              "agentcompile_rules_transformers.testing")


def shown(page: str) -> dict[str, str]:
    """Files by path, as the page shows them."""
    text = (ROOT / "docs" / page).read_text()
    return dict(re.findall(r"^`(examples/[\w./]+)`:\n\n```\w+\n(.*?)^```$", text, re.M | re.S))


@pytest.mark.parametrize("page", PAGES)
def test_the_files_of_the_example_are_shown_as_they_are(page: str) -> None:
    blocks = shown(page)
    python = {str(path.relative_to(ROOT)) for path in (ROOT / "examples" / PAGES[page]).rglob("*.py") if path.name != "conftest.py"}
    assert {name for name in blocks if name.endswith(".py")} == python
    for name, block in blocks.items():
        assert block == (ROOT / name).read_text(), f"{name} differs from docs/{page}; copy it there"
        assert len(block.splitlines()) < 110


@pytest.mark.parametrize("page", PAGES)
def test_examples_import_from_the_modules_that_are_promised(page: str) -> None:
    for name, block in shown(page).items():
        if name.endswith(".py"):
            imports = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
            ours = [node for node in imports if "agentcompile" in (node.module or "")]
            modules = [f"{node.module}.{alias.name}" for node in ours for alias in node.names]
            assert [module for module in modules if not module.startswith(MAY_IMPORT)] == []
            taken = {alias.name for node in ours if node.module == "agentcompile_core.plugin_api" for alias in node.names}
            assert taken <= set(plugin_api.__all__)


@pytest.mark.parametrize("page", PAGES)
def test_the_plugin_offers_what_the_page_says_that_the_listing_shows(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / page).read_text()
    (name, offers), = re.findall(r"^    agentcompile plugins +# (\w+), loaded, offers (.*)$", text, re.M)
    monkeypatch.syspath_prepend(str(ROOT / "examples" / PAGES[page]))
    catalog = load_catalog(only=(), strict=True, extra=[(name, importlib.import_module(name))])
    (found,) = [plugin for plugin in catalog.plugins if plugin.name == name]
    assert sorted(found.offers) == sorted(offers.split(", "))
    project = tomllib.loads((ROOT / "examples" / PAGES[page] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["agentcompile.v1"] == {name: name} and project["tool"]["setuptools"]["packages"] == [name]


def test_the_settings_of_the_advisor_are_those_of_the_page() -> None:
    text = (ROOT / "docs" / "writing_an_advisor.md").read_text()
    (line,) = re.findall(r"^    \[plugin\.(\w+)\]\n    (\w+) = (\d+)$", text, re.M)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "advisor_plugin"))
        catalog = load_catalog(only=(), strict=True, extra=[("acme_measured", importlib.import_module("acme_measured"))])
    config = Config(plugins={line[0]: {line[1]: int(line[2])}})
    (advisor,) = [a for a in configured(catalog, config)[0].advisors.values() if a.name == "measured"]
    assert getattr(advisor.settings, line[1]) == int(line[2]) != getattr(type(advisor.settings)(), line[1])


def test_the_calls_of_a_trial_run_are_all_explained() -> None:
    text = (ROOT / "docs" / "writing_a_validator.md").read_text()
    calls = [name for name in vars(interfaces.TrialRun) if not name.startswith("_")] + list(interfaces.TrialRun.__annotations__)
    assert [name for name in calls if f"`run.{name}" not in text] == []
    asked = [name for name in vars(interfaces.Validator) if not name.startswith("_")]
    assert [name for name in asked if f"`{name}" not in text] == []


def test_every_part_of_an_advice_and_every_rule_is_explained() -> None:
    text = (ROOT / "docs" / "writing_an_advisor.md").read_text()
    parts = {field.name for field in plugin_api.Advice.__attrs_attrs__} - {"refused", "tokens"}
    assert [name for name in sorted(parts) if f"`{name}`" not in text] == []
    source = (ROOT / "agentcompile_core" / "stages" / "advise" / "advice_check.py").read_text()
    assert [rule for rule in sorted(set(re.findall(r'"(A\d)"', source))) if rule not in text] == []
    assert len(AdvisorConformance.questions) > 1
