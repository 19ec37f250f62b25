"""The house keeps its shape: small modules, few parameters, one way down, and one door for plugins."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import grimp
import pytest

from agentcompile_core import plugin_api
from agentcompile_core.ops.overloads import operator_of

ROOT = Path(__file__).parents[1]
CORE = ROOT / "agentcompile_core"
MODULES = sorted([*CORE.rglob("*.py"), *(p for p in ROOT.glob("plugins/*/*/**/*.py") if "tests" not in p.relative_to(ROOT).parts)])
PLUGINS = [p for p in MODULES if not p.is_relative_to(CORE)]


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg not in ("self", "cls")]
    return len(names) + (given.vararg is not None) + (given.kwarg is not None)


def of_core(file: Path) -> list[str]:
    """Modules of the core that a file imports."""
    nodes = list(ast.walk(tree(file)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    absolute = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    names += [f"{node.module}.{alias.name}" for node in absolute for alias in node.names]
    return [name for name in names if name.split(".")[0] == "agentcompile_core"]


def offered() -> set[tuple[str, str]]:
    """(module, name) of the imports that plugin_api makes for type checkers only."""
    (block,) = [n for n in tree(CORE / "plugin_api.py").body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    return {(node.module, alias.name) for node in block.body for alias in node.names}


def test_few_modules_at_the_root() -> None:
    assert len(list(CORE.glob("*.py"))) <= 9


def test_modules_are_short() -> None:
    sizes = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in MODULES}
    assert len(sizes) > 150 and {file: size for file, size in sizes.items() if size > 350} == {}


def test_functions_take_few_parameters() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = [(file, node) for file in MODULES for node in ast.walk(tree(file)) if isinstance(node, kinds)]
    many = {f"{file.relative_to(ROOT)}:{f.lineno} {f.name}": parameters(f) for file, f in functions if parameters(f) > 7}
    assert len(functions) > 1000 and many == {}


@pytest.mark.parametrize("text, count", [
    ("def f(self, a, /, b, *c, d=1, **e): ...", 5), ("async def f(cls): ...", 0), ("def f(a, b, c, d, e, f, g, h): ...", 8)])
def test_parameters_are_counted_as_said(text: str, count: int) -> None:
    assert parameters(ast.parse(text).body[0]) == count


def test_no_import_circle_not_even_for_type_checkers() -> None:
    graph = grimp.build_graph("agentcompile_core", exclude_type_checking_imports=False, cache_dir=None)
    waiting = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while free := [module for module, needs in waiting.items() if not needs & waiting.keys()]:
        for module in free:
            del waiting[module]
    circle = {module: sorted(needs & waiting.keys()) for module, needs in waiting.items()}
    assert len(graph.modules) > 100 and circle == {}


def test_plugin_api_offers_what_it_imports_for_type_checkers() -> None:
    table = {(module, name) for module, names in plugin_api._NAMES.items() for name in names.split()}
    table |= {tuple(module.rsplit(".", 1)) for module in plugin_api._MODULES.values()}
    assert table == offered()
    names = [name for names in plugin_api._NAMES.values() for name in names.split()]
    assert len(names) == len(set(names)) > 100


@pytest.mark.parametrize("name", plugin_api.__all__)
def test_every_name_of_plugin_api_is_there(name: str) -> None:
    if name in plugin_api._MODULES:
        assert getattr(plugin_api, name) is import_module(f"agentcompile_core.{plugin_api._MODULES[name]}")
    else:
        assert getattr(plugin_api, name) is getattr(import_module(f"agentcompile_core.{plugin_api._MODULE_OF[name]}"), name)


def test_plugin_api_loads_no_torch() -> None:
    code = "import sys; from agentcompile_core.plugin_api import Advice, Advisor, hookimpl; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_operators_of_the_project_are_spelled_in_one_place() -> None:
    """A name that is typed twice is wrong in one of them one day, and silently matches nothing."""
    spelled = {str(file.relative_to(ROOT)): set(re.findall(r"[\"']agentcompile\.\w+\.default[\"']", file.read_text())) for file in MODULES}
    names = {name.strip("'\"") for found in spelled.values() for name in found}
    assert [file for file, found in spelled.items() if found] == ["agentcompile_core/ops/operator_names.py"]
    assert len(names) > 10 and all(callable(operator_of(name)) for name in names)


def test_plugins_enter_by_one_door() -> None:
    """A package that uses the compiler (a layer that compiles itself) has it as every user has it."""
    doors, face = ("agentcompile_core.plugin_api", "agentcompile_core.testing"), ("agentcompile_core.compile", "agentcompile_core.load")
    others = {str(file.relative_to(ROOT)): [name for name in of_core(file) if not name.startswith(doors) and name not in face]
              for file in PLUGINS}
    assert len(others) > 40 and {file: names for file, names in others.items() if names} == {}


def test_the_module_map_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "write_module_map.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
