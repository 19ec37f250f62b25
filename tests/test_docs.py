"""Documentation that can be wrong: links, the commands it shows, and the Python it shows."""

import re
import shlex
from functools import partial
from pathlib import Path

import pytest

import agentcompile_core
from agentcompile_core import api
from agentcompile_core.cli import _parser
from agentcompile_core.cli.parser import COMMANDS
from agentcompile_core.configuration import Config
from agentcompile_core.store import Store

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/*/README.md"), *ROOT.glob("examples/**/README.md")])


def identifier(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.S | re.M)  # code has brackets of its own
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_commands_that_are_shown_can_be_given(page: Path) -> None:
    text = page.read_text()
    shown = re.findall(r"^(?:\$ |    )(?:[A-Z_]+=\S+ )*(agentcompile [^#`\n]*[^#`\s])", text, re.MULTILINE)
    shown += re.findall(r"`(agentcompile [a-z][^`\n]*)`", text)
    for command in shown:
        words = shlex.split(command)[1:]
        if words != ["generate"] and len(words) > 1:
            _parser().parse_args(words)  # exits where it cannot
        else:
            assert words[0] in COMMANDS, command


def test_the_python_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code) == 1
    quick = Config(budget_s=0.01, budget_plans=1, rounds=1)
    monkeypatch.setattr(agentcompile_core, "compile", partial(api.compile, config=quick, store=Store(None), device="cpu", max_context=128))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile(code[0], "README.md", "exec"), {})  # the repository's own text
    assert capsys.readouterr().out.startswith("When an exception")
    assert (tmp_path / "tiny.bundle" / "manifest.json").is_file()


def test_the_map_names_every_page() -> None:
    text = (ROOT / "docs" / "README.md").read_text()
    pages = {p.name for p in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert [name for name in sorted(pages) if f"]({name})" not in text] == []
    decisions = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert [p.name for p in (ROOT / "docs" / "decisions").glob("0*.md") if f"]({p.name})" not in decisions] == []
