"""Bundles: written whole or not at all, read back as they were, refused where they do not fit, and never executed by `load`."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from attrs import evolve

from agentcompile_core import api
from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import StageName, UsageError
from agentcompile_core.ir import serial
from agentcompile_core.ir.bundle import MANIFEST, Bundle
from agentcompile_core.ir.target import Target
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.interfaces import Backend
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.stages import emit
from agentcompile_core.stages.emit import evidence
from agentcompile_core.store import Store
from agentcompile_core.testing.doubles import FakeBackend

TINY = Path(__file__).parents[1] / "examples" / "tiny_model"


def in_memory(folder: Path) -> Bundle:
    manifest = bundle_reader.read_manifest(folder)
    return Bundle(manifest=manifest, files=tuple((entry.path, (folder / entry.path).read_bytes()) for entry in manifest.files))


def context(target: Target, *backends: Backend) -> Context:
    """What stage emit sees, with the installed plugins and ``backends``."""
    catalog = load_catalog(strict=False)
    catalog.offers["agentcompile_backends"].update({f"tests/{backend.name}": backend for backend in backends})
    return Context(catalog=catalog, target=target, config=Config(), store=Store(None))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_written_is_read_back_unchanged(tiny_bundle: Path, tmp_path: Path) -> None:
    emit.write(in_memory(tiny_bundle), tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tiny_bundle)
    first, second = bundle_reader.read(tiny_bundle), bundle_reader.read(tmp_path / "again")
    assert serial.digest(first.graphs) == serial.digest(second.graphs)
    assert first.manifest == second.manifest
    assert first.selections == second.selections
    assert first.records == second.records
    assert first.kernels == second.kernels
    assert first.programs.keys() == second.programs.keys()


def test_a_bundle_holds_sources_binaries_headers_evidence_and_build_scripts(tiny_bundle: Path) -> None:
    names = set(files_of(tiny_bundle))
    assert {"manifest.json", "graphs.json", "programs.json", "selections.json", "records.json", "include/agentcompile/dtype.cuh",
            "extension/setup.py", "extension/pyproject.toml", "extension/launcher.cpp", "extension/check.py"} <= names
    installed = bundle_reader.read(tiny_bundle)
    for digest in {s.digest for p in installed.programs.values() for s in p.sources}:
        assert f"kernels/{digest}/kernel.cu" in names
        assert f"kernels/{digest}/kernel.cubin" in names
        assert installed.kernels[digest].arch == "sm_90"
        assert installed.kernels[digest].binary.startswith(b"\x7fELF")


def test_every_file_is_in_the_manifest_with_its_hash(tiny_bundle: Path) -> None:
    manifest = bundle_reader.read_manifest(tiny_bundle)
    found = files_of(tiny_bundle)
    found.pop(MANIFEST)
    assert {e.path: e.sha256 for e in manifest.files} == {p: hashlib.sha256(d).hexdigest() for p, d in found.items()}


def test_the_same_compilation_gives_the_same_files(tiny_bundle: Path) -> None:
    installed = bundle_reader.read(tiny_bundle)
    ctx = context(installed.manifest.target)
    again = emit.run(installed.graphs, installed.programs, installed.selections, installed.kernels, installed.records, ctx)
    found = evidence.read(tiny_bundle)
    again = evidence.with_evidence(again, found.tried, found.failures, found.decisions)
    assert dict(again.files) == dict(in_memory(tiny_bundle).files)
    assert evolve(again.manifest, source=installed.manifest.source) == installed.manifest


class Elsewhere(FakeBackend):
    """A backend of another language, with a library of its own and something for users without AgentCompile."""

    name = "elsewhere"
    languages = ("c",)
    binary_suffix = ".so"
    part: ClassVar[dict[str, bytes]] = {"run/Makefile": b"all:"}

    def __init__(self, library: Path) -> None:
        super().__init__()
        self.library = library

    def include_dirs(self) -> tuple[Path, ...]:
        return (self.library,)

    def emit(self, programs: object, kernels: object, target: object) -> dict[str, bytes]:
        return dict(self.part)

    def leave(self) -> None:
        """Between the compile and what is made of it: another version is installed, which gives other files."""
        self.library = self.library.parent / "gone"
        self.emit = lambda *_: {"run/Makefile": b"another"}  # type: ignore[method-assign]


class Elsewhere2(Elsewhere):
    suffixes: ClassVar[dict[str, str]] = {"c": ".c11"}
    binary_suffix = ".bin"


def emitted_by(tiny_bundle: Path, backend: Backend, *, built: bool = True) -> tuple[dict[str, bytes], Context]:
    """The bundle's first source, as if it were C that ``backend`` builds, and the context of stage emit."""
    installed = bundle_reader.read(tiny_bundle)
    program = next(p for p in installed.programs.values() if p.sources)
    source = evolve(program.sources[0], language="c")
    kernel = evolve(installed.kernels[source.digest], backend=backend.name)
    ctx = context(installed.manifest.target, backend)
    programs, kernels = {"decode": evolve(program, sources=(source,))}, {source.digest: kernel} if built else {}
    prepared = emit.prepared(installed.graphs, programs, (), kernels, (), ctx)
    if isinstance(backend, Elsewhere):
        backend.leave()
    programs.clear(), kernels.clear()
    return {path.replace(source.digest, "DIGEST"): data for path, data in prepared().files}, ctx


