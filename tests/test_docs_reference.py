"""docs/reference.md is what scripts/write_reference.py writes, names everything that plugins import, and the site has every page."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from agentcompile_core import plugin_api

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "reference.md").read_text()


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    assert script("write_reference").page() == TEXT, "run `make reference`"


def test_every_name_has_an_entry_with_words_of_its_own() -> None:
    entries = dict(re.findall(r"^### `(\w+)`[^\n]*\n\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S))
    assert set(entries) == set(plugin_api.__all__)
    assert [name for name, text in entries.items() if len(text.strip()) < 3] == []


@pytest.mark.parametrize("name", ["Graph", "Node", "Match", "Operand", "Trial", "Case", "Verdict", "Launch", "Evidence", "Question"])
def test_fields_that_a_plugin_meets_are_there(name: str) -> None:
    entry = TEXT[TEXT.index(f"### `{name}`"):].split("\n### ")[0]
    assert [field.name for field in getattr(plugin_api, name).__attrs_attrs__
            if not field.name.startswith("_") and f"- `{field.name}:" not in entry] == []


def test_units_and_properties_are_said() -> None:
    for said in ("- `spread_us: float`: half the distance", "- `by_name: dict[str, Value]` (property): Values by name.",
                 "- `grid: tuple[int, int, int]`: blocks", "### `CALLABLE`\n\n`'callable'`: language of a step"):
        assert said in TEXT, said


def test_the_site_has_every_page_of_the_documentation() -> None:
    shown = set(re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    assert shown == {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}


def test_links_out_of_the_documentation_become_text() -> None:
    hook, page = script("docs_links"), type("Page", (), {"file": type("File", (), {"src_uri": "decisions/0001.md"})})
    text = "[a](../flow.md), [b](../../README.md)\n\n```\n[c](../../x)\n```\n"
    assert hook.on_page_markdown(text, page) == "[a](../flow.md), b (`README.md` in the repository)\n\n```\n[c](../../x)\n```\n"


def test_the_readme_lists_models_as_they_are_tested() -> None:
    tested = (ROOT / "tests" / "test_capture_models.py").read_text()
    tables = (tested.split(f"{name} = {{")[1].split("\n}")[0] for name in ("CAPTURED", "REFUSED"))
    captured, refused = (set(re.findall(r'^    "(\w+)": ', table, re.M)) for table in tables)
    lines = (ROOT / "README.md").read_text().split("<!-- results: supported")[1].splitlines()
    compiled, framework = (set(re.findall(r"`(\w+)`", next(line for line in lines if line.startswith(start))))
                           for start in ("| compiled", "| HuggingFace's own loop"))
    assert len(captured) > 9 and len(refused) > 2 and captured <= compiled and refused <= framework


def test_the_extra_names_every_distribution_that_compiles_for_a_gpu() -> None:
    ours = {re.search(r'^name = "(.+)"', path.read_text(), re.M)[1] for path in ROOT.glob("plugins/*/*/pyproject.toml")}
    extra = (ROOT / "pyproject.toml").read_text().split("\ncuda = [")[1].split("\n]")[0]
    assert set(re.findall(r'"([\w-]+)>=', extra)) == {name for name in ours if "advisor" not in name}
