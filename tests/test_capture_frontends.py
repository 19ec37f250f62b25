"""What a user may name, what comes of it, and the one sentence that a wrong name gets."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from agentcompile_cuda_kit.targets import preset
from safetensors.torch import load_file, save_file

from agentcompile_core import api
from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import UsageError
from agentcompile_core.ir.graph import DType, GraphKind, Workload
from agentcompile_core.ops.interpreter import compile_nodes
from agentcompile_core.plugin.interfaces import Frontend, LoadedModel
from agentcompile_core.stages import capture
from agentcompile_core.stages.capture import frontends as core_frontends
from agentcompile_core.stages.capture.comparison import weights_of
from agentcompile_core.stages.capture.describe import default_workload, describe

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True, "dtype": "float16",
}
MODULE = """
import torch

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, 4)

    def forward(self, x, gain):
        return torch.nn.functional.silu(self.inner(x)) * gain

def get_init_inputs():
    return [8]

def get_inputs():
    return [torch.ones(2, 8), torch.full((4,), 0.5)]
"""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core.stages.capture import huggingface

    monkeypatch.setattr(huggingface, "_reachable", lambda: False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tiny-llama"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def the_frontend(what: object) -> Frontend:
    found = [f for f in core_frontends.agentcompile_frontends() if f.accepts(what)]
    assert len(found) == 1, f"{what!r} is claimed by {[f.name for f in found]}"
    return found[0]


def load(what: object, **options: Any) -> LoadedModel:
    return the_frontend(what).load(what, options)


def context() -> Context:
    return Context(catalog=None, target=preset("h200"), config=Config(), store=None)  # type: ignore[arg-type]


def test_configuration_alone_gets_seeded_random_weights(folder: Path) -> None:
    loaded, again, other = load(folder), load(str(folder), random_weights=0), load(folder, random_weights=1)
    assert loaded.has_weights and loaded.name == "tiny-llama" and loaded.tokenizer is None
    first, same, different = (next(m.module.parameters()) for m in (loaded, again, other))
    assert first.dtype is torch.float16 and torch.equal(first, same) and not torch.equal(first, different)
    assert load(folder, dtype="float32").module.dtype is torch.float32


def test_meta_model_has_no_weights_and_the_same_digest(folder: Path) -> None:
    meta = load(folder, meta=True)
    assert not meta.has_weights
    assert describe(meta).digest == describe(load(folder)).digest
    assert describe(meta).digest != describe(load(folder, dtype="float32")).digest


def test_digest_depends_on_the_configuration(folder: Path) -> None:
    before = describe(load(folder, meta=True)).digest
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-3}))
    assert describe(load(folder, meta=True)).digest != before


def test_safetensors_are_read(folder: Path) -> None:
    load(folder, random_weights=5).module.save_pretrained(folder)
    loaded, want = load(folder), load(folder, random_weights=5)
    assert all(torch.equal(a, b) for a, b in zip(loaded.module.parameters(), want.module.parameters()))
    assert not any(p.requires_grad for p in loaded.module.parameters()) and not loaded.module.training


def test_default_workload(folder: Path) -> None:
    assert default_workload(load(folder, meta=True).module) == Workload(dtype=DType.F16, max_context=128)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 131072}))
    assert default_workload(load(folder, meta=True).module).max_context == 8192


def break_file(folder: Path, change: str) -> None:
    """Spoil a complete model folder in one way."""
    config = folder / "config.json"
    if change == "broken json":
        config.write_text('{"model_type": "llama",')
    elif change == "no model type":
        config.write_text('{"hidden_size": 3}')
    elif change == "unknown model type":
        config.write_text(json.dumps({**CONFIG, "model_type": "no_such_model"}))
    elif change == "no language model":
        config.write_text(json.dumps({"model_type": "vit", "num_hidden_layers": 1}))
    elif change == "own code":
        config.write_text(json.dumps({**CONFIG, "model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}))
        (folder / "code.py").write_text("raise SystemExit('ran')")
    elif change == "pickle":
        torch.save({}, folder / "pytorch_model.bin")
    elif change == "cut weights":
        load(folder).module.save_pretrained(folder)
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:1000])
    elif change == "missing weight":
        load(folder).module.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("model.norm.weight")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif change == "wrong shape":
        load(folder).module.save_pretrained(folder)
        config.write_text(json.dumps({**CONFIG, "intermediate_size": 56}))
    elif change == "impossible":
        config.write_text(json.dumps({**CONFIG, "hidden_size": "wide"}))


@pytest.mark.parametrize(("change", "sentence"), [
    ("broken json", "not valid JSON"),
    ("no model type", "names no model_type"),
    ("unknown model type", "cannot read the configuration"),
    ("no language model", "cannot be built as a causal language model"),
    ("own code", "cannot read the configuration"),
    ("pickle", "pickled weights .*convert them to safetensors"),
    ("cut weights", "cannot be loaded|no safetensors weights"),
    ("missing weight", "lack 1 parameters, such as model.norm.weight"),
    ("wrong shape", "other shapes than its config.json says"),
    ("impossible", "cannot"),
])
def test_broken_folder_gets_one_sentence(folder: Path, change: str, sentence: str) -> None:
    break_file(folder, change)
    with pytest.raises(UsageError, match=sentence) as caught:
        load(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("what", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", Path("nowhere")])
def test_missing_folder_gets_one_sentence(what: object) -> None:
    with pytest.raises(UsageError, match="no folder"):
        load(what)


def test_unknown_identifier_gets_one_sentence() -> None:
    with pytest.raises(UsageError, match="neither a folder here nor a model that can be fetched"):
        load("someone/no-such-model-anywhere")


def test_folder_without_anything_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        load(tmp_path)


def test_unknown_options_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="unknown option 'trust_remote_code'"):
        load(folder, trust_remote_code=True)
    with pytest.raises(UsageError, match="unknown dtype 'int4'"):
        load(folder, dtype="int4")


def test_live_model_is_captured_as_it_is(folder: Path) -> None:
    model = load(folder, dtype="float32").module
    loaded = load(model)
    assert loaded.module is model
    graphs = capture.run(loaded, Workload(dtype=DType.F32, max_context=32, prefill_chunks=(8,)), context())
    assert [g.name for g in graphs.graphs] == ["decode", "prefill_8", "prefill_8_fresh"] and graphs.model == describe(loaded)
    with pytest.raises(UsageError, match="the live model is float32 and float16 was asked for"):
        load(model, dtype="float16")


def forward(loaded: LoadedModel, *inputs: torch.Tensor) -> torch.Tensor:
    graphs = capture.run(loaded, Workload(dtype=DType.F32, max_context=2), context(), the_frontend(loaded.module))
    assert graphs.eager_reason == "" and graphs.graphs[0].kind is GraphKind.FORWARD
    graph = graphs.graphs[0]
    env = {**weights_of(loaded.module), **dict(zip(graph.inputs, inputs, strict=True))}
    return compile_nodes(graph, device="cpu").run(env)[graph.outputs[0]]


def test_live_module_needs_example_inputs() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU())
    x = torch.randn(2, 8)
    assert torch.equal(forward(load(module, example_inputs=(x,)), x), module(x))
    with pytest.raises(UsageError, match="needs example inputs"):
        load(module)


def test_module_file_and_project_folder(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODULE)
    x, gain = torch.randn(2, 8), torch.randn(4)
    from_file, from_folder = load(tmp_path / "model.py"), load(tmp_path)
    for loaded in (from_file, from_folder):
        assert torch.equal(forward(loaded, x, gain), loaded.module(x, gain))
    assert not load(tmp_path, meta=True).has_weights
    assert load(tmp_path, dtype="bfloat16").module.inner.weight.dtype is torch.bfloat16
    digest = describe(from_file).digest
    (tmp_path / "model.py").write_text(MODULE.replace("silu", "gelu"))
    assert describe(load(tmp_path / "model.py")).digest != digest


def test_project_names_its_module(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "net.py").write_text(MODULE)
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.agentcompile]\nmodule = "code/net.py"\n')
    assert load(tmp_path).name == tmp_path.name
    for text, sentence in (('[tool.agentcompile]\nmodule = "../../net.py"\n', "inside the folder"), ("[tool", "not valid TOML"),
                           ("[tool.other]\n", "neither config.json nor model.py")):
        project.write_text(text)
        with pytest.raises(UsageError, match=sentence):
            load(tmp_path)


@pytest.mark.parametrize(("text", "sentence"), [
    ("class Model: pass\ndef get_inputs(): return []", "lacks get_init_inputs"),
    ("1 / 0", "fails when it is run: ZeroDivisionError"),
    (MODULE.replace("[8]", "['a']"), "could not build its Model"),
    ("class Model: pass\ndef get_inputs(): return []\nget_init_inputs = get_inputs", "must be a torch.nn.Module"),
])
def test_broken_module_file_gets_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "net.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        load(path)
    with pytest.raises(UsageError, match="no file"):
        load(tmp_path / "other.py")


def test_uncapturable_module_says_why() -> None:
    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if bool(x.sum() > 0) else x

    loaded = load(Branches(), example_inputs=(torch.ones(3),))
    graphs = capture.run(loaded, Workload(dtype=DType.F32, max_context=2), context())
    assert graphs.graphs == () and "branches on the values of tensors" in graphs.eager_reason


@pytest.mark.parametrize(("workload", "sentence"), [
    (Workload(dtype=DType.F32, max_context=32, batch=2), "batch 2"),
    (Workload(dtype=DType.F32, max_context=1), "context of 1"),
    (Workload(dtype=DType.F32, max_context=32, prefill_chunks=()), "prompt chunks"),
    (Workload(dtype=DType.F16, max_context=32), "float16 .* float32"),
    (Workload(dtype=DType.F32, max_context=4096), "4096 .* 128"),
])
def test_impossible_workload_gets_one_sentence(folder: Path, workload: Workload, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        capture.run(load(folder, dtype="float32"), workload, context())


def test_accepting_imports_nothing_heavy() -> None:
    """``agentcompile plugins`` asks every frontend without waiting for torch."""
    import subprocess
    import sys

    code = (
        "import sys; from agentcompile_core.stages.capture.frontends import agentcompile_frontends as f\n"
        "assert [x.name for x in f() if x.accepts('a/b')] == ['huggingface']; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def test_broken_tokenizer_does_not_stop_the_model(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert load(folder).tokenizer is None


def test_bundled_tiny_model_speaks_through_its_tokenizer() -> None:
    source = Path(__file__).parents[1] / "examples" / "tiny_model"
    loaded = load(source, dtype="float32")
    assert loaded.tokenizer.decode(loaded.tokenizer("the file")["input_ids"]).strip() == "the file"
    assert loaded.has_weights


@pytest.mark.parametrize("cap", [None, 0.02])
def test_soft_caps_of_scores_are_computed_whatever_attention_transformers_prefers(tmp_path: Path, cap: float | None) -> None:
    """Versions before 5.23 load such a model with SDPA, which drops the cap."""
    config = {**CONFIG, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 8, "query_pre_attn_scalar": 1,
              "attn_logit_softcapping": cap, "final_logit_softcapping": None, "initializer_range": 0.4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path, dtype="float32", device="cpu", random_weights=1)
    graphs = capture.run(loaded, Workload(dtype=DType.F32, max_context=32, prefill_chunks=(8,)), context(), the_frontend(tmp_path))
    calls = [node for node in graphs.of_kind(GraphKind.DECODE)[0].nodes if node.op.startswith("agentcompile.attention")]
    assert len(calls) == 2 and all(cap is None or cap in (*node.args, *dict(node.kwargs).values()) for node in calls)
    assert loaded.module.config._attn_implementation == "eager" or cap is None  # against which the graphs were compared


def test_more_sizes_of_chunks_are_for_accelerators(folder: Path) -> None:
    """Each size of chunk is a capture, and a processor gets nothing back for them."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 131072}))
    loaded = load(folder, meta=True)
    chunks = {device: api._default_workload(loaded, None, None, device).prefill_chunks for device in ("cpu", "npu")}
    assert chunks == {"cpu": (128, 512), "npu": (128, 256, 512, 1024, 2048)}
    for context, wanted in ((16384, (128, 256, 512, 1024, 2048, 4096, 8192)), (16383, (128, 256, 512, 1024, 2048)),
                            (1000, (128, 256, 512, 1000))):
        assert api._default_workload(loaded, None, context, "npu").prefill_chunks == wanted
    assert api._default_workload(loaded, None, 300, "npu").prefill_chunks == (128, 256, 300)