@pytest.mark.parametrize(("kind", "source", "binary"), [(Elsewhere, "kernel.c", "kernel.so"), (Elsewhere2, "kernel.c11", "kernel.bin")])
def test_a_backend_gives_names_library_and_its_own_part(tiny_bundle: Path, tmp_path: Path, kind: type[Elsewhere], source: str,
                                                        binary: str) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "simd.h").write_text("// four lanes")
    files, _ = emitted_by(tiny_bundle, kind(tmp_path))
    assert {path for path in files if path.startswith("kernels/") and not path.endswith(".cuh")} == {f"kernels/DIGEST/{source}",
                                                                                                     f"kernels/DIGEST/{binary}"}
    assert {path: data for path, data in files.items() if path.startswith(("include/", "extension/"))} == {
        "include/acme/simd.h": b"// four lanes", "extension/run/Makefile": b"all:"}
    unbuilt, _ = emitted_by(tiny_bundle, kind(tmp_path), built=False)
    assert files.keys() - unbuilt.keys() == {f"kernels/DIGEST/{binary}"}


@pytest.mark.parametrize("path", ["../setup.py", "/etc/passwd", "a/../../b", "", "."])
def test_a_backend_that_writes_elsewhere_loses_its_part_and_is_named(tiny_bundle: Path, tmp_path: Path, path: str,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Elsewhere, "part", {"fine.txt": b"", path: b""})
    files, ctx = emitted_by(tiny_bundle, Elsewhere(tmp_path))
    assert not [name for name in files if name.startswith("extension")]
    assert [(f.plugin, f.stage) for f in ctx.catalog.failures] == [("elsewhere", StageName.EMIT)]
    assert repr(path) in ctx.catalog.failures[0].message


