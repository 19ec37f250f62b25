"""Whose a file or module is: the standard library's, an installed package's, or one's own. Captures and what runs must agree on it."""

import dataclasses
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from agentcompile_core.api import _versions
from agentcompile_core.runtime import installed_packages
from agentcompile_core.runtime.held import held_by
from agentcompile_core.runtime.installed_packages import (
    VERSIONED,
    is_found,
    is_installed,
    is_own_class,
    is_own_module,
    is_standard_file,
    package_of,
)
from agentcompile_core.stages.capture import libraries
from agentcompile_core.stages.capture.modules import run_file

TEXT = """
from torch import nn
class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.notes = {"by": 2.0}
    def forward(self, x):
        return x * self.notes["by"]
"""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What was found out about files of a test is no other one's, nor are its modules."""
    known, path = dict(sys.modules), list(sys.path)
    libraries._folders()  # where torch really is, whatever a test says of it
    yield
    for of_files in (installed_packages.package_of, installed_packages._beside_torch, installed_packages.standard_folders,
                     installed_packages.is_standard_file, libraries.is_library_file):
        of_files.cache_clear()
    sys.path[:] = path
    for name in [*sys.modules]:
        if sys.modules[name] is not known.get(name):
            del sys.modules[name]
    sys.modules.update(known)


def imported(folder: Path, name: str) -> Any:
    """A module ``name`` in a new file of ``folder``, imported as a user's program does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(TEXT)
    sys.path.insert(0, str(folder))
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def both(module: Any) -> tuple[bool, bool]:
    """Whether captures take a module for one's own, and whether what its parts hold is looked at before requests."""
    part = module.Holds()
    watched = [one.path for one in held_by(nn.Sequential(part))]
    assert watched in ([], ["0.notes"])
    return libraries.is_foreign(type(part)), bool(watched)


@pytest.mark.parametrize(("path", "package"), [
    ("/usr/lib/python3/dist-packages/acme/of.py", "acme"),  # Debian's, which sysconfig does not name
    ("/base/lib/python3.11/site-packages/acme.py", "acme.py"),  # what is around an environment with --system-site-packages
    ("C:\\Python\\Lib\\site-packages\\acme\\of.py", "acme"),
    ("/env/lib/site-packages/outer/site-packages/inner/of.py", "inner"),
    ("/home/me/my-site-packages/net.py", ""), ("/home/me/site-packages-tools/net.py", ""), ("/home/me/site-packages", ""),
    ("/home/me/net.py", ""), ("<string>", ""), ("<ipython in site-packages/x>", ""), ("", "")])
def test_a_package_is_installed_where_folders_of_packages_are_called_so(path: str, package: str) -> None:
    assert (package_of(path), is_installed(path)) == (package, bool(package))


@pytest.mark.parametrize("folder", ["my-site-packages", "of-dist-packages.d", "plain"])
def test_a_folder_whose_name_only_holds_such_a_word_is_ones_own(tmp_path: Path, folder: str) -> None:
    assert both(imported(tmp_path / folder, "acme_own")) == (True, True)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_packages_of_another_environment_are_installed_too(tmp_path: Path, folder: str) -> None:
    assert both(imported(tmp_path / "lib" / folder, "acme_installed")) == (False, False)


@pytest.mark.parametrize("inwards", [True, False])
def test_a_link_leads_to_an_installed_package_from_either_side(tmp_path: Path, inwards: bool) -> None:
    named, other = tmp_path / "site-packages", tmp_path / "elsewhere"
    there, link = (named, other) if inwards else (other, named)
    there.mkdir()
    link.symlink_to(there)
    assert both(imported(link, "acme_linked")) == (False, False)


@pytest.mark.parametrize("way", ["a link to its folder", "a path through a folder of packages"])
def test_a_package_that_is_being_written_is_ones_own_wherever_it_is_imported_from(tmp_path: Path, way: str) -> None:
    """As installers of sources leave it: what lies below the link changes as its author goes on."""
    written, packages = tmp_path / "project" / "acme_written", tmp_path / "site-packages"
    written.mkdir(parents=True)
    packages.mkdir()
    (written / "__init__.py").write_text("")
    (written / "of.py").write_text(TEXT)
    if way == "a link to its folder":
        (packages / "acme_written").symlink_to(written)
    sys.path.insert(0, str(packages if way == "a link to its folder" else packages / ".." / "project"))
    importlib.invalidate_caches()
    assert both(importlib.import_module("acme_written.of")) == (True, True)


def test_a_class_that_is_made_at_run_time_is_not_the_module_that_made_it() -> None:
    made = dataclasses.make_dataclass("Made", ["by"])
    assert made.__module__ in ("types", __name__) and is_own_class(made) and not is_own_class(SimpleNamespace)


