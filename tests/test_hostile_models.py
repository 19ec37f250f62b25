"""Checkpoints that try to make the host fetch, import or run something: refused or ignored, and said; nothing of them is executed."""

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.errors import UsageError
from agentcompile_core.stages.capture.checkpoint_check import INDEX, check_index
from agentcompile_core.stages.capture.huggingface import load_pretrained

TINY = Path(__file__).parents[1] / "examples" / "tiny_model"
KERNEL = "somebody/kernel"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny model, with code in every place where transformers looks for some."""
    found = tmp_path / "model"
    shutil.copytree(TINY, found)
    trap = f"import pathlib; pathlib.Path({str(tmp_path / 'canary')!r}).write_text('executed')\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "kernel/__init__.py", "__init__.py",
                 "custom_generate/generate.py", "sitecustomize.py"):
        (found / name).parent.mkdir(exist_ok=True)
        (found / name).write_text(trap)
    return found


@pytest.fixture(autouse=True)
def _nothing_leaves_and_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    asked: list[object] = []

    def refuse(*what: object, **more: object) -> None:
        asked.append(what)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not asked and not (tmp_path / "canary").exists()


def edit(path: Path, **keys: object) -> None:
    document = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**document, **keys}))


def opened(folder: Path, random_weights: int | None = None) -> Any:
    return load_pretrained(str(folder), dtype=None, device="cpu", meta=False, random_weights=random_weights)


CODE = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil",
        "AutoTokenizer": ["tokenization_evil.T", None]}


@pytest.mark.parametrize(("keys", "said"), [
    ({"auto_map": CODE}, "auto_map"),
    ({"attn_implementation": KERNEL}, "attn_implementation"),
    ({"_attn_implementation": KERNEL}, "attn_implementation"),
    ({"attn_implementation": f"{KERNEL}:evil"}, "attn_implementation"),
    ({"attn_implementation": {"": KERNEL}}, "attn_implementation"),
    ({"attn_implementation": "flash_attention_2"}, "attn_implementation"),
    ({"experts_implementation": KERNEL}, "experts_implementation"),
    ({"custom_pipelines": {"text": {"impl": "modeling_evil.Evil"}}}, "custom_pipelines"),
    ({"use_kernels": True}, "use_kernels"),
    ({"kernel_config": {"RMSNorm": "somebody/kernel:Norm"}}, "kernel_config"),
    ({"custom_generate": KERNEL, "trust_remote_code": True}, "custom_generate"),
    ({"transformers_weights": "../../other.safetensors"}, "transformers_weights"),
])
def test_what_a_configuration_would_fetch_or_import_is_stripped_and_said(folder: Path, keys: dict, said: str) -> None:
    edit(folder / "config.json", **keys)
    loaded = opened(folder)
    assert any(said in note and "ignored" in note for note in loaded.notes), loaded.notes
    assert loaded.module.config._attn_implementation in ("sdpa", "eager") and loaded.tokenizer is not None


def test_the_tokenizers_and_the_generation_files_keys_run_nothing(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.T", "tokenization_evil.T"]})
    edit(folder / "generation_config.json", custom_generate=KERNEL, trust_remote_code=True)
    loaded = opened(folder)
    assert loaded.module.generate(loaded.tokenizer("This", return_tensors="pt").input_ids, max_new_tokens=2).shape[1] > 1


def test_an_honest_checkpoint_is_opened_without_a_word(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "m")
    assert opened(tmp_path / "m").notes == ()


def test_quantized_weights_are_refused_and_random_ones_are_not_quantized(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    with pytest.raises(UsageError, match=r"quantized \(fp8\)"):
        opened(folder)
    assert any("quantization_config" in note for note in opened(folder, random_weights=1).notes)


def sharded(folder: Path, names: list[str]) -> Path:
    weights = next(folder.glob("*.safetensors"))
    weights.rename(folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {f"p{i}": name for i, name in enumerate(names)}}))
    return folder


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/part.safetensors", "part.bin", "pytorch_model.bin", "part.pt",
                                  "", ".", "..", "..\\part.safetensors", "part.safetensors\0"])
def test_an_index_that_names_anything_but_safetensors_beside_it_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="beside it"):
        opened(sharded(folder, ["part.safetensors", name]))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=12), lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["weight_map", "metadata", "x"]), inner, max_size=3), max_leaves=6))
def test_any_index_is_read_or_refused_in_a_sentence(tmp_path_factory: pytest.TempPathFactory, document: object) -> None:
    path = tmp_path_factory.mktemp("index") / INDEX
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError):
        check_index(path)  # no generated text ends in .safetensors


def test_an_honest_index_is_read(folder: Path) -> None:
    from safetensors import safe_open

    with safe_open(next(folder.glob("*.safetensors")), "pt") as file:
        parameters = list(file.keys())
    sharded(folder, [])
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(parameters, "part.safetensors")}))
    assert opened(folder).notes == ()


@pytest.mark.parametrize("name", ["adapter_config.json", ".metadata"])
def test_pieces_that_are_unpickled_or_name_another_model_are_refused(folder: Path, name: str) -> None:
    (folder / name).write_text(json.dumps({"base_model_name_or_path": KERNEL, "peft_type": "LORA"}))
    with pytest.raises(UsageError, match=name):
        opened(folder)


def test_a_weight_file_must_be_a_file_of_the_folder_or_of_the_cache_it_came_from(folder: Path, tmp_path: Path) -> None:
    weights = next(folder.glob("*.safetensors"))
    blobs = tmp_path / "hub" / "blobs"
    blobs.mkdir(parents=True)
    shutil.move(weights, blobs / "0123")
    weights.symlink_to(blobs / "0123")
    with pytest.raises(UsageError, match="outside of the model's folder"):
        opened(folder)
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    shutil.copytree(folder, snapshot, symlinks=True)
    assert opened(snapshot).notes == ()
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(UsageError, match="no regular file"):
        opened(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8 + b"{}", b"\x02\0\0\0\0\0\0\0{}", b"\x80\x04K\x01.",
                                     (1 << 60).to_bytes(8, "little") + b"{"])
def test_a_hostile_header_of_safetensors_is_one_sentence(folder: Path, content: bytes) -> None:
    next(folder.glob("*.safetensors")).write_bytes(content)
    with pytest.raises(UsageError):
        opened(folder)
