"""Roles switched on one by one: which steps each row keeps, what is installed, rows of failures, and the table beside the paper's."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

from agentcompile_core import api
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.store import Store

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny_model"
NAMES = ["eager", "kv_cache", "linear", "attention", "decode", "agentcompile"]


def test_each_row_adds_one_role_to_the_one_before(bench: Any) -> None:
    rows = bench("roles").variants()
    assert [row.name for row in rows] == NAMES and rows[0].adds == {}
    for before, row in itertools.pairwise(rows):
        assert len(row.adds) == 1 and row.roles == {**before.roles, **row.adds} != before.roles
    assert not set(rows[-1].roles.values()) & set(rows[0].roles.values())


def test_each_row_keeps_the_steps_of_its_roles(bench: Any, tiny_bundle: Path) -> None:
    roles, whole = bench("roles"), bundle_reader.read(tiny_bundle).programs["decode"]
    counts = [roles.steps_of(roles.with_roles(whole, row.roles)) for row in roles.variants()]
    full = roles.steps_of(whole)
    assert all(full[role] > 0 for role in ("linear", "attention", "fused_ops"))
    none = {"linear": 0, "attention": 0, "fused_ops": 0}
    wanted = [none, none, {**none, "linear": full["linear"]}, {**full, "fused_ops": 0}, {**full, "fused_ops": 0}, full]
    for found, of in zip(counts, wanted, strict=True):
        assert {role: found[role] for role in none} == {role: of[role] for role in none}
    rest = [found["framework nodes"] for found in counts]
    assert rest == sorted(rest, reverse=True) and rest[-1] == full["framework nodes"] < rest[1]


def test_what_is_installed_is_what_was_asked_for_or_nothing(bench: Any, tiny_bundle: Path) -> None:
    roles = bench("roles")
    model = api.load(tiny_bundle, TINY, run_on="framework", store=Store(None))
    programs = bundle_reader.read(tiny_bundle).programs
    model.compilation = SimpleNamespace(programs=programs, kernels={}, provisional=True)  # no kernels can run here
    cache, linear = (row for row in roles.variants() if row.name in ("kv_cache", "linear"))
    plain = roles.installed(model, cache)
    assert type(plain.session.kv).__name__ == "FlashKVCacheManager" and plain.session is not model.session
    assert plain.session._weights is model.session._weights, "another store would move what the model reads"
    prompt = torch.arange(5, 14)[None]
    asked = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(prompt)}
    wanted = model.loaded.module.generate(prompt, max_new_tokens=6, **asked)
    assert torch.equal(plain.generate(prompt, 6, eos_token_id=None), wanted)
    with pytest.raises(bench("peers.child").PeerDied, match="linear was not installed: every step runs on the framework's operators"):
        roles.installed(model, linear)
    with pytest.raises(bench("peers.child").PeerDied, match="graphs was not installed: steps are not captured: nothing here captures"):
        roles.installed(model, evolve(cache, name="graphs", roles={**cache.roles, "decode": "CUDA graph"}))


def test_a_row_that_fails_says_so_and_all_are_measured_together(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, roles = bench("peers.command"), bench("roles")
    monkeypatch.setattr(command.harness, "machine", lambda: {"gpu": "NVIDIA X", "gpu_uuid": "GPU-1", "driver": "1.2"})
    monkeypatch.setattr(command.harness, "read_ceiling_gbps", lambda: 1000.0)
    monkeypatch.setattr(command, "step_bytes", lambda graphs, positions: 1_000_000 * positions)
    monkeypatch.setattr(command, "accuracy_row", lambda name, model, positions: None)
    asked: list[str] = []

    def stand_in(name: str) -> Any:
        return SimpleNamespace(generate=lambda ids, count, **how: asked.append(name))

    def installed(model: Any, variant: Any) -> Any:
        if variant.name == failing:
            raise RuntimeError("no\nmemory")
        return stand_in(variant.name)

    monkeypatch.setattr(roles, "installed", installed)
    monkeypatch.setattr(roles, "with_roles", lambda program, which: program)
    monkeypatch.setattr(roles, "steps_of", lambda program: {"linear": 3, "attention": 2, "fused_ops": 4, "framework nodes": 9})
    model = SimpleNamespace(**vars(stand_in("agentcompile")), graphs=SimpleNamespace(kv=object(), model=SimpleNamespace(vocab_size=50)),
                            compilation=SimpleNamespace(programs={"decode": None}), context=SimpleNamespace(close=lambda: None), notes=())
    monkeypatch.setattr(command, "compiled_model", lambda name, options, store: (model, 1.0))
    given = ["qwen3-4b", "--workloads", "6/4", "--systems", ",".join(NAMES[1:]), "--repetitions", "2", "--commit", "a" * 40,
             "--out", str(tmp_path), "--search-s", "1"]

    def rows() -> list[dict[str, Any]]:
        asked.clear()
        assert bench("ablation").main(given) == 0
        found: list[dict[str, Any]] = json.loads((tmp_path / "ablation.json").read_text())["rows"]
        return found

    failing = "linear"
    first = {row["system"]: row for row in rows()}
    assert list(first) and set(first) == set(NAMES[1:])
    assert first["linear"]["why"] == "linear failed: RuntimeError: no memory" and first["linear"]["e2e_ms"] is None
    assert all(first[name]["repetitions"] == 2 for name in first if name != "linear")
    assert first["attention"]["roles"]["linear"] == "generated" and first["attention"]["adds"] == {"attention": "generated"}
    failing = ""
    second = rows()
    run = next(row["run"] for row in second if row["system"] == "linear")
    assert {row["system"] for row in second if row["run"] == run} == set(NAMES[1:]), "rows are compared with each other: all again"
    assert rows() == second and asked == []


def test_the_table_compares_within_one_command_and_stands_beside_the_papers(bench: Any) -> None:
    module, variants = bench("ablation_tables"), bench("roles").variants()

    def row(variant: Any, workload: str, ms: float | None, run: str, **more: Any) -> dict[str, Any]:
        return {"model": "qwen3-4b", "dtype": "float16", "workload": workload, "system": variant.name, "e2e_ms": ms, "estimated": False,
                "why": "" if ms else "it died", "run": run, "roles": variant.roles, "adds": variant.adds, **more}

    steps = {"linear": 5, "attention": 2, "fused_ops": 0, "framework nodes": 9}
    rows = [row(variants[0], "128/128", 9999.0, "a"), row(variants[0], "128/128", 800.0, "b"), row(variants[1], "128/128", 400.0, "b"),
            row(variants[0], "2048/512", 1600.0, "b", estimated=True), row(variants[1], "2048/512", 200.0, "b"),
            row(variants[2], "128/128", 100.0, "b", steps=steps), row(variants[2], "2048/512", None, "b", steps=steps)]
    text = module.ablation({"rows": rows})
    assert "| baseline (eager) | 800 | 1600 est. | - |\n| + kv_cache FlashKV | 400 | 200 | 4.00x |" in text
    assert "| + linear generated (7 kernels per token) | 100 | - | 4.00x |" in text and "2048/512: it died." in text and "9999" not in text
    assert "| + CUDA Graph replay | 1180 | 4879 | 42477 | 89312 | 197032 | 2.05x |" in text
