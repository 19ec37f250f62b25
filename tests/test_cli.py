"""Every command of the command line: what it prints, as text and as JSON, and its exit code."""

import json
from pathlib import Path

import pytest

TINY = Path(__file__).parents[1] / "examples" / "tiny_model"
PROMPT = "When an exception"
pytestmark = pytest.mark.usefixtures("shared_captures")  # commands say the same of a graph whoever traced it


@pytest.mark.slow
def test_compile_prints_one_document_and_writes_the_bundle(tiny_compiled) -> None:
    folder, document = tiny_compiled
    assert document["model"] == "tiny_model"
    assert document["target"] == "h200"
    assert document["bundle"] == str(folder)
    assert (folder / "manifest.json").is_file()
    found = document["statistics"]
    assert found["nodes"] > 100
    assert found["regions"] >= 7 and found["merged_regions"] == 3
    assert found["selected"] > 0
    assert found["validated"] >= found["selected"] - 1
    assert found["files"] == sum(1 for p in folder.rglob("*") if p.is_file())
    extension = json.loads((folder / "extension" / "agentcompile_kernels" / "signatures.json").read_text())
    assert found["signatures"] == len(extension["signatures"])
    assert {s["basis"] for s in document["selections"]} == {"provisional"}


def test_compile_text_says_what_was_found_and_what_a_gpu_would_add(cli, tmp_path: Path) -> None:
    code, out, err = cli("compile", TINY, "--device", "cpu", "--dtype", "float32", "--context", 64, "--budget-plans", 1, "--rounds", 1,
                         "--budget-s", 0.01, "--no-cache", "--out", tmp_path / "b")
    assert code == 0, err
    assert out.startswith("tiny_model (qwen3) for h200 (sm_90)\n")
    for word in ("IR nodes", "regions", "plans (covers)", "validated", "selected steps", "files / signatures", "region layer: "):
        assert word in out
    assert f"bundle: {tmp_path / 'b'}" in out
    assert "workload: batch 1, context 64, float32" in err
    assert "capture: " in err and "plan: " in err


def test_compile_without_weights(cli) -> None:
    code, out, err = cli("compile", TINY, "--meta", "--device", "cpu", "--context", 64, "--budget-plans", 1, "--rounds", 1,
                         "--budget-s", 0.01, "--no-cache", "--json")
    assert code == 0, err
    assert json.loads(out)["statistics"]["nodes"] > 100


