"""Hardware from outside, installed from its own wheel: target, backend, families and controls of a made-up accelerator that runs C."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve

from agentcompile_core.plugin_api import control_trials
from agentcompile_core.testing.backend_conformance import BackendConformance

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "examples" / "hardware_plugin"
ONLY = "acme_hardware,transformers_rules,numerics"
PROOF = """
import contextlib, io, json, sys
import torch
from agentcompile_core import api
from agentcompile_core.cli import main
from agentcompile_core.store import Store

def per_layer(compiled):
    # how many kernels of the decode step compute nodes of each layer
    program = compiled.session._programs["decode"]
    layers = {node.name: node.layer for node in program.graph.nodes}
    found = [layers[segment.nodes[0]] for segment in program.segments if segment.step]
    return [found.count(layer) for layer in range(len(compiled.loaded.module.model.layers))]

if __name__ == "__main__":
    model, folder = sys.argv[1:3]
    prompt = torch.tensor([[5, 9, 2, 7, 11]])
    asked = dict(dtype="float32", max_context=64)
    # The framework is no allowed origin, so no clock decides what is tested.
    store = Store(folder + ".cache")
    ours = api.compile(model, target="acme_one", origins=("generated",), rounds=1, budget_s=60.0, budget_plans=6, store=store, **asked)
    ours.save(folder)
    again, plain = api.load(folder, model, store=store), api.load(folder, model, run_on="framework")  # of our own: not judged again
    expected = plain.generate(prompt, 12, do_sample=False)[0].tolist()
    steps = [s.step for p in again.session._programs.values() for s in p.segments if s.step]
    records = ours.compilation.records
    refused = io.StringIO()
    with contextlib.redirect_stderr(refused):
        code = main(["compile", "none", "--target", "gtx280"])
    print(json.dumps({
        "refused": [code, refused.getvalue()],
        "device": ours.session.device, "target": ours.context.target.name, "backend": ours.context.backend.name,
        "layers": len(ours.loaded.module.model.layers), "steps": [s.implementation for s in steps], "expected": expected,
        "per_layer": per_layer(ours),
        "tokens": [m.generate(prompt, 12, do_sample=False)[0].tolist() for m in (ours, again)], "notes": [*ours.notes, *again.notes],
        "provisional": ours.compilation.provisional, "languages": sorted({s.language for s in ours.compilation.sources.values()}),
        "measured": all(r.measurement.us > 0 for r in records if r.usable),
        "failures": [str(f) for f in ours.compilation.failures]}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the plugin's wheel, and nothing else, was installed."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler called cc")
    folder = tmp_path_factory.mktemp("hardware")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    subprocess.run([sys.executable, str(ROOT / "scripts" / "build_wheels.py"), "--out", str(folder), str(PLUGIN)], check=True)
    (built,) = folder.glob("acme_agentcompile_hardware-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "installed"), str(built)], check=True)
    return folder / "installed"


def outside(installed: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "AGENTCOMPILE_PLUGINS": ONLY}
    return subprocess.run([sys.executable, *command], env=environment, cwd="/", capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def proof(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """What one compilation of the tiny model for the accelerator found out, and its bundle."""
    folder = tmp_path_factory.mktemp("proof")
    (folder / "proof.py").write_text(PROOF)
    done = outside(installed, str(folder / "proof.py"), str(ROOT / "examples" / "tiny_model"), str(folder / "tiny.bundle"))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), folder / "tiny.bundle"


sys.path.insert(0, str(PLUGIN))
from acme_hardware.backend import ACME_ONE, AcmeBackend  # noqa: E402  from the checkout; everything else here is of the wheel

(GOOD,) = control_trials([AcmeBackend().control("")], ACME_ONE)


class TestBackend(BackendConformance):
    backend, trial = AcmeBackend(), GOOD
    broken = evolve(GOOD.source, digest="0badc0de", code=GOOD.source.code.replace("in0[i]", "in7[i]"))


def test_it_is_small() -> None:
    assert sum(len(p.read_text().splitlines()) for p in PLUGIN.rglob("*.py") if "build" not in p.parts) < 250


def test_its_target_is_listed_and_its_device_is_the_cpu(proof: tuple[dict, Path]) -> None:
    code, said = proof[0]["refused"]
    assert code != 0 and "unknown target 'gtx280'; installed: acme_one" in said


@pytest.mark.slow
def test_the_tiny_model_generates_through_it(proof: tuple[dict, Path]) -> None:
    found, _ = proof
    assert (found["device"], found["target"], found["backend"], found["languages"]) == ("cpu", "acme_one", "acme", ["c"])
    assert found["tokens"] == [found["expected"]] * 2
    assert len(found["per_layer"]) == found["layers"] and min(found["per_layer"]) >= 1
    assert {s.split("/")[0] for s in found["steps"]} == {"acme_hardware"}
    assert found["measured"] and not found["provisional"], "its clock is a real one"
    assert not found["failures"]
    assert not [note for note in found["notes"] if "framework's operators" in note]


def test_explain_shows_it_and_the_bundle_holds_its_sources(cli, proof: tuple[dict, Path]) -> None:
    code, out, err = cli("explain", proof[1])  # whoever was given the bundle need not have the plugin
    assert code == 0 and "acme_one (acme-v1)" in out and "acme_hardware/c_linear" in out, err
    assert list(proof[1].rglob("*.c")) and list(proof[1].rglob("*.so")) and not list(proof[1].rglob("*.cu"))
