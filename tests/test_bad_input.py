"""Bad input gives one clear sentence on standard error and the right exit code: 2 where it was asked wrongly, 1 where it failed."""

import json
import shutil
from pathlib import Path

import pytest

TINY = Path(__file__).parents[1] / "examples" / "tiny_model"
QUICK = ("--device", "cpu", "--context", 64, "--budget-plans", 1, "--rounds", 1, "--budget-s", 0.01, "--no-cache")
PROMPT = ("--prompt", "This module", "--max-new-tokens", 4, "--device", "cpu")


def refused(result: tuple[int, str, str], *words: str, code: int = 2) -> str:
    """Check that a result is a refusal in one sentence that holds ``words``; return the sentence."""
    found, out, err = result
    assert found == code, (found, out, err)
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("[") and not line.endswith(" is executed")]  # what was shown before
    assert len(lines) == 1, err
    assert lines[0].startswith("agentcompile: ")
    assert "Traceback" not in err
    assert len(lines[0]) < 600
    missing = [word for word in words if word not in lines[0]]
    assert not missing, lines[0]
    return lines[0]


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def test_missing_folder(cli, tmp_path: Path) -> None:
    refused(cli("compile", tmp_path / "nowhere", *QUICK), "no folder", "nowhere", "config.json")


def test_empty_folder(cli, tmp_path: Path) -> None:
    refused(cli("compile", tmp_path, *QUICK), "config.json", str(tmp_path))


def test_unknown_identifier_without_a_network(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core.stages.capture import huggingface

    monkeypatch.setattr(huggingface, "_reachable", lambda: False)
    refused(cli("compile", "no-such-owner/no-such-model", *QUICK), "no-such-owner/no-such-model", "check the name or the network")


def test_broken_configuration(cli, tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "qwen3",')
    refused(cli("compile", folder, *QUICK), "config.json", "not valid JSON")


@pytest.mark.parametrize("text", ["[]", "{}", '{"model_type": 3}'])
def test_configuration_that_is_none(cli, tmp_path: Path, text: str) -> None:
    folder = copy_of(TINY, tmp_path / "model")
    (folder / "config.json").write_text(text)
    refused(cli("compile", folder, *QUICK), "model_type")


def test_configuration_with_values_that_fit_nothing(cli, tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "many"}))
    refused(cli("compile", folder, *QUICK), "model")


