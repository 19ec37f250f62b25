"""Bundles made by somebody else: whatever was changed in them, they are refused in a sentence or compute the same; nothing of them runs."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentcompile_core import api
from agentcompile_core.errors import UsageError
from agentcompile_core.ir import serial
from agentcompile_core.ir.bundle import MANIFEST
from agentcompile_core.ops.allowed import refusal
from agentcompile_core.ops.overloads import operator_of
from agentcompile_core.runtime import bundle_reader

TINY = Path(__file__).parents[1] / "examples" / "tiny_model"
PARTS = ("graphs.json", "programs.json", "selections.json", "records.json")
Documents = dict[str, Any]


@pytest.fixture(scope="module")
def honest(tiny_bundle: Path) -> Documents:
    """Every JSON document of the bundle by name."""
    return {name: json.loads((tiny_bundle / name).read_text()) for name in (MANIFEST, *PARTS)}


@pytest.fixture(scope="module")
def folder(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the bundle that ``tampered`` rewrites."""
    found = tmp_path_factory.mktemp("hostile") / "b"
    shutil.copytree(tiny_bundle, found)
    return found


def tampered(folder: Path, documents: Documents) -> Path:
    """The bundle with these documents, every hash of the manifest made to agree."""
    for name in PARTS:
        (folder / name).write_text(json.dumps(documents[name]))
    manifest = copy.deepcopy(documents[MANIFEST])
    for entry in manifest.get("files", []) if isinstance(manifest, dict) and isinstance(manifest.get("files"), list) else []:
        if isinstance(entry, dict) and entry.get("path") in PARTS:
            entry["sha256"] = hashlib.sha256((folder / entry["path"]).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def changed(folder: Path, honest: Documents, change: Callable[[Documents], object]) -> Path:
    documents = copy.deepcopy(honest)
    change(documents)
    return tampered(folder, documents)


def nodes(documents: Documents, op: str) -> list[dict]:
    return [n for g in documents["graphs.json"]["graphs"] for n in g["nodes"] if n["op"] == op]


def overloads() -> Iterator[tuple[str, Any]]:
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if name == schema.name:
            continue
        overload = schema.overload_name or "default"
        found = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if isinstance(found, torch._ops.OpOverload):
            yield f"aten.{name}.{overload}", found


# ---- operators


def test_every_operator_with_an_effect_beyond_its_tensors_is_refused() -> None:
    """Over all overloads of this torch: what is allowed returns tensors, draws nothing, and writes at most its first operand."""
    allowed = {op: found for op, found in overloads() if not refusal(found)}
    assert len(allowed) > 600
    words = ("from_file", "save", "print", "warn", "assert", "resize", "set_", "record", "randn", "randint", "randperm",
    "bernoulli", "multinomial",
             "_cuda", "item", "pin_memory", "rename", "sym_", "_test", "_foreach", "quantize", "cudnn", "mkldnn", "storage")
    for op, found in allowed.items():
        name, schema = op.split(".")[1], found._schema
        assert not [w for w in words if w in name], op
        assert schema.returns and all("Tensor" in str(one.type) for one in schema.returns), op
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert written in ([], ["self"], ["input"]), op
        assert torch.Tag.inplace_view not in found.tags or op == "aten.detach_.default", op
        assert not [a for a in schema.arguments if a.name in ("filename", "out", "file") or "Storage" in str(a.type)], op
        if torch.Tag.nondeterministic_seeded in found.tags:
            assert any(a.name in ("p", "train", "training", "dropout_p", "dropout") for a in schema.arguments), op


@pytest.mark.parametrize("op", [
    "aten.from_file.default", "aten.from_file.out", "aten.set_.source_Storage", "aten.set_.source_Tensor", "aten.resize_.default",
    "aten.resize_as_.default", "aten._print.default", "aten.save.default", "aten._assert_async.msg", "aten.rand.default",
    "aten.randn_like.default",
    "aten.bernoulli_.float", "aten.normal_.default", "aten.add.out", "aten.item.default", "aten._local_scalar_dense.default",
    "aten.t_.default",
    "aten.unsqueeze_.default", "aten.as_strided_.default", "aten.record_stream.default", "aten._cudnn_init_dropout_state.default",
    "aten.requires_grad_.default", "aten.pin_memory.default", "aten._foreach_add_.Scalar", "prims.rng_prims.philox_rand",
    "prims.normal.default",
    "prims.device_put.default", "prims.resize.default", "prims._make_token.default", "os.system.default",
    "aten.__class__.default", "aten..", ""])
def test_an_operator_outside_the_closed_list_is_refused_by_name(op: str) -> None:
    with pytest.raises(UsageError) as caught:
        operator_of(op)
    assert op.split(".")[0] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("op", [
    "aten.linear.default", "aten.silu.default", "aten.scaled_dot_product_attention.default", "aten.embedding.default",
    "aten.dropout.default",
    "aten.dropout_.default", "aten.copy_.default", "aten.index_put_.default", "aten.relu_.default", "aten.batch_norm.default",
    "aten.gelu.default",
    "aten.conv2d.default", "aten.einsum.default", "aten.softmax.int", "aten.to.dtype", "aten.arange.start_step", "aten.masked_fill.Scalar",
    "aten.lstm.input", "aten.upsample_nearest2d.vec", "aten.group_norm.default", "prims.convert_element_type.default"])
def test_what_models_are_made_of_is_allowed(op: str) -> None:
    assert callable(operator_of(op))


def test_a_graph_that_writes_a_file_is_refused_before_anything_runs(folder: Path, honest: Documents, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    canary = tmp_path / "canary"

    def change(documents: Documents) -> None:
        node = nodes(documents, "aten.silu.default")[0]
        node.update(op="aten.from_file.default", args=[str(canary), True, 64], kwargs=[])

    monkeypatch.setattr(api, "context", lambda *a, **k: pytest.fail("nothing may be opened for a bundle that is refused"))
    with pytest.raises(UsageError, match=r"aten\.from_file\.default"):
        api.load(changed(folder, honest, change), str(TINY), device="cpu")
    assert not canary.exists()


@pytest.mark.parametrize("size", [10**15, 10**18, 2**62, 2**70, -1])
def test_an_absurd_size_is_a_sentence(folder: Path, honest: Documents, size: int) -> None:
    def in_a_node(documents: Documents) -> None:
        node = nodes(documents, "aten.arange.default")[0]
        node["args"] = [size]

    def in_a_value(documents: Documents) -> None:
        documents["graphs.json"]["graphs"][0]["values"][-1]["spec"]["shape"] = [size]

    for change in (in_a_node, in_a_value):
        with pytest.raises(UsageError) as caught:
            bundle_reader.read(changed(folder, honest, change))
        assert "\n" not in str(caught.value)


def test_a_graph_may_not_write_to_weights_not_even_through_a_view(folder: Path, honest: Documents) -> None:
    def change(documents: Documents) -> None:
        graph = documents["graphs.json"]["graphs"][0]
        weight = next(v for v in graph["values"] if v["kind"] == "weight" and len(v["spec"]["shape"]) == 2)
        rows, columns = weight["spec"]["shape"]
        for name in ("turned", "spoilt"):
            graph["values"].append({**copy.deepcopy(weight), "name": name, "kind": "intermediate", "source": ""})
        graph["values"][-1]["spec"]["shape"] = graph["values"][-2]["spec"]["shape"] = [rows * columns]
        plain = {"kwargs": [], "kind": "view", "module": "", "layer": -1, "mutates": []}
        graph["nodes"] += [{**plain, "name": "turned", "op": "aten.view.default", "args": [{"ref": weight["name"]}, [rows * columns]],
                            "outputs": ["turned"]},
                           {**plain, "name": "spoilt", "op": "aten.zero_.default", "args": [{"ref": "turned"}], "outputs": ["spoilt"],
                            "mutates": ["turned"]}]

    with pytest.raises(UsageError, match="writes to a weight"):
        bundle_reader.read(changed(folder, honest, change))


def test_a_write_that_is_not_declared_and_one_as_in_training_are_refused(folder: Path, honest: Documents) -> None:
    def undeclared(documents: Documents) -> None:
        nodes(documents, "agentcompile.attention.default")[0]["mutates"] = []

    def training(documents: Documents) -> None:
        node = nodes(documents, "aten.silu.default")[0]
        node.update(op="aten.dropout.default", args=[*node["args"], 0.5, True])

    for change, said in ((undeclared, "declares"), (training, "as in training")):
        with pytest.raises(UsageError, match=said):
            bundle_reader.read(changed(folder, honest, change))


# ---- files


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a\0b", "x" * 5000, "loop", "kernels", ""])
def test_paths_that_leave_the_bundle_or_are_no_files_are_refused(folder: Path, honest: Documents, path: str) -> None:
    (folder.parent / "secret").write_text("x")
    if not (folder / "loop").is_symlink():
        (folder / "loop").symlink_to(folder / "loop")
    add = {"path": path, "sha256": hashlib.sha256(b"x").hexdigest()}
    with pytest.raises(UsageError):
        bundle_reader.read(changed(folder, honest, lambda d: d[MANIFEST]["files"].append(add)))


def test_files_are_read_up_to_a_limit(folder: Path, honest: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_reader, "MAX_BUNDLE_BYTES", 10_000)
    with pytest.raises(UsageError, match="larger than"):
        bundle_reader.read(tampered(folder, honest))


def test_an_honest_bundle_is_read_after_all_that(folder: Path, honest: Documents, tiny_bundle: Path) -> None:
    assert bundle_reader.read(tampered(folder, honest)).programs == bundle_reader.read(tiny_bundle).programs


# ---- generated tampering


JUNK = st.sampled_from([None, True, -1, 0, 1, 7, 10**15, 2**63, 1.5, "", "x", "../x", "/etc/passwd", "aten.from_file.default",
                        "aten.mul.Tensor", [], {}, [1], {"ref": "nowhere"}, {"symbol": "dtype", "name": "float64"}, "\0"])
FEW = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """(container, key) of a document, the first of long lists only."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 6)) if isinstance(value, list) else []
    found = [(value, key) for key in keys]
    return found + [place for key in keys if depth < 9 for place in places(value[key], depth + 1)]


@pytest.mark.slow
@FEW
@given(data=st.data())
def test_any_field_changed_is_refused_in_a_sentence_or_reads_as_values(folder: Path, honest: Documents, data: Any) -> None:
    documents = copy.deepcopy(honest)
    document = documents[data.draw(st.sampled_from([MANIFEST, "graphs.json", "programs.json"]), label="document")]
    container, key = data.draw(st.sampled_from(places(document)), label="place")
    what = data.draw(st.sampled_from(["replace", "drop", "swap"]), label="what")
    if what == "replace":
        container[key] = data.draw(JUNK, label="junk")
    elif what == "drop":
        del container[key]
    else:
        other = data.draw(st.sampled_from(places(document)), label="other")
        container[key] = copy.deepcopy(other[0][other[1]]) if isinstance(other[1], (str, int)) else None
    before = {p.name for p in folder.parent.iterdir()}
    bundle = tampered(folder, documents)
    try:
        read = bundle_reader.read(bundle)
    except UsageError as exc:
        assert str(bundle) in str(exc) and ";" in str(exc) and "\n" not in str(exc) and len(str(exc)) < 2000  # where, and what to do
    else:
        for node in (n for g in read.graphs.graphs for n in g.nodes):
            operator_of(node.op)
    assert {p.name for p in folder.parent.iterdir()} == before


# ---- where the model came from


@pytest.mark.parametrize("kind", ["file", "project", "identifier", "missing", "relative"])
def test_a_source_is_a_hint_and_never_run(cli, folder: Path, honest: Documents, tmp_path: Path, kind: str) -> None:
    canary, project = tmp_path / "canary", tmp_path / "project"
    project.mkdir()
    (project / "model.py").write_text(f"open({str(canary)!r}, 'w').write('executed')\n")
    source = {"file": str(project / "model.py"), "project": str(project), "identifier": "somebody/model",
              "missing": str(tmp_path / "gone"), "relative": "examples/tiny_model"}[kind]
    bundle = changed(folder, honest, lambda d: d[MANIFEST].update(source=source))
    code, out, err = cli("generate", "--bundle", bundle, "--prompt", "x", "--device", "cpu")
    assert code == 2 and not out and source in err and "name the model" in err and not canary.exists()
    assert ("it is executed" in err) == (kind in ("file", "project"))


def test_a_folder_of_data_is_opened_without_naming_it_again(cli, tiny_bundle: Path) -> None:
    code, out, err = cli("generate", "--bundle", tiny_bundle, "--prompt", "When an", "--max-new-tokens", 2, "--device", "cpu")
    assert code == 0 and out.startswith("When an"), err


def test_a_model_file_is_announced_before_it_is_executed(cli, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("import sys\nprint('now', file=sys.stderr)\nraise SystemError('enough')\n")
    for what in (path, tmp_path):
        code, _, err = cli("compile", what, "--device", "cpu")
        assert code == 2 and err.index(f"{path} is executed") < err.index("now")


def test_documents_of_the_bundle_round_trip(honest: Documents) -> None:
    """What the tampering starts from is what the reader reads."""
    assert serial.parse(json.dumps(honest["graphs.json"])) == honest["graphs.json"]
