"""Write docs/modules.md: every package and module of the core with the first line of its docstring, layer by layer.

``--check`` writes nothing and fails where the page is not what would be written.
"""

import argparse
import ast
import configparser
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "modules.md"
CORE = "agentcompile_core"
HEAD = """# Module map of the core

Every package and module of `agentcompile_core` with the first line of its docstring, in the order of the layers that `.importlinter`
holds: a layer imports only from those below it. Written by `python scripts/write_module_map.py`; a test holds it equal to the code.

What belongs where: a value that two stages share is in `ir`; what an operator means is in `ops`; what a plugin sees is in `plugin`,
and what it imports in `plugin_api`; what runs a compiled model is in `runtime`; what runs in the child process is in `worker`; what
one stage does is in `stages`, and no stage knows another.
"""


def main() -> int:
    """Write the page, or check it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where the page is not up to date; write nothing")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text)
        return 0
    if not PAGE.is_file() or PAGE.read_text() != text:
        print(f"{PAGE.relative_to(ROOT)} is not what the code says; run python scripts/write_module_map.py", file=sys.stderr)
        return 1
    return 0


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for names in layers():
        for name in names:
            parts.append(f"\n## {name}\n\n| module | what it is |\n|---|---|\n" + "".join(rows(ROOT / CORE / name)))
    return "".join(parts)


def layers() -> list[list[str]]:
    """Names of packages and modules of each layer, top to bottom, as the import contract has them."""
    contract = configparser.ConfigParser()
    contract.read(ROOT / ".importlinter")
    lines = contract["importlinter:contract:layers"]["layers"].strip().splitlines()
    return [[name.strip() for name in line.replace(":", "|").split("|")] for line in lines]


def rows(place: Path) -> list[str]:
    """One row for each module of a package, packages before what is in them; one for a module."""
    files = sorted(place.rglob("*.py"), key=_order) if place.is_dir() else [place.with_suffix(".py")]
    return [f"| `{_shown(file)}` | {first_line(file)} |\n" for file in files]


def first_line(file: Path) -> str:
    """The first line of a module's docstring, escaped for a table.

    Raises:
        SystemExit: the module has none.
    """
    said = ast.get_docstring(ast.parse(file.read_text()))
    if not said:
        raise SystemExit(f"{file.relative_to(ROOT)} has no docstring; say in one line what it is")
    return said.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _order(file: Path) -> tuple[str, ...]:
    parts = file.parts[:-1] if file.name == "__init__.py" else (*file.parts[:-1], file.name)
    return tuple(parts)


def _shown(file: Path) -> str:
    inside = file.relative_to(ROOT / CORE)
    return f"{inside.parent.as_posix()}/" if inside.name == "__init__.py" else inside.as_posix()


if __name__ == "__main__":
    sys.exit(main())
