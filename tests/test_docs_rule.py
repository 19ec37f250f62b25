"""docs/writing_a_rule.md shows the files of examples/rule_plugin as they are, and says all that a kind is asked."""

import inspect
import re
from pathlib import Path

from agentcompile_core import plugin_api
from agentcompile_core.plugin.match_kind import MatchKind

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "writing_a_rule.md").read_text()
BLOCKS = dict(re.findall(r"^`(examples/rule_plugin/[\w./]+)`:\n\n```\w+\n(.*?)^```$", TEXT, re.M | re.S))


def test_every_file_of_the_example_is_shown_as_it_is() -> None:
    folder = ROOT / "examples" / "rule_plugin"
    assert set(BLOCKS) == {f"examples/rule_plugin/{name}" for name in ("acme_cumulative/__init__.py", "tests/test_acme_cumulative.py")}
    for name, block in BLOCKS.items():
        assert block == (ROOT / name).read_text(), f"{name} differs from docs/writing_a_rule.md; copy it there"
    assert len(BLOCKS["examples/rule_plugin/acme_cumulative/__init__.py"].splitlines()) < 100 and (folder / "pyproject.toml").exists()


def test_everything_that_a_kind_may_override_is_named() -> None:
    asked = [name for name, member in vars(MatchKind).items() if inspect.isfunction(member) and not name.startswith("_")]
    assert [name for name in asked if f"`{name}`" not in TEXT and name not in ("operand", "attribute")] == []


def test_a_plugin_imports_from_one_module_only() -> None:
    code = BLOCKS["examples/rule_plugin/acme_cumulative/__init__.py"]
    assert set(re.findall(r"^from (agentcompile_core[\w.]*)", code, re.M)) == {"agentcompile_core.plugin_api"}
    names = re.search(r"from agentcompile_core.plugin_api import \((.*?)\)", code, re.S).group(1)
    assert set(re.findall(r"\w+", names)) <= set(plugin_api.__all__)
