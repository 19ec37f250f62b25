"""The extension of a bundle: it builds, imports and lists what it has without a GPU, and launches nothing that was changed."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentcompile_core.runtime import bundle_reader


@pytest.fixture(scope="module")
def built_extension(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the bundle's extension, built in place with setuptools and pybind11, as its README says."""
    if importlib.util.find_spec("pybind11") is None or shutil.which("g++") is None:
        pytest.skip("needs pybind11 and g++")
    folder = tmp_path_factory.mktemp("extension") / "extension"
    shutil.copytree(tiny_bundle / "extension", folder)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def in_extension(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "AGENTCOMPILE_STRICT")}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_extension_imports_without_a_gpu_and_lists_its_signatures(tiny_bundle: Path, built_extension: Path) -> None:
    code = ("import json, sys, agentcompile_kernels as k\n"
            "assert not {'torch', 'agentcompile_core'} & set(sys.modules)\n"
            "entries = {n: [s.label, [a['name'] for a in s.arguments]] for n, s in k.SIGNATURES.items()}\n"
            "print(json.dumps({'arch': k.ARCH, 'entries': entries}))")
    done = in_extension(built_extension, code)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    installed = bundle_reader.read(tiny_bundle)
    launches = {launch.entry: launch for p in installed.programs.values() for s in p.sources for launch in s.launches}
    assert document["arch"] == "sm_90"
    # One kernel that serves operands of several sizes has a signature for each: entry, entry@1, ...
    assert {name.split("@")[0] for name in document["entries"]} == launches.keys()
    for name, (_, arguments) in document["entries"].items():
        assert arguments == [a.name for a in launches[name.split("@")[0]].arguments]


def test_a_launch_without_a_gpu_says_what_is_missing(built_extension: Path) -> None:
    code = ("import agentcompile_kernels as k\n"
            "s = next(iter(k.SIGNATURES.values()))\n"
            "try:\n    s.launch({a['name']: 256 for a in s.pointers})\n"
            "except RuntimeError as exc:\n    print(exc)")
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU here")
    done = in_extension(built_extension, code)
    assert done.returncode == 0, done.stderr
    assert "NVIDIA driver" in done.stdout


def test_a_cubin_that_was_changed_is_not_launched(built_extension: Path, tmp_path: Path) -> None:
    folder = tmp_path / "extension"
    shutil.copytree(built_extension, folder)
    for path in folder.glob("agentcompile_kernels/cubins/*.cubin"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    code = ("import agentcompile_kernels as k\n"
            "s = next(iter(k.SIGNATURES.values()))\n"
            "try:\n    s.launch({a['name']: 256 for a in s.pointers})\n"
            "except RuntimeError as exc:\n    print(exc)")
    assert "was changed after it was emitted" in in_extension(folder, code).stdout


@pytest.mark.slow
def test_the_extension_builds_as_a_wheel(tiny_bundle: Path, built_extension: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_bundle / "extension", tmp_path / "extension")
    shutil.copytree(built_extension / "build", folder / "build")  # the same objects, which setuptools compiles once
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
               "-w", str(tmp_path / "dist"), "."]
    quick = {**os.environ, "CFLAGS": "-O0", "CXXFLAGS": "-O0"}  # setuptools old and new; what is imported above was built as by users
    done = subprocess.run(command, cwd=folder, env=quick, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    import zipfile

    names = zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl"))).namelist()
    cubins = [n for n in names if n.endswith(".cubin")]
    assert len(cubins) == len(list((tiny_bundle / "kernels").iterdir()))
    assert "agentcompile_kernels/signatures.json" in names
    assert any(n.startswith("agentcompile_kernels/_launcher") for n in names)