def test_compile_logs_one_line_per_evaluated_candidate(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCOMPILE_PLUGINS", "transformers_rules,cuda,elementwise,argmax,emulation,numerics")  # few are evaluated
    log = tmp_path / "log.jsonl"
    code, _, err = cli("compile", TINY, "--device", "cpu", "--dtype", "float32", "--context", 64, "--budget-plans", 2, "--rounds", 1,
                         "--budget-s", 20, "--no-cache", "--json", "--log", log)
    assert code == 0, err
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines
    assert {"match", "implementation", "schedule", "verdict", "us", "rank", "advisor", "order"} <= lines[0].keys()


def test_generate_streams_the_text_of_the_bundle(cli, tiny_bundle: Path) -> None:
    code, out, err = cli("generate", TINY, "--bundle", tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", 12, "--device", "cpu")
    assert code == 0, err
    assert out.startswith(PROMPT)
    assert len(out.strip()) > len(PROMPT)
    assert "note: no h200 here: every step runs on the framework's operators" in err


def test_generate_finds_the_model_of_the_bundle(cli, tiny_bundle: Path) -> None:
    arguments = ("--bundle", tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", 4, "--device", "cpu", "--json")
    assert cli("generate", *arguments) == cli("generate", TINY, *arguments)


def test_generate_json_agrees_with_what_huggingface_writes(cli, tiny_bundle: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code, out, err = cli("generate", TINY, "--bundle", tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", 12, "--device", "cpu", "--json")
    assert code == 0, err
    document = json.loads(out)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0]
    assert document["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert document["prompt_tokens"] == ids.shape[1]
    assert document["new_tokens"] == 12
    assert any("framework" in note for note in document["notes"])


def test_sampling_with_a_seed_repeats_itself(cli, tiny_bundle: Path) -> None:
    arguments = ("generate", TINY, "--bundle", tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", 12, "--device", "cpu", "--json",
                 "--sample", "--temperature", 1.5, "--top-k", 50)
    first, second, other = (json.loads(cli(*arguments, "--seed", seed)[1])["text"] for seed in (1, 1, 2))
    assert first == second != other


def test_bench_prints_ours_beside_eager(cli) -> None:
    arguments = ("bench", TINY, "--device", "cpu", "--dtype", "float32", "--context", 64, "--input", 8, "--output", 24, "--repetitions", 2,
                 "--budget-plans", 1, "--rounds", 1, "--budget-s", 0.01, "--no-cache")
    code, out, err = cli(*arguments, "--json")
    assert code == 0, err
    rows = {row["system"]: row for row in json.loads(out)["rows"]}
    assert set(rows) == {"agentcompile", "eager"}
    for row in rows.values():
        assert row["e2e_ms"] > 0 and row["prefill_ms"] > 0
        assert row["step_ms"] == pytest.approx((row["e2e_ms"] - row["prefill_ms"]) / 23)
    assert rows["eager"]["speedup"] == 1.0
    code, out, err = cli(*arguments)
    assert code == 0, err
    assert "ms per token" in out and "over eager" in out


def test_explain_says_why(cli, tiny_bundle: Path) -> None:
    code, out, err = cli("explain", tiny_bundle)
    assert code == 0, err
    assert "tiny_model (qwen3) for h200 (sm_90), float32, context 256" in out
    assert "validated without their hardware, not measured" in out
    assert "gemv/gemv" in out and "candidates evaluated" in out


def test_explain_json_names_every_step_with_its_evidence(cli, tiny_bundle: Path) -> None:
    code, out, err = cli("explain", tiny_bundle, "--json")
    assert code == 0, err
    document = json.loads(out)
    steps = [step for selection in document["selections"] for step in selection["steps"]]
    assert steps
    assert all(step["origin"] == "generated" and step["basis"] == "provisional" and step["reason"] for step in steps)
    assert sum(c["passed"] for c in document["candidates"]) >= len(steps) - 1


@pytest.mark.parametrize("as_json", [False, True])
def test_plugins_lists_what_is_installed(cli, as_json: bool) -> None:
    code, out, err = cli("plugins", *(["--json"] if as_json else []))
    assert code == 0, err
    if as_json:
        found = {p["name"]: p for p in json.loads(out)["plugins"]}
        assert found["core_frontends"]["state"] == "loaded"
        assert found["gemv"]["offers"] == ["TemplateFamily:gemv"]
        assert found["gemv"]["distribution"].startswith("agentcompile-templates-cuda-gemv ")
    else:
        assert "TemplateFamily:gemv" in out


def test_plugins_works_beside_a_blocked_one(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCOMPILE_BLOCK_PLUGINS", "gemv")
    code, out, _ = cli("plugins", "--json")
    assert code == 0
    assert next(p for p in json.loads(out)["plugins"] if p["name"] == "gemv")["state"] == "blocked"


@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_says_what_this_machine_can_do(cli, as_json: bool) -> None:
    code, out, err = cli("doctor", *(["--json"] if as_json else []))
    assert code == 0, err
    if as_json:
        checks = {c["name"]: c for c in json.loads(out)["checks"]}
        assert checks["torch"]["ok"] and checks["torch"]["required"]
        assert "accelerator" in checks and "backend emulation" in checks
    else:
        assert "torch" in out and "accelerator" in out


def test_doctor_asks_backends_as_they_are_configured(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "agentcompile.toml"
    monkeypatch.setenv("AGENTCOMPILE_CONFIG", str(own))
    for text, name, words in (('[plugin.emulation]\ncompiler = "no-such-compiler"\n', "backend emulation", "no-such-compiler"),
                              ('rounds = "many"\n', "configuration", "rounds")):
        own.write_text(text)
        code, out, _ = cli("doctor", "--json")
        (check,) = (c for c in json.loads(out)["checks"] if c["name"] == name)
        assert not check["ok"] and words in check["seen"] and code == int(check["required"])


def test_doctor_fails_where_something_required_is_missing(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core import report

    real = report._package
    monkeypatch.setattr(report, "_package", lambda name, required: real("no-such-" + name if name == "safetensors" else name, required))
    code, out, _ = cli("doctor", "--json")
    assert code == 1
    assert any(c["required"] and not c["ok"] for c in json.loads(out)["checks"])


def test_version_and_help(cli) -> None:
    from agentcompile_core import __version__

    assert cli("--version") == (0, f"agentcompile {__version__}\n", "")
    code, out, _ = cli("--help")
    assert code == 0
    for command in ("compile", "generate", "bench", "explain", "plugins", "doctor"):
        assert command in out


@pytest.mark.parametrize("arguments", [(), ("frobnicate",), ("compile",), ("generate",), ("explain", "x", "--frob")])
def test_a_command_line_that_cannot_be_read_exits_with_2(cli, arguments: tuple[str, ...]) -> None:
    code, out, err = cli(*arguments)
    assert code == 2
    assert out == ""
    assert "usage: agentcompile" in err


def test_a_failure_exits_with_1(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core.cli import commands
    from agentcompile_core.errors import BuildError

    def fails(options: object) -> int:
        raise BuildError("nvcc ran out of memory; free some")

    monkeypatch.setitem(commands.COMMANDS, "doctor", fails)
    assert cli("doctor") == (1, "", "agentcompile: nvcc ran out of memory; free some\n")
    code, out, _ = cli("doctor", "--json")
    assert (code, json.loads(out)["exit_code"]) == (1, 1)


def test_too_little_gpu_memory_is_a_sentence(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from agentcompile_core.cli import commands

    def fails(options: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB ...")

    monkeypatch.setitem(commands.COMMANDS, "doctor", fails)
    code, out, err = cli("doctor")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "too little free memory" in err and "--context" in err


def test_an_interrupt_exits_with_130(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core.cli import commands

    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.COMMANDS, "doctor", interrupted)
    code, _, err = cli("doctor")
    assert code == 130
    assert err.count("\n") == 1


def test_what_a_plugin_prints_is_no_part_of_a_document(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_core.cli import commands

    listed = commands.COMMANDS["plugins"]

    def chatty(options: object) -> int:
        print("XXXX")
        return listed(options)

    monkeypatch.setitem(commands.COMMANDS, "plugins", chatty)
    code, out, err = cli("plugins", "--json")
    assert code == 0 and json.loads(out) and "XXXX" in err
    assert "XXXX" in cli("plugins")[1]