@pytest.mark.parametrize("name", ["profile", "token", "agentcompile_bench", "torch_helpers"])
def test_a_module_of_ones_own_may_be_called_as_one_of_the_standard_library_or_like_this_package(tmp_path: Path, name: str) -> None:
    assert both(imported(tmp_path, name)) == (True, True)


def test_a_file_that_is_given_by_its_path_is_ones_own(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(TEXT)
    assert both(run_file(tmp_path / "net.py")) == (True, True)


def test_classes_that_a_library_makes_as_it_goes_are_its_own() -> None:
    part = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert not is_found(type(part)) and not is_own_class(type(part)) and not list(held_by(part))
    assert type(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))) is not nn.Linear
    assert not list(held_by(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))


def test_a_class_is_ones_own_where_another_module_has_the_name_of_its_file(tmp_path: Path) -> None:
    """As of a file that is run by its path, beside an installed package of that name."""
    imported(tmp_path / "site-packages", "acme_twice")
    exec(TEXT, namespace := {"__name__": "acme_twice"})
    assert both(SimpleNamespace(**namespace)) == (True, True)


def test_what_a_program_defines_belongs_to_no_package_that_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another module of one's own has from there is part of that module."""
    monkeypatch.setitem(sys.modules, "__main__", pytest)
    exec("def helper(x):\n    return x", namespace := {"__name__": "__main__"})
    assert not libraries.of_another_package(namespace["helper"], sys.modules[__name__])
    assert libraries.of_another_package(pytest.fixture, sys.modules[__name__])


def test_modules_without_a_file_are_known_by_name() -> None:
    assert not is_own_module("builtins") and not is_own_module(None) and not is_own_module("collections.abc")
    assert not is_own_module("torch.nn.no_such_module") and is_own_module("no_such_module")


@pytest.mark.parametrize("profiler", ["cProfile", "pytest"])
def test_what_a_profiler_runs_is_ones_own(profiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m cProfile program.py`` leaves its own file in ``__main__``, and so does one that was installed."""
    monkeypatch.setitem(sys.modules, "__main__", importlib.import_module(profiler))
    program = SimpleNamespace()
    exec(TEXT, namespace := {"__name__": "__main__"})
    program.Holds = namespace["Holds"]
    assert both(program) == (True, True) and not is_own_module(profiler)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_standard_library_that_is_imported_from_an_archive_is_one(tmp_path: Path, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.setattr(os, "__file__", str(tmp_path / "python.zip" / "os.py"))
    installed_packages.standard_folders.cache_clear()
    installed_packages.is_standard_file.cache_clear()
    archive = tmp_path / "python.zip"
    monkeypatch.setitem(sys.modules, "random", SimpleNamespace(__file__=str(archive / "random.py")))
    monkeypatch.setitem(sys.modules, "acme_app", SimpleNamespace(__file__=str((archive if frozen else tmp_path) / "acme_app.py")))
    assert not is_own_module("random") and is_own_module("acme_app")


def test_files_of_the_standard_library(tmp_path: Path) -> None:
    assert is_standard_file(str(importlib.__file__)) and is_standard_file("<frozen os>")
    assert not is_standard_file("<string>") and not is_standard_file(torch.__file__) and not is_standard_file(str(tmp_path / "os.py"))


def test_a_folder_of_any_name_that_torch_was_installed_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an installer recorded there was installed; a program that lies beside it is one's own."""
    record = tmp_path / "acme_recorded-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("acme_recorded.py,,\n\nacme_recorded-1.0.dist-info/RECORD,,\n")
    sources = tmp_path / "torch.egg-info" / "SOURCES.txt"  # of a checkout: what a distribution of sources would hold
    sources.parent.mkdir()
    sources.write_text("\nacme_handler.py\n")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    installed_packages._beside_torch.cache_clear()
    assert both(imported(tmp_path, "acme_recorded")) == (False, False)
    assert both(imported(tmp_path, "acme_handler")) == (True, True)


def test_the_version_of_all_whose_source_is_not_looked_into_is_part_of_the_keys() -> None:
    assert {f"{name.removesuffix('_core')} {importlib.import_module(name).__version__}" for name in VERSIONED} <= {*_versions()}


def test_a_class_that_is_looked_for_where_names_raise_or_that_says_no_name_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name(name: str) -> Any:
        raise ImportError(f"{name} needs what is not installed")

    lazy = ModuleType("lazy_names")
    lazy.__getattr__ = no_name  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_names", lazy)
    for module in ("lazy_names", ["no", "name"], None):
        kind = type("Made", (), {"__module__": module})
        assert not is_found(kind) and is_own_class(kind) and not libraries.is_library_class(kind)