def test_pickled_weights(cli, tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04not to be opened")
    refused(cli("compile", folder, *QUICK), "pickled weights", "pytorch_model.bin", "safetensors")


def test_truncated_weights(cli, tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    refused(cli("compile", folder, *QUICK), "model")


def test_weights_of_another_shape(cli, tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    refused(cli("compile", folder, *QUICK), "other shapes", "config.json")


def test_weights_that_lack_layers(cli, tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": config["num_hidden_layers"] + 1, "layer_types": ["full_attention"] * (config["num_hidden_layers"] + 1)}
    (folder / "config.json").write_text(json.dumps(config))
    refused(cli("compile", folder, *QUICK), "lack", "parameters")


@pytest.mark.parametrize("model_type", ["frobnicator", "vit"])
def test_model_that_transformers_cannot_load_as_a_language_model(cli, tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": ["Frobnicator"]}))
    refused(cli("compile", tmp_path, "--meta", *QUICK), model_type)


def test_something_that_is_no_model(cli, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a model")
    refused(cli("compile", path, *QUICK), "notes.txt")


def test_module_file_without_a_model(cli, tmp_path: Path) -> None:
    path = tmp_path / "empty.py"
    path.write_text("x = 1\n")
    refused(cli("compile", path, *QUICK), "empty.py", "Model")


def test_module_file_that_raises(cli, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('no luck')\n")
    refused(cli("compile", path, *QUICK), "broken.py", "no luck")


def test_unknown_advisor(cli) -> None:
    refused(cli("compile", TINY, "--advisor", "oracle", *QUICK), "unknown advisor 'oracle'", "heuristic")


def test_unknown_validator(cli) -> None:
    refused(cli("compile", TINY, "--validators", "numerics,hope", *QUICK), "unknown validator 'hope'", "numerics")


def test_unknown_target(cli) -> None:
    refused(cli("compile", TINY, "--target", "gtx280", *QUICK), "gtx280", "h200", "a100")


def test_unknown_dtype_on_the_command_line(cli) -> None:
    code, out, err = cli("compile", TINY, "--dtype", "int4", *QUICK)
    assert (code, out) == (2, "")
    assert "float16" in err and "int4" in err


def test_unknown_dtype_in_python() -> None:
    from agentcompile_core import api
    from agentcompile_core.errors import UsageError

    with pytest.raises(UsageError, match=r"unknown dtype 'int4'; allowed: .*float16"):
        api.compile(str(TINY), dtype="int4", device="cpu")


def test_gpu_where_there_is_none(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    refused(cli("compile", TINY, "--device", "cuda", *QUICK[2:]), "device cuda", "there is none", "--device cpu")


@pytest.mark.parametrize("option", [("--budget-s", -1), ("--budget-plans", 0), ("--rounds", 0)])
def test_budgets_that_are_not_positive(cli, option: tuple[str, int]) -> None:
    refused(cli("compile", TINY, "--device", "cpu", "--no-cache", *option), "must be positive")


@pytest.mark.parametrize("context", [1, 0, -5])
def test_context_that_holds_nothing(cli, context: int) -> None:
    refused(cli("compile", TINY, "--device", "cpu", "--no-cache", "--context", context), "context", str(context))


def test_context_beyond_the_model(cli) -> None:
    refused(cli("compile", TINY, "--device", "cpu", "--no-cache", "--context", 100_000), "100000", "1024")


def test_prompt_beyond_the_context(cli, tiny_bundle: Path) -> None:
    result = cli("generate", TINY, "--bundle", tiny_bundle, "--prompt", "module " * 300, "--max-new-tokens", 4, "--device", "cpu", "--json")
    code, out, err = result
    assert json.loads(out)["exit_code"] == 2
    refused((code, "", "\n".join(line for line in err.splitlines() if not line.startswith("note: "))),
            "exceed the context of 256", "shorten the prompt")


def test_no_new_tokens(cli, tiny_bundle: Path) -> None:
    code, _, err = cli("generate", TINY, "--bundle", tiny_bundle, "--prompt", "x", "--max-new-tokens", 0, "--device", "cpu")
    assert code == 2
    assert "at least 1" in err


def test_empty_prompt(cli, tiny_bundle: Path) -> None:
    code, _, err = cli("generate", TINY, "--bundle", tiny_bundle, "--prompt", "", "--device", "cpu")
    assert code == 2
    assert "a prompt of 0 tokens" in err


@pytest.mark.parametrize("option", [("--temperature", -1), ("--top-p", 0), ("--top-k", -3)])
def test_sampling_that_makes_no_sense(cli, tiny_bundle: Path, option: tuple[str, int]) -> None:
    code, _, err = cli("generate", TINY, "--bundle", tiny_bundle, *PROMPT, "--sample", *option)
    assert code == 2
    assert option[0].strip("-").replace("-", "_") in err.replace("top p", "top_p").replace("top k", "top_k")


def test_generate_without_a_model(cli, tiny_bundle: Path) -> None:
    refused(cli("generate", *PROMPT), "needs a model")


def test_bundle_whose_model_is_gone_or_was_a_live_one(cli, tiny_bundle: Path, tmp_path: Path) -> None:
    gone = edited_manifest(tiny_bundle, tmp_path / "gone", source=str(tmp_path / "moved"))
    refused(cli("generate", "--bundle", gone, *PROMPT), "no folder", "moved")
    live = edited_manifest(tiny_bundle, tmp_path / "live", source="")
    refused(cli("generate", "--bundle", live, *PROMPT), "live model", "agentcompile generate MODEL --bundle ")


def test_generate_without_a_tokenizer(cli, tiny_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(TINY, tmp_path / "tiny_model")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    refused(cli("generate", folder, "--bundle", tiny_bundle, *PROMPT), "has no tokenizer")


def test_unknown_baseline(cli) -> None:
    refused(cli("bench", TINY, "--baselines", "magic", *QUICK), "unknown baseline 'magic'", "eager")


def test_bundle_that_is_none(cli, tmp_path: Path) -> None:
    refused(cli("explain", tmp_path), "is not a bundle", "manifest.json")
    refused(cli("generate", TINY, "--bundle", tmp_path / "nowhere", *PROMPT), "is not a bundle")


def test_bundle_for_another_model(cli, tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other_model"
    folder.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] // 2}))
    refused(cli("generate", folder, "--bundle", tiny_bundle, *PROMPT, "--random-weights"), "compiled for tiny_model", "other_model")


def test_bundle_of_another_architecture(tiny_bundle: Path) -> None:
    from agentcompile_cuda_kit.targets import preset

    from agentcompile_core.errors import UsageError
    from agentcompile_core.runtime import bundle_reader

    with pytest.raises(UsageError, match=r"built for sm_90 \(h200\), the hardware here is sm_80 \(a100\); compile for this one"):
        bundle_reader.runnable(bundle_reader.read(tiny_bundle), preset("a100"))


def edited_manifest(bundle: Path, target: Path, **changes: object) -> Path:
    copy_of(bundle, target)
    manifest = json.loads((target / "manifest.json").read_text())
    (target / "manifest.json").write_text(json.dumps(manifest | changes))
    return target


def test_bundle_of_another_schema(cli, tiny_bundle: Path, tmp_path: Path) -> None:
    refused(cli("explain", edited_manifest(tiny_bundle, tmp_path / "b", schema=99)), "schema 99", "emit it again")


def test_bundle_of_another_version(cli, tiny_bundle: Path, tmp_path: Path) -> None:
    refused(cli("explain", edited_manifest(tiny_bundle, tmp_path / "b", core_version="7.3.0")), "version 7.3.0", "emit it again")


def test_bundle_with_a_field_that_is_unknown(cli, tiny_bundle: Path, tmp_path: Path) -> None:
    refused(cli("explain", edited_manifest(tiny_bundle, tmp_path / "b", surprise=1)), "surprise")


def test_bundle_whose_manifest_is_no_json(cli, tiny_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_bundle, tmp_path / "b")
    (folder / "manifest.json").write_text("{")
    refused(cli("explain", folder), "manifest.json")


@pytest.mark.parametrize("name", ["graphs.json", "programs.json", "selections.json", "records.json", "kernels/*/kernel.cubin",
                                  "kernels/*/kernel.cu"])
def test_damaged_file_in_a_bundle(cli, tiny_bundle: Path, tmp_path: Path, name: str) -> None:
    folder = copy_of(tiny_bundle, tmp_path / "b")
    path = sorted(folder.glob(name))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    refused(cli("generate", TINY, "--bundle", folder, *PROMPT), str(path.relative_to(folder)), "emit it again")


def test_file_that_a_bundle_lacks(cli, tiny_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_bundle, tmp_path / "b")
    (folder / "graphs.json").unlink()
    refused(cli("explain", folder), "lacks graphs.json")


def test_output_that_is_in_the_way(cli, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not touch")
    refused(cli("compile", TINY, *QUICK, "--out", tmp_path / "mine"), "exists and is not a bundle")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "do not touch"


def test_output_and_log_that_cannot_be_written(cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(cli("compile", TINY, *QUICK, "--out", tmp_path / "file"), "exists and is not a bundle")
    refused(cli("compile", TINY, *QUICK, "--out", tmp_path / "file" / "bundle"), "cannot write the bundle")
    refused(cli("compile", TINY, *QUICK, "--log", tmp_path / "no" / "log"), "cannot write the log")


def test_refusal_as_json(cli, tmp_path: Path) -> None:
    code, out, err = cli("explain", tmp_path, "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == 2
    assert err == f"agentcompile: {document['error']}\n"