def test_an_older_bundle_is_replaced_whole(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(tiny_bundle, folder)
    (folder / "left_over.txt").write_text("from the older bundle")
    emit.write(in_memory(tiny_bundle), folder)
    assert files_of(folder) == files_of(tiny_bundle)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_failed_write_leaves_the_older_bundle_and_nothing_else(tiny_bundle: Path, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "b"
    shutil.copytree(tiny_bundle, folder)
    written, real = [], Path.write_bytes

    def full_disk(self: Path, data: bytes) -> int:
        written.append(self)
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(UsageError, match="No space left on device"):
        emit.write(in_memory(tiny_bundle), folder)
    monkeypatch.undo()
    assert len(written) == 5
    assert files_of(folder) == files_of(tiny_bundle)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_bundle_appears_only_when_it_is_complete(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], Path.write_bytes

    def look(self: Path, *args: object, **more: object) -> int:
        seen.append((tmp_path / "b").exists())
        return real(self, *args, **more)

    monkeypatch.setattr(Path, "write_bytes", look)
    emit.write(in_memory(tiny_bundle), tmp_path / "b")
    assert seen and not any(seen)
    assert (tmp_path / "b" / MANIFEST).is_file()


def test_a_path_that_leaves_the_bundle_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(tiny_bundle, folder)
    (tmp_path / "secret").write_text("x")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"].append({"path": "../secret", "sha256": hashlib.sha256(b"x").hexdigest()})
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="outside"):
        bundle_reader.read(folder)


def test_a_kernel_whose_hash_was_changed_with_it_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(tiny_bundle, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    path = manifest["kernels"][0]["path"]
    (folder / path).write_bytes(b"\x7fELF not this one")
    entry = next(e for e in manifest["files"] if e["path"] == path)
    entry["sha256"] = hashlib.sha256(b"\x7fELF not this one").hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="damaged"):
        bundle_reader.read(folder)


def test_an_operator_outside_of_torch_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    shutil.copytree(tiny_bundle, folder)
    text = (folder / "graphs.json").read_text()
    changed = text.replace('"aten.', '"os.', 1)
    assert changed != text
    (folder / "graphs.json").write_text(changed)
    manifest = json.loads((folder / MANIFEST).read_text())
    next(e for e in manifest["files"] if e["path"] == "graphs.json")["sha256"] = hashlib.sha256(changed.encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(Exception, match=r"os\.|aten"):
        loaded = api.load(folder, str(TINY), device="cpu")
        loaded.generate(loaded.tokenizer("This", return_tensors="pt").input_ids, 2, eos_token_id=None)


def test_load_executes_nothing_of_the_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    folder, proof = tmp_path / "b", tmp_path / "proof"
    shutil.copytree(tiny_bundle, folder)
    trap = f"import pathlib; pathlib.Path({str(proof)!r}).write_text('executed'); raise SystemExit('executed')\n"
    for name in ("setup.py", "conftest.py", "sitecustomize.py", "extension/setup.py", "extension/agentcompile_kernels/__init__.py",
                 "__init__.py", "agentcompile_plugin.py"):
        (folder / name).write_text(trap)
    (folder / "Makefile").write_text(f"all:\n\ttouch {proof}\n")
    manifest = json.loads((folder / MANIFEST).read_text())
    for entry in manifest["files"]:  # even where the hashes agree
        entry["sha256"] = hashlib.sha256((folder / entry["path"]).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    before = set(sys.modules)
    loaded = api.load(folder, str(TINY), device="cpu")
    ids = loaded.tokenizer("When an exception", return_tensors="pt").input_ids
    assert loaded.generate(ids, 4, eos_token_id=None).shape == (1, ids.shape[1] + 4)
    assert not proof.exists()
    new = [sys.modules[name] for name in set(sys.modules) - before]
    assert not [m for m in new if str(getattr(m, "__file__", "") or "").startswith(str(folder))]


def test_load_neither_compiles_nor_captures_what_the_store_has(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core import pipeline
    from agentcompile_core.installation import building, install
    from agentcompile_core.stages.capture.frontends import HuggingFaceFrontend

    store = Store(tmp_path)
    api.load(tiny_bundle, str(TINY), device="cpu", store=store)

    def never(*args: object, **more: object) -> None:
        raise AssertionError("a loaded bundle must not do this")

    for module, name in ((HuggingFaceFrontend, "capture"), (pipeline, "compile_graphs"), (pipeline, "built"), (building, "built"),
                         (building, "build_one"), (install, "build_one")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(subprocess, "Popen", never)
    loaded = api.load(tiny_bundle, str(TINY), device="cpu", store=store)
    ids = loaded.tokenizer("When an exception", return_tensors="pt").input_ids
    assert loaded.generate(ids, 3, eos_token_id=None).shape[1] == ids.shape[1] + 3
    assert loaded.compilation is None and loaded.statistics == {}


def test_a_loaded_model_says_that_it_cannot_be_saved_again(tiny_bundle: Path, tmp_path: Path) -> None:
    loaded = api.load(tiny_bundle, str(TINY), device="cpu")
    with pytest.raises(UsageError, match="copy that folder"):
        loaded.save(tmp_path / "b")
