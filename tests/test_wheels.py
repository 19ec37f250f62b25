"""What `make wheels` builds is complete: installed without the repository, every plugin loads and a model compiles.

Third parties' wheels come and go in an environment of their own: each is listed, effective, and gone when it is uninstalled.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from third_parties import ADVISOR, MODULE, PYPROJECT, TOML, VALIDATOR

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny_model"
DISTRIBUTIONS = [p.parent for p in sorted(ROOT.glob("plugins/*/*/pyproject.toml"))]
PLUGINS = [d for d in DISTRIBUTIONS if "entry-points" in tomllib.loads((d / "pyproject.toml").read_text())["project"]]


def wheels_of(out: Path, *folders: Path) -> Path:
    """``out``, with the wheels of these distributions, or of all of the repository, in it."""
    command = [sys.executable, str(ROOT / "scripts" / "build_wheels.py"), "--out", str(out), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels_of(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all wheels installed, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*command, *map(str, sorted(wheels.glob("*.whl")))], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_one_wheel_per_distribution(wheels: Path) -> None:
    names = {w.name.split("-")[0] for w in wheels.glob("*.whl")}
    assert {"agentcompile_core", "agentcompile_templates_cuda_gemv", "agentcompile_runtime_cuda"} <= names
    assert len(names) >= 1 + len(DISTRIBUTIONS)


def test_wheels_hold_every_file_of_their_package_and_no_tests(wheels: Path) -> None:
    found = (p for d in DISTRIBUTIONS for p in d.glob("agentcompile_*") if p.is_dir() and not p.suffix)  # not *.egg-info
    packages = [ROOT / "agentcompile_core", *found]
    assert len(packages) >= 1 + len(DISTRIBUTIONS)
    for package in packages:
        with zipfile.ZipFile(next(wheels.glob(f"{package.name}-*.whl"))) as wheel:
            names = set(wheel.namelist())
        wanted = {str(f.relative_to(package.parent)) for f in package.rglob("*") if f.is_file() and "__pycache__" not in f.parts}
        assert wanted - names == set(), f"{package.name}: not in its wheel"
        assert f"{package.name}/py.typed" in names
        assert [n for n in names if "/tests/" in n or n.startswith("tests/")] == []


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("AGENTCOMPILE_PLUGINS", "AGENTCOMPILE_BLOCK_PLUGINS")}
    environment |= {"PYTHONPATH": str(installed), "AGENTCOMPILE_STRICT": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=installed, env=environment, capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def said(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A project's folder, and where everything came from and what is configured there: one process, which imports once."""
    folder = tmp_path_factory.mktemp("configured")
    (folder / "agentcompile.toml").write_text('advisor = "replay"\nvalidators = ["numerics", "emulation"]\n[plugin.replay]\n'
                                              'file = "advice.json"\n[plugin.emulation]\nmax_bytes = 1000\n')
    code = ("import json, os, sys, agentcompile_core\nos.chdir(sys.argv[1])\nfrom agentcompile_core.api import arguments\n"
            "from agentcompile_core.plugin import settings\nfrom agentcompile_core.plugin.discovery import load_catalog\n"
            "catalog = load_catalog()\nplugins = [[p.name, p.state, sys.modules[type(o).__module__].__file__] for p in catalog.plugins\n"
            "  for h in catalog.offers.values() for q, o in h.items() if q.startswith(p.name + '/')]\n"
            "config, notes = arguments.chosen(None, {}, catalog)\n"
            "document = settings.document(settings.configured(catalog, config)[0])\n"
            "print(json.dumps([agentcompile_core.__file__, plugins, config.advisor, config.validators, document, notes]))")
    done = run(installed, "-c", code, str(folder))
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_every_plugin_loads_from_its_wheel(installed: Path, said: tuple[Path, list[Any]]) -> None:
    core, offers = said[1][:2]
    assert core.startswith(str(installed))
    assert {state for _, state, _ in offers} == {"loaded"}
    assert all(path.startswith(str(installed)) for _, _, path in offers)
    assert len({name for name, _, _ in offers}) >= len(PLUGINS)


def test_a_toml_configures_plugins_from_their_wheels(said: tuple[Path, list[Any]]) -> None:
    folder, (advisor, validators, document, notes) = said[0], said[1][2:]
    assert (advisor, validators, notes) == ("replay", ["numerics", "emulation"], [])
    assert document["agentcompile_advisors"]["replay/replay"] == {"file": str(folder / "advice.json")}
    assert document["agentcompile_validators"]["emulation/emulation"] == {"max_bytes": 1000, "compiler": "g++"}


