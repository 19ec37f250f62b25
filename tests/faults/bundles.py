"""Bundles of somebody else: refused in a sentence, run on the framework, or by the user's word; nothing of them runs on the host."""

import copy
import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from attrs import evolve

from agentcompile_core import api
from agentcompile_core.configuration import files
from agentcompile_core.report import audit, audit_words
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.stages.emit import evidence, write
from agentcompile_core.store import Store
from agentcompile_core.testing.fake_kernels import BEHAVIOURS

from . import cheap
from .registry import add, fault
from .seen import command, noted, refused

AREA, KEPT = "bundles", "nothing of it ran"
PARTS = ("graphs.json", "programs.json", "selections.json", "records.json", "decisions.json", "failures.json", "search.json")
Documents = dict[str, Any]


@cache
def _made() -> Any:
    """The honest bundle's compilation and its model file, made once."""
    folder = Path(mkdtemp(prefix="faults-bundle-"))
    model = cheap.module(folder)
    return cheap.compiled(model, Store(folder / "store"), workers=cheap.HERE, family=cheap.Family("honest", "wrong")), model


def _changed(folder: Path, change: Callable[[Documents], object], *, rehash: bool = True) -> Path:
    """The bundle after ``change`` of its documents, every hash of the manifest made to agree."""
    made, _ = _made()
    target = made.save(folder / "bundle")
    names = ("manifest.json", *(name for name in PARTS if (target / name).is_file()))
    documents = {name: json.loads((target / name).read_text()) for name in names}
    before = copy.deepcopy(documents)
    change(documents)
    for name in names[1:]:
        if documents[name] != before[name]:
            (target / name).write_text(json.dumps(documents[name]))
    for entry in documents["manifest.json"].get("files", ()) if rehash else ():
        path = target / entry["path"]
        if path.is_file() and path.is_relative_to(target):
            entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (target / "manifest.json").write_text(json.dumps(documents["manifest.json"]))
    return target


def _nodes(documents: Documents) -> list[dict[str, Any]]:
    return [node for graph in documents["graphs.json"]["graphs"] for node in graph["nodes"]]


def _read(change: Callable[[Documents], object], words: str, *, rehash: bool = True) -> Any:
    def run(folder: Path) -> str:
        target, canary = _changed(folder, change, rehash=rehash), Path("/tmp/faults-canary")
        said = refused(lambda: bundle_reader.read(target), words)
        assert not canary.exists()
        code, out, err = command("explain", target)
        assert code == 2 and not out and "Traceback" not in err
        return said

    return run


def _set(name: str, **values: Any) -> Callable[[Documents], object]:
    return lambda documents: documents[name].update(values)


def _node(**values: Any) -> Callable[[Documents], object]:
    return lambda documents: _nodes(documents)[0].update(values)


def _kernel_hash(documents: Documents) -> None:
    documents["manifest.json"]["kernels"][0]["sha256"] = "0" * 64


def _outside(documents: Documents) -> None:
    documents["manifest.json"]["files"].append({"path": "../../etc/passwd", "sha256": "0" * 64})


REFUSED: dict[str, tuple[Callable[[Documents], object], str]] = {
    "with an operator that writes a file": (_node(op="aten.from_file.default", args=["/tmp/faults-canary", True, 64]), "aten.from_file"),
    "with an operator that is no operator": (_node(op="os.system.default", args=["touch /tmp/faults-canary"]), "os.system"),
    "with an operator that draws random numbers": (_node(op="aten.rand.default", args=[[100]]), "aten.rand"),
    "with a node of a size that nothing has": (_node(op="aten.arange.default", args=[10**18]), ""),
    "with a node that reads what is not there": (_node(args=[{"ref": "ghost"}, {"ref": "ghost"}]), ""),
    "of another schema": (_set("manifest.json", schema=99), "schema 99"),
    "of another version": (_set("manifest.json", core_version="7.0.0"), "7.0.0"),
    "with a field that nobody knows": (_set("manifest.json", run="me"), ""),
    "with a kernel of another hash": (_kernel_hash, "damaged"),
    "that names a file outside of it": (_outside, "outside"),
    "without its programs": (lambda d: d["programs.json"].clear(), "no program"),
    "with a program of another graph": (lambda d: d["programs.json"][0].update(graph="ghost"), "ghost"),
    "with a record that is none": (lambda d: d["records.json"].append({"key": 1}), ""),
    "with a selection that is none": (lambda d: d["selections.json"].append([]), ""),
}
for _name, (_change, _words) in REFUSED.items():
    add(AREA, f"a bundle {_name}", f"a bundle {_name}, every hash made to agree", _read(_change, _words), KEPT)
