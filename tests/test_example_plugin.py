"""The plugin from outside, installed from its own wheel: listed, compiled with, explained. No change to the core."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "examples" / "plugin"
BUDGET = ("--budget-plans", "4", "--budget-s", "60", "--rounds", "1", "--dtype", "float32", "--context", "64", "--device", "cpu")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the plugin's wheel, and nothing else, was installed."""
    folder = tmp_path_factory.mktemp("outside")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    subprocess.run([sys.executable, str(ROOT / "scripts" / "build_wheels.py"), "--out", str(folder), str(PLUGIN)], check=True)
    (wheel,) = folder.glob("acme_agentcompile_gather-*.whl")
    target = folder / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    return target


def agentcompile(installed: Path, *arguments: str, **more: str) -> dict:
    """The JSON document of one command, in a process that sees ``installed``."""
    paths = [str(ROOT), str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), **more}
    command = [sys.executable, "-m", "agentcompile_core.cli", *arguments, "--json"]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_wheel_holds_its_kernel_and_the_limits_are_kept(installed: Path) -> None:
    assert sorted(p.name for p in (installed / "acme_gather").iterdir() if p.suffix in (".py", ".cu")) == ["__init__.py", "gather.cu"]
    assert len((PLUGIN / "acme_gather" / "__init__.py").read_text().splitlines()) < 80
    assert len((PLUGIN / "tests" / "test_acme_gather.py").read_text().splitlines()) <= 15


def test_it_is_listed_when_installed_and_only_then(installed: Path, cli) -> None:
    plugins = {p["name"]: p for p in agentcompile(installed, "plugins")["plugins"]}
    assert plugins["acme_gather"] == {"name": "acme_gather", "distribution": "acme-agentcompile-gather 0.1.0", "state": "loaded",
                                      "offers": ["TemplateFamily:warp_rows"], "message": ""}
    code, out, _ = cli("plugins", "--json")
    assert code == 0 and "acme_gather" not in {p["name"] for p in json.loads(out)["plugins"]}


@pytest.mark.slow
def test_its_candidates_appear_in_explain(installed: Path, cli, tmp_path: Path) -> None:
    pytest.importorskip("agentcompile_validator_emulation")
    pytest.importorskip("agentcompile_validator_numerics")
    bundle = tmp_path / "tiny.bundle"
    # Beside the family that the project ships for the same matches, and little else, so that the budget is enough.
    few = "acme_gather,transformers_rules,cuda,elementwise,numerics,emulation"
    model = str(ROOT / "examples" / "tiny_model")
    agentcompile(installed, "compile", model, "--out", str(bundle), "--no-cache", *BUDGET, AGENTCOMPILE_PLUGINS=few)
    code, out, err = cli("explain", bundle, "--json")  # whoever was given the bundle need not have the plugin
    assert code == 0, err
    candidates = json.loads(out)["candidates"]
    ours = [c for c in candidates if c["implementation"] == "acme_gather/warp_rows"]
    assert ours and all(c["match"].startswith("gather:") for c in ours)
    assert sum(c["passed"] for c in ours) >= 1, ours
    assert not any(c["failures"] for c in ours)
