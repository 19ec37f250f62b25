"""Write docs/reference.md: every name of ``agentcompile_core.plugin_api`` with its docstring, fields and methods.

``python scripts/write_reference.py --check`` says whether the page is up to date and changes nothing (a test does that too).
"""

import argparse
import ast
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from agentcompile_core import plugin_api

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
HEAD = """# Reference: what plugins import

Written by `make reference` from the docstrings of `agentcompile_core.plugin_api`; do not edit. A name listed here stays
importable from there for as long as the hook API is `agentcompile.v{generation}`. Units are in the names (`_us`, `_bytes`, `_s`).
"""
# In the order in which the author of a plugin meets them; a module that is missing here comes at the end.
SECTIONS = {
    "Hooks": "plugin.hookspecs", "What a plugin offers": "plugin.interfaces", "Match kinds": "plugin.match_kind ir.kind_names",
    "The graph": "ir.graph", "Matches and operands": "ir.region",
    "Looking around in a graph": "ops.region_view ops.operator_names ops.schema ops.growth ops.grammar",
    "Pointwise expressions": "ir.expression codegen.printing",
    "Schedules and spaces": "ir.plan", "Targets": "ir.target", "Sources, launches, kernels": "ir.candidate ir.source_check codegen.naming",
    "Trials, cases, verdicts": "ir.verdict", "References and error budgets": "ops.reference",
    "Measurements and records": "ir.record ir.baseline",
    "Advice": "ir.advice plugin.advice_json", "Programs that run": "plugin.running runtime.program runtime.graph_capture",
    "Processes and folders": "processes.environment processes.toolchain store", "Errors and refusals": "errors",
}
LATER = {"Events": "plugin.events"}  # for listeners only
REST = "Other names"
SHOWN = 110  # characters of a value that the page shows
START = 4  # lines of an entry before its list


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD.format(generation=plugin_api.API[0])]
    grouped = {module for modules in (*SECTIONS.values(), *LATER.values()) for module in modules.split()}
    rest = " ".join(module for module in plugin_api._NAMES if module not in grouped)
    for title, modules in (SECTIONS | {REST: rest} | LATER).items():
        entries = [_entry(name, module) for module in modules.split() for name in plugin_api._NAMES.get(module, "").split()]
        parts += [f"## {title}\n", *entries] if entries else []
    parts.append("## Modules\n")
    for name in plugin_api._MODULES:
        parts.append(f"### `{name}`\n\n{_doc(getattr(plugin_api, name))}\n")
    return "\n".join(parts).rstrip() + "\n"


def _entry(name: str, module: str) -> str:
    what = getattr(plugin_api, name)
    if inspect.isclass(what) and issubclass(what, enum.Enum):
        return _enum(name, what)
    if inspect.isclass(what):
        return _class(name, what)
    if inspect.isfunction(what):
        return f"### `{name}`\n\n`{name}{_signature(_tree(what))}`\n\n{_doc(what)}\n"
    return f"### `{name}`\n\n{_value(name, module)}\n"


def _value(name: str, module: str) -> str:
    """A module-level value as its source has it, with the comment behind it."""
    source = inspect.getsource(import_module(f"agentcompile_core.{module}"))
    node = next((n for n in ast.parse(source).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name), None)
    if node is None:
        return f"A `{type(getattr(plugin_api, name)).__name__}`."
    comment = re.search(r"\s\s# (?!noqa|type:)(.+)$", source.splitlines()[node.lineno - 1])
    text = ast.unparse(node.value)
    shown = f"`{text}`" if len(text) <= SHOWN else f"A `{type(getattr(plugin_api, name)).__name__}`"
    return shown + (f": {comment[1]}" if comment else "")


def _enum(name: str, what: type[enum.Enum]) -> str:
    comments = _comments(what)
    rows = [f"- `{m.name}` = `{m.value!r}`" + (f": {comments[m.name]}" if comments.get(m.name) else "") for m in what]
    return f"### `{name}` (one of)\n\n{_doc(what)}\n\n" + "\n".join(rows) + "\n"


def _class(name: str, what: type) -> str:
    bases = ", ".join(b.__name__ for b in what.__bases__ if b.__name__ not in ("object", "ABC", "Protocol"))
    parts = [f"### `{name}`" + (f" ({bases})" if bases else ""), "", _doc(what), ""]
    comments = _comments(what)
    for field, kind, default in _fields(what):
        meaning = f": {comments[field]}" if comments.get(field) else ""
        parts.append(f"- `{field}: {kind}`" + (f" = `{default}`" if default else "") + meaning)
    parts += [_member(node) for node in _source(what).body if isinstance(node, ast.FunctionDef)]
    return "\n".join(part for i, part in enumerate(parts) if part or i < START).rstrip() + "\n"


def _member(node: ast.FunctionDef) -> str:
    """A public method or property as one line; empty for others, and for those without a docstring."""
    text = ast.get_docstring(node)
    if node.name.startswith("_") or not text:
        return ""
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    if marks & {"property", "cached_property"}:
        returns = f": {ast.unparse(node.returns)}".replace("'", "") if node.returns else ""
        return f"- `{node.name}{returns}` (property): {_line(text)}"
    return f"- `{node.name}{_signature(node)}`{' (to implement)' if 'abstractmethod' in marks else ''}: {_line(text)}"


def _fields(what: type) -> Iterator[tuple[str, str, str]]:
    """Name, type and default of every annotated attribute, as the source writes them; those of bases are under the bases."""
    for node in _source(what).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            yield node.target.id, ast.unparse(node.annotation).strip("'\""), ast.unparse(node.value) if node.value else ""


def _comments(what: type) -> dict[str, str]:
    """The comment behind each attribute: what it means, its unit, its shape."""
    found = {}
    for line in inspect.getsource(what).splitlines():
        match = re.match(r"\s+([A-Za-z]\w*)\s*(?::[^=#]*)?(?:=[^#]*)?\s#\s(?!noqa|type:)(.+)$", line)
        if match:
            found[match[1]] = match[2]
    return found


def _source(what: type) -> ast.ClassDef:
    node = _tree(what)
    assert isinstance(node, ast.ClassDef)
    return node


def _tree(what: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(what))).body[0]


def _signature(node: ast.FunctionDef) -> str:
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if isinstance(argument.annotation, ast.Constant):  # one that is written as text
            argument.annotation = ast.Name(str(argument.annotation.value))
    arguments.args = [a for a in arguments.args if a.arg not in ("self", "cls")]
    returns = node.returns.value if isinstance(node.returns, ast.Constant) else node.returns and ast.unparse(node.returns)
    return f"({ast.unparse(arguments)})" + (f" -> {returns}" if node.returns else "")


def _doc(what: Any) -> str:
    return inspect.cleandoc(what.__doc__ or "") if getattr(what, "__doc__", None) else ""


def _line(text: str) -> str:
    """A docstring as one paragraph of a list."""
    return " ".join(text.split())


def main() -> int:
    """Write the page, or with ``--check`` compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is out of date")
    text = page()
    if parser.parse_args().check:
        current = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
        print("up to date" if current == text else f"{PAGE} is out of date; run `make reference`")
        return int(current != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
