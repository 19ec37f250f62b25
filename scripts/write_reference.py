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
    "plugin.hookspecs": "Hooks", "plugin.interfaces": "What a plugin offers", "ir.graph": "The graph", "ir.region": "Matches and operands",
    "ir.expression": "Pointwise expressions", "ir.plan": "Schedules and spaces", "ir.target": "Targets",
    "ir.candidate": "Sources, launches, kernels", "ir.verdict": "Trials, cases, verdicts", "ir.record": "Measurements and records",
    "ir.advice": "Advice", "errors": "Errors and refusals",
}


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD.format(generation=plugin_api.API[0])]
    modules = [*(m for m in SECTIONS if m in plugin_api._NAMES), *(m for m in plugin_api._NAMES if m not in SECTIONS)]
    for module in modules:
        parts.append(f"## {SECTIONS.get(module, module)}\n")
        for name in plugin_api._NAMES[module].split():
            parts.append(_entry(name, getattr(plugin_api, name)))
    for name in plugin_api._MODULES:
        parts.append(f"### `{name}` (module)\n\n{_doc(getattr(plugin_api, name))}\n")
    return "\n".join(parts).rstrip() + "\n"


def _entry(name: str, what: Any) -> str:
    if inspect.isclass(what) and issubclass(what, enum.Enum):
        return _enum(name, what)
    if inspect.isclass(what):
        return _class(name, what)
    if inspect.isfunction(what):
        return f"### `{name}{_signature(what)}`\n\n{_doc(what)}\n"
    text = f"A module-level value: `{what!r}`." if isinstance(what, int | float | str | tuple) else f"A `{type(what).__name__}`."
    return f"### `{name}`\n\n{text}\n"


def _enum(name: str, what: type[enum.Enum]) -> str:
    comments = _comments(what)
    said = {member: comments.get(member.name, "") for member in what}
    rows = [f"- `{member.name}` = `{member.value!r}`" + (f": {said[member]}" if said[member] else "") for member in what]
    return f"### `{name}` (one of)\n\n{_doc(what)}\n\n" + "\n".join(rows) + "\n"


def _class(name: str, what: type) -> str:
    bases = ", ".join(b.__name__ for b in what.__bases__ if b.__name__ not in ("object", "ABC", "Protocol"))
    parts = [f"### `{name}`" + (f" ({bases})" if bases else ""), "", _doc(what), ""]
    comments = _comments(what)
    for field, kind, default in _fields(what):
        meaning = f": {comments[field]}" if comments.get(field) else ""
        parts.append(f"- `{field}: {kind}`" + (f" = `{default}`" if default else "") + meaning)
    for method, member in _members(what):
        if isinstance(member, property):
            parts.append(f"- `{method}` (property): {_line(_doc(member.fget))}")
        else:
            abstract = " (to implement)" if getattr(member, "__isabstractmethod__", False) else ""
            parts.append(f"- `{method}{_signature(member)}`{abstract}: {_line(_doc(member))}")
    return "\n".join(parts).rstrip() + "\n"


def _fields(what: type) -> Iterator[tuple[str, str, str]]:
    """Name, type and default of every annotated attribute, as the source writes them; those of bases are under the bases."""
    for node in _source(what).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            yield node.target.id, ast.unparse(node.annotation).strip("'\""), ast.unparse(node.value) if node.value else ""


def _members(what: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(what).items():
        plain = isinstance(member, property) or inspect.isfunction(member)
        if plain and not name.startswith("_") and _doc(member.fget if isinstance(member, property) else member):
            yield name, member


def _comments(what: type) -> dict[str, str]:
    """The comment behind each attribute: what it means, its unit, its shape."""
    found = {}
    for line in inspect.getsource(what).splitlines():
        match = re.match(r"\s+([A-Za-z]\w*)\s*(?::[^=#]*)?(?:=[^#]*)?\s#\s(?!noqa|type:)(.+)$", line)
        if match:
            found[match[1]] = match[2]
    return found


def _source(what: type) -> ast.ClassDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(what))).body[0]
    assert isinstance(node, ast.ClassDef)
    return node


def _signature(function: Any) -> str:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    arguments.args = [a for a in arguments.args if a.arg not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments)}){returns}".replace("'", "")


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