add(AREA, "a bundle that was changed after it was written", "a selection of the bundle is edited", lambda folder: _edited(folder), KEPT)


def _edited(folder: Path) -> str:
    target = _made()[0].save(folder / "bundle")
    path = target / "selections.json"
    path.write_text(path.read_text().replace("honest", "wrong "))
    return refused(lambda: bundle_reader.read(target), "was changed after it was emitted")


TEXTS = {"that is no JSON": "{", "of deep JSON": "[" * 100_000, "that is empty": "", "that is a list": "[]", "with NaN": '{"schema": NaN}'}


def _manifest(text: str) -> Any:
    def run(folder: Path) -> str:
        target = _made()[0].save(folder / "bundle")
        (target / "manifest.json").write_text(text)
        return refused(lambda: bundle_reader.read(target), "")

    return run


for _name, _text in TEXTS.items():
    add(AREA, f"a manifest {_name}", f"a bundle's manifest.json {_name}", _manifest(_text), KEPT)


@fault(AREA, "a bundle whose `source` names a Python file", "the file was not run")
def _a_source_that_is_code(folder: Path) -> str:
    canary, trap = folder / "canary", folder / "model.py"
    trap.write_text(f"open({str(canary)!r}, 'w').close()\n")
    target = _changed(folder, _set("manifest.json", source=str(trap)))
    code, out, err = command("generate", "--bundle", target, "--prompt", "x", "--device", "cpu")
    assert code == 2 and not out and "name the" in err and not canary.exists()
    return err


def _loaded(folder: Path, target: Path, **options: Any) -> Any:
    return cheap.loaded(target, _made()[1], Store(folder / "own"), workers=cheap.HERE, **options)


def _adds(made: Any) -> None:
    a, b = torch.randn(100), torch.randn(100)
    assert torch.equal(made(a, b), a + b), "the program is wrong"


def _foreign(documents: Documents) -> None:
    """A step whose source no family makes: it would be off by 1 %."""
    text = json.dumps(documents["programs.json"]).replace("behave=honest", "behave=wrong")
    documents["programs.json"][:] = json.loads(text)


@fault(AREA, "a bundle brings a kernel that no installed family makes", "the framework ran in its place; the result is right")
def _a_kernel_of_nobody(folder: Path) -> str:
    made = _loaded(folder, _changed(folder, _foreign))
    _adds(made)
    return next(note for note in made.notes if "framework's operators run instead" in note)


@fault(AREA, "a bundle brings a binary that this cache does not know", "it was built here from the installed family; the result is right")
def _a_binary_of_nobody(folder: Path) -> str:
    made = _loaded(folder, _made()[0].save(folder / "bundle"))
    _adds(made)
    return next(note for note in made.notes if "made again from the installed families" in note)


def _made_again(behaviour: str, workers: str, words: str) -> Any:
    def run(folder: Path) -> str:
        from test_rebuilt_kernels import with_behaviour

        target = with_behaviour(_made()[0], behaviour, folder / "bundle")
        made = cheap.loaded(target, _made()[1], Store(None), workers=workers, family=cheap.Family("honest", behaviour))
        for _ in range(20):
            _adds(made)
        return noted(made, words)

    return run


for _name in ("wrong", "lies", "stops", "lazy", "caches", "outside", "input_later"):
    add(AREA, f"a bundle whose kernel {BEHAVIOURS[_name]}",
        f"a bundle's kernel, which an installed family makes again, {BEHAVIOURS[_name]}",
        _made_again(_name, cheap.HERE, "made again here and not validated"), "it was validated here and did not pass; the result is right")
