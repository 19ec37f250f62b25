"""The device library as backends and the core's caches see it, and what happens where the kit is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import agentcompile_cuda_kit as kit
import pytest

import agentcompile_core
from agentcompile_core.plugin.discovery import load_catalog

# What `agentcompile plugins` lists where the kit is not installed; tests/test_unplug.py shows what a model does without them.
WITHOUT = """
import importlib.abc, json, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "agentcompile_cuda_kit":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from agentcompile_core.plugin.discovery import load_catalog

print(json.dumps({p.name: [p.state, p.distribution, p.message] for p in load_catalog(strict=False).plugins}))
"""


@pytest.mark.parametrize("name", ["cuda", "emulation"])
def test_backends_of_the_language_give_the_library(name: str) -> None:
    backend = next((b for b in load_catalog(strict=False).backends.values() if b.name == name), None)
    if backend is None:
        pytest.skip(f"the backend {name} is not installed")
    assert backend.include_dirs() == (kit.include_dir(),)
    assert (kit.include_dir() / "agentcompile" / "ptx.cuh").is_file()
    assert backend.suffix("cuda") == ".cu"
    assert backend.library_digest("cuda") and backend.library_digest("another") == ""


def test_the_digest_follows_every_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        kit.device_library.digest.cache_clear()
        return kit.digest()

    before = digest()
    folder = tmp_path / "include" / "agentcompile"
    folder.mkdir(parents=True)
    for path in (kit.include_dir() / "agentcompile").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(kit.device_library, "include_dir", lambda: tmp_path / "include")
    assert digest() == before
    seen = {before}
    for path in sorted(folder.iterdir()):
        path.write_bytes(path.read_bytes() + b"// changed\n")
        seen.add(digest())
    assert len(seen) == 1 + len(list(folder.iterdir()))
    monkeypatch.undo()
    assert digest() == before


def test_the_core_holds_no_cuda_text() -> None:
    core = Path(agentcompile_core.__file__).parent
    words = (".cuh", "__global__", "__device__", "__forceinline__", "__syncthreads", "#include", 'extern "C"', "threadIdx")
    found = [f"{path.relative_to(core)}: {word}" for path in core.rglob("*") if path.is_file() and "__pycache__" not in path.parts
             for word in words if word in path.read_text(encoding="utf-8")]
    assert found == []


def test_without_the_kit_its_users_are_named_and_nothing_else_breaks() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AGENTCOMPILE_")} | {"AGENTCOMPILE_STRICT": "0"}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    failed = {name: (distribution, message) for name, (state, distribution, message) in found.items() if state == "failed"}
    users = ("agentcompile-templates-cuda-", "agentcompile-runtime-cuda ", "agentcompile-validator-emulation ")
    assert failed and all(distribution.startswith(users) for distribution, _ in failed.values()), failed
    assert all("No module named 'agentcompile_cuda_kit'" in message for _, message in failed.values())
    assert {state for name, (state, _, _) in found.items() if name not in failed} == {"loaded"}
