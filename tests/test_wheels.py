"""What `make wheels` builds is complete: installed without the repository, every plugin loads and a model compiles."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny_model"
DISTRIBUTIONS = [p.parent for p in sorted(ROOT.glob("plugins/*/*/pyproject.toml"))]
PLUGINS = [d for d in DISTRIBUTIONS if "entry-points" in tomllib.loads((d / "pyproject.toml").read_text())["project"]]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, str(ROOT / "scripts" / "build_wheels.py"), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all wheels installed, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(folder)]
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
    environment |= {"PYTHONPATH": str(installed), "AGENTCOMPILE_STRICT": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=installed, env=environment, capture_output=True, text=True, timeout=400)


def test_every_plugin_loads_from_its_wheel(installed: Path) -> None:
    code = ("import json, sys, agentcompile_core\nfrom agentcompile_core.plugin.discovery import load_catalog\ncatalog = load_catalog()\n"
            "print(json.dumps([agentcompile_core.__file__, [[p.name, p.state, sys.modules[type(o).__module__].__file__]\n"
            "  for p in catalog.plugins for h in catalog.offers.values() for q, o in h.items() if q.startswith(p.name + '/')]]))")
    done = run(installed, "-c", code)
    assert done.returncode == 0, done.stderr
    core, offers = json.loads(done.stdout)
    assert core.startswith(str(installed))
    assert {state for _, state, _ in offers} == {"loaded"}
    assert all(path.startswith(str(installed)) for _, _, path in offers)
    assert len({name for name, _, _ in offers}) >= len(PLUGINS)


def test_a_toml_configures_plugins_from_their_wheels(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "agentcompile.toml").write_text('advisor = "replay"\nvalidators = ["numerics", "emulation"]\n[plugin.replay]\n'
                                                'file = "advice.json"\n[plugin.emulation]\nmax_bytes = 1000\n')
    code = ("import json, os, sys\nos.chdir(sys.argv[1])\nfrom agentcompile_core.api import arguments\n"
            "from agentcompile_core.plugin import settings\nfrom agentcompile_core.plugin.discovery import load_catalog\n"
            "catalog = load_catalog()\nconfig, notes = arguments.chosen(None, {}, catalog)\n"
            "document = settings.document(settings.configured(catalog, config)[0])\n"
            "print(json.dumps([config.advisor, config.validators, document, notes]))")
    done = run(installed, "-c", code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    advisor, validators, document, notes = json.loads(done.stdout)
    assert (advisor, validators, notes) == ("replay", ["numerics", "emulation"], [])
    assert document["agentcompile_advisors"]["replay/replay"] == {"file": str(tmp_path / "advice.json")}
    assert document["agentcompile_validators"]["emulation/emulation"] == {"max_bytes": 1000}


@pytest.mark.slow
def test_a_model_compiles_from_wheels(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "-m", "agentcompile_core.cli", "compile", str(TINY), "--device", "cpu", "--target", "h200", "--dtype", "float32",
               "--context", "64", "--budget-plans", "12", "--rounds", "1", "--budget-s", "240", "--no-cache", "--json",
               "--out", str(tmp_path / "b"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["statistics"]
    assert found["selected"] >= 7
    assert found["failures"] == 0
    assert (tmp_path / "b" / "extension" / "setup.py").is_file()
