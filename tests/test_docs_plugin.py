"""docs/writing_a_plugin.md shows the files of examples/plugin as they are, and names only what exists."""

import re
from pathlib import Path

from agentcompile_rules_transformers import testing as cases

from agentcompile_core.ir import kind_names
from agentcompile_core.plugin import hookspecs

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "writing_a_plugin.md").read_text()
BLOCKS = dict(re.findall(r"^`(examples/plugin/[\w./]+)`:\n\n```\w+\n(.*?)^```$", TEXT, re.M | re.S))
SHOWN = {"examples/plugin/pyproject.toml", "examples/plugin/acme_gather/__init__.py", "examples/plugin/acme_gather/gather.cu",
         "examples/plugin/tests/test_acme_gather.py"}


def test_every_file_of_the_example_is_shown_as_it_is() -> None:
    assert set(BLOCKS) == SHOWN and TEXT.count("```") == 2 * len(SHOWN)
    for name, block in BLOCKS.items():
        assert block == (ROOT / name).read_text(), f"{name} differs from docs/writing_a_plugin.md; copy it there"


def test_the_example_is_as_small_as_promised() -> None:
    assert len(BLOCKS["examples/plugin/acme_gather/__init__.py"].splitlines()) < 80
    assert len(BLOCKS["examples/plugin/tests/test_acme_gather.py"].splitlines()) <= 15


def test_what_the_page_names_exists() -> None:
    named = set(re.findall(r"`(\w+_case)`", TEXT))
    assert named == {name for name in vars(cases) if name.endswith("_case")}
    assert f"`{hookspecs.GROUP}`" in TEXT and "`gather`" in TEXT and kind_names.GATHER == "gather"
    for link in re.findall(r"\]\(([\w./]+)\)", TEXT):
        assert (ROOT / "docs" / link).exists(), link
    for path in re.findall(r"`((?:agentcompile_core|examples)/[\w./]+)`", TEXT):
        assert (ROOT / path).exists(), path