@pytest.mark.slow
def test_a_model_compiles_from_wheels(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "-m", "agentcompile_core.cli", "compile", str(TINY), "--device", "cpu", "--target", "h200", "--dtype", "float32",
               "--context", "64", "--budget-plans", "2", "--rounds", "1", "--budget-s", "240", "--no-cache", "--json",
               "--out", str(tmp_path / "b"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["statistics"]
    assert found["selected"] >= 7
    assert found["failures"] == 0
    assert (tmp_path / "b" / "extension" / "setup.py").is_file()


# One environment that sees the installed torch and its neighbours, and of this project what is installed from wheels alone.

THIRD_PARTIES = {  # entry point: distribution, what it offers
    "acme_told": ("acme_told", ["Advisor:told"]),
    "acme_strict": ("acme_strict", ["Validator:strict"]),
    "vendor": ("agentcompile-runtime-vendor", ["Implementation:linear", "Implementation:attention"]),
    "transformers_rules": ("agentcompile-rules-transformers", ["RegionRule:linear", "RegionRule:elementwise"]),
    "acme_hardware": ("acme-agentcompile-hardware", ["Backend:acme", "Target:acme_one", "TemplateFamily:c_linear"]),
}
BASE = ("agentcompile_core", "agentcompile_validator_numerics", "agentcompile_runtime_vendor", "agentcompile_rules_transformers")
COMMANDS = """
import contextlib, importlib, io, json, subprocess, sys
from agentcompile_core.cli import main
from agentcompile_core.processes.fork_server import keeping

found = []
with keeping():
    for line in json.loads(sys.argv[1]):
        if line[0] == "uninstall":
            subprocess.run([sys.executable, "-m", "pip", "--quiet", "uninstall", "--yes", line[1]], check=True)
            importlib.invalidate_caches()
            continue
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(line)
        found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


class Environment:
    """A virtual environment, and a project's folder with a model and an agentcompile.toml in it."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        self.project.mkdir()
        (self.project / "module.py").write_text(MODULE)
        (self.project / "agentcompile.toml").write_text(TOML)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
        self.python = folder / "env" / "bin" / "python"
        self._shelf = folder / "neighbours"
        self._shelf.mkdir()
        for path in reversed([Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]):
            self._see(path)
        (site,) = (folder / "env" / "lib").glob("python*/site-packages")
        (site / "neighbours.pth").write_text(f"{self._shelf}\n")

    def _see(self, packages: Path) -> None:
        """Show what is installed there, without this project, without plugins and without .pth files (editable installs)."""
        for path in packages.iterdir():
            if not re.match(r"(__editable__|agentcompile|acme)", path.name) and path.suffix not in (".pth", ".egg-link"):
                (self._shelf / path.name).unlink(missing_ok=True)
                (self._shelf / path.name).symlink_to(path)

    def pip(self, *arguments: str) -> None:
        done = subprocess.run([str(self.python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments], env=self._variables(),
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]

    def run(self, *lines: tuple[str, ...]) -> list[Any]:
        """Command lines in the project's folder, one process for all: (exit code, document, standard error) of each.

        ``uninstall NAME`` between them is pip's.
        """
        given = json.dumps([[*line, "--json"] for line in lines])
        done = subprocess.run([str(self.python), "-c", COMMANDS, given], cwd=self.project, env=self._variables(), capture_output=True,
                              text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        return [(code, json.loads(out), err) for code, out, err in json.loads(done.stdout.splitlines()[-1])]

    def _variables(self) -> dict[str, str]:
        gone = ("AGENTCOMPILE_", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(gone)}
        return {**kept, "AGENTCOMPILE_CONFIG": "", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def environment(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """All five third parties installed, beside the core and a validator."""
    if shutil.which("cc") is None or not sysconfig.get_config_var("EXT_SUFFIX"):
        pytest.skip("there is no C compiler called cc")
    folder = tmp_path_factory.mktemp("third_parties")
    for name, text in {"acme_told": ADVISOR, "acme_strict": VALIDATOR}.items():
        (folder / name).mkdir()
        (folder / name / "pyproject.toml").write_text(PYPROJECT.format(name=name))
        (folder / name / f"{name}.py").write_text(text)
    shutil.copytree(ROOT / "examples" / "hardware_plugin", folder / "acme_hardware")
    wheels_of(folder, *(folder / name for name in ("acme_told", "acme_strict", "acme_hardware")))
    made = Environment(folder)
    built = [next(wheels.glob(f"{name}-*.whl")) for name in BASE]
    made.pip("install", "--no-index", "--no-deps", *map(str, (*built, *sorted(folder.glob("*.whl")))))
    return made


def listed(document: dict[str, Any]) -> dict[str, list[str]]:
    """Loaded plugins with what they offer; those of the core aside."""
    assert {p["state"] for p in document["plugins"]} == {"loaded"}, document["plugins"]
    return {p["name"]: p["offers"] for p in document["plugins"] if not p["name"].startswith("core_")}


SHOWN = (("plugins",), ("compile", "module.py", "--no-cache", "--log", "log.jsonl", "--out", "module.bundle"), ("explain", "module.bundle"))
COMPILING = ("compile", "module.py", "--no-cache", "--budget-plans", "4")
PLAIN = (*COMPILING, "--advisor", "heuristic", "--validators", "numerics")
GONE = {  # in this order: the command line whose outcome shows it, and the word that it says
    "acme_told": (COMPILING, "unknown advisor 'told'; installed: heuristic"),
    "acme_strict": ((*COMPILING, "--advisor", "heuristic"), "unknown validator 'strict'; installed: numerics"),
    "vendor": (PLAIN, ""),
    "transformers_rules": (PLAIN, ""),
    "acme_hardware": (PLAIN, "unknown target 'acme_one'"),
}


@pytest.fixture(scope="module")
def ran(environment: Environment) -> list[Any]:
    """What all of them show together, and then ``plugins`` and the command line of each that is gone: one process, which imports once."""
    gone = [(("uninstall", THIRD_PARTIES[name][0]), ("plugins",), line) for name, (line, _) in GONE.items()]
    return environment.run(*SHOWN, *(line for group in gone for line in group))


def test_third_parties_are_listed_and_effective(environment: Environment, ran: list[Any]) -> None:
    (_, plugins, _), (code, document, err), (_, explained, _) = ran[:len(SHOWN)]
    found = listed(plugins)
    assert set(found) == {*THIRD_PARTIES, "numerics"}
    assert all(set(offers) <= set(found[name]) for name, (_, offers) in THIRD_PARTIES.items())
    assert code == 0 and not document["failures"], err
    log = [json.loads(line) for line in (environment.project / "log.jsonl").read_text().splitlines()]
    assert document["target"] == "acme_one" and {entry["advisor"] for entry in log} == {"told"}
    # The hardware: kernels of its families pass on it, timed by its clock, and one is selected; its rules found the matches.
    passed = {entry["implementation"] for entry in log if entry["verdict"] == "pass"}
    assert passed == {"acme_hardware/c_linear", "vendor/linear"}, "the implementation competes"
    assert all(entry["us"] > 0 for entry in log if entry["verdict"] == "pass")
    steps = [step for selection in explained["selections"] for step in selection["steps"]]
    assert {step["implementation"] for step in steps} <= passed and len(steps) == 1
    # The advisor's setting: without it the families come by name.
    alone = [entry["implementation"] for entry in log if entry["match"].startswith("linear:linear+1")]
    assert alone[0] == "vendor/linear" and "acme_hardware/c_linear" in alone
    # The validator's setting, in the worker: what it names is refused in its words.
    refused = [entry for entry in log if entry["implementation"] == "acme_hardware/c_elementwise"]
    assert refused and all(entry["message"] == "no elementwise passes here" for entry in refused)


def test_third_parties_are_gone_when_they_are_uninstalled(ran: list[Any]) -> None:
    found, left = ran[len(SHOWN):], {*THIRD_PARTIES, "numerics"}
    for (name, (_, words)), (_, plugins, _), (code, document, err) in zip(GONE.items(), found[::2], found[1::2], strict=True):
        left.remove(name)
        assert set(listed(plugins)) == left
        assert (code, words in err) == (2 if words else 0, True), err
        if name == "vendor":
            assert {t["implementation"] for t in document["search"]} == {"acme_hardware/c_linear", "acme_hardware/c_elementwise"}
        elif name == "transformers_rules":
            assert document["statistics"]["candidates"] == document["statistics"]["selected"] == 0