add(AREA, "a bundle whose kernel calls abort()", "a bundle's kernel, which an installed family makes again, ends the process that runs it",
    _made_again("abort", "agentcompile_core.testing.doubles:catalog", "SIGABRT"),
    "it ended a worker; the framework runs, the result is right")


@fault(AREA, "a bundle's kernels are not known here, and there is no time to validate them", "the framework ran; the result is right")
def _no_time_to_validate_a_bundle(folder: Path) -> str:
    made = _loaded(folder, _made()[0].save(folder / "bundle"), budget_s=1e-6)
    _adds(made)
    return noted(made, "within the budget of 1e-06 s")


@fault(AREA, "a project's file that comes with a checkout trusts kernels", "only the user may trust kernels")
def _a_project_that_trusts_kernels(folder: Path) -> str:
    (folder / "agentcompile.toml").write_text("trust_kernels = true\n")
    return refused(lambda: files.read(folder / "agentcompile.toml", of_project=True), "only your own file")


@fault(AREA, "a bundle is loaded for another module", "the module was not served by it")
def _a_bundle_of_another_model(folder: Path) -> str:
    from agentcompile_core.plugin.discovery import load_catalog

    other = cheap.module(folder, "a * b", "product")
    target = _made()[0].save(folder / "bundle")
    return refused(lambda: api.load(target, other, device="cpu", catalog=load_catalog(only=())), "pass the model it was compiled for")


def _audited(change: Callable[[Documents], object], words: str) -> Any:
    def run(folder: Path) -> str:
        target = _changed(folder, change)
        installed, found = bundle_reader.read(target), evidence.read(target)
        made = audit.audit(installed.selections, installed.records, found.decisions, installed.programs)  # type: ignore[arg-type]
        problems = [f"{one.kind} {one.subject}: {problem}" for one in made for problem in one.problems]
        assert any(words in problem for problem in problems), problems
        assert command("audit", target)[0] == 1 and "DOES NOT FOLLOW" in audit_words.text(made)
        return problems[0]

    return run


def _failed_record(documents: Documents) -> None:
    for record in documents["records.json"]:
        if "honest" in json.dumps(record["step"]):
            record["failure"] = "tolerance"
            record["verdict"]["outcome"] = "fail"


def _slow_record(documents: Documents) -> None:
    for record in documents["records.json"]:
        if "honest" in json.dumps(record["step"]):
            record["measurement"]["us"] = 50.0


AUDITED: dict[str, tuple[Callable[[Documents], object], str]] = {
    "whose record says that the selected kernel failed": (_failed_record, "failed"),
    "whose record says that the selected kernel is slow": (_slow_record, "not those of the records"),
    "without the record of its selected kernel": (
        lambda d: d["records.json"].__setitem__(slice(None), [r for r in d["records.json"] if "honest" not in json.dumps(r["step"])]),
        "no record of the run judged it"),
    "without a selection": (lambda d: d["selections.json"].clear(), "selected nothing"),
}
for _name, (_change, _words) in AUDITED.items():
    add(AREA, f"a run {_name}", f"a bundle {_name}: agentcompile audit", _audited(_change, _words),
        "the audit says which decision does not follow")


@fault(AREA, "an older bundle is replaced, and the save is killed in the middle of its files", "the older bundle is whole; nothing is left")
def _a_save_that_is_killed(folder: Path) -> str:
    import os
    import signal
    import subprocess
    import sys
    import time

    made, _ = _made()
    target = made.save(folder / "bundle")
    before = bundle_reader.read(target)
    code = ("import sys, time\nfrom pathlib import Path\nfrom agentcompile_core.private_folders import PrivateFolder\n"
            "p = PrivateFolder(Path(sys.argv[1]), '.bundle-private-')\n(p.path / 'half').write_text('x')\n"
            "print(p.path, flush=True)\ntime.sleep(60)\n")
    child = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    half = Path(child.stdout.readline().strip())
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert bundle_reader.read(target) == before and half.is_dir()
    os.utime(half, (time.time() - 120,) * 2)
    write(evolve(made.bundle), target)
    assert not half.exists() and bundle_reader.read(target) == before
    return "the older bundle was read whole; the next save removed the half of the killed one"
