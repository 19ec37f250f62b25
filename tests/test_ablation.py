"""Roles switched on one by one: which steps each row keeps, what is installed, rows of failures, and the table beside the paper's."""

import collections
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ablation_doubles
import pytest
import torch
from attrs import evolve

from agentcompile_core import api
from agentcompile_core.plugin_api import Schedule
from agentcompile_core.runtime import bundle_reader
from agentcompile_core.stages import analyze
from agentcompile_core.store import Store

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny_model"
pytestmark = pytest.mark.usefixtures("shared_captures")
NAMES = ["eager", "cudalinear", "kv_cache", "linear", "flash_attn", "attention", "decode", "triton", "agentcompile"]
OURS = NAMES[2:]  # in the process of the command


def test_each_row_changes_what_it_says(bench: Any) -> None:
    rows = bench("roles").variants()
    assert [row.name for row in rows] == NAMES and rows[0].adds == {} and tuple(NAMES[:2]) == bench("roles").OUTSIDE
    for before, row in itertools.pairwise(rows):
        assert row.roles == {**before.roles, **row.adds} != before.roles
        assert all(row.roles[role] != before.roles[role] for role in row.adds)
    assert not set(rows[-1].roles.values()) & set(rows[0].roles.values())
    served = {role: {row.roles[role] for row in rows} for role in rows[0].roles}
    assert served == {"linear": {"framework", "CUDALinear", "generated"}, "attention": {"SDPA", "flash-attn", "generated"},
                      "fused_ops": {"none", "Triton", "generated"}, "kv_cache": {"DynamicCache", "FlashKV"},
                      "decode": {"Python loop", "CUDA graph"}}


def test_each_row_keeps_the_steps_of_its_roles(bench: Any, tiny_bundle: Path) -> None:
    roles, whole = bench("roles"), bundle_reader.read(tiny_bundle).programs["decode"]
    counts = {row.name: roles.steps_of(roles.with_roles(whole, row.roles)) for row in roles.variants()}
    full = roles.steps_of(whole)
    assert all(full[role] > 0 for role in ("linear", "attention", "fused_ops"))
    none = {"linear": 0, "attention": 0, "fused_ops": 0}
    linear, both = {**none, "linear": full["linear"]}, {**full, "fused_ops": 0}
    wanted = {"eager": none, "cudalinear": none, "kv_cache": none, "linear": linear, "flash_attn": linear,
              "attention": both, "decode": both, "triton": linear, "agentcompile": full}
    for name, of in wanted.items():
        assert {role: counts[name][role] for role in none} == {role: of[role] for role in none}, name
    rest = [counts[name]["framework nodes"] for name in ("eager", "kv_cache", "linear", "attention", "decode", "agentcompile")]
    assert rest == sorted(rest, reverse=True) and rest[-1] == full["framework nodes"] < rest[1]


@pytest.fixture
def loaded(tiny_bundle: Path) -> Any:
    """The tiny model with what a compilation on a GPU would know of it: its regions, and no kernel, since none can run here."""
    model = api.load(tiny_bundle, TINY, run_on="framework", store=Store(None))
    regions = tuple(region for analysis in analyze.run(model.graphs, model.context) for region in analysis.regions)
    model.compilation = SimpleNamespace(programs=bundle_reader.read(tiny_bundle).programs, regions=regions, records=(), kernels={},
                                        provisional=True)
    return model


def on_processors(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``roles.installed``, where callables run on the backend that is there without a GPU."""
    roles = bench("roles")
    real = roles.install.install

    def install(loaded: Any, what: Any, device: str, run_on: str, *rest: Any) -> Any:
        return real(loaded, what, device, "emulation" if run_on == "auto" else run_on, *rest)

    monkeypatch.setattr(roles.install, "install", install)
    return roles.installed


def with_alternatives(bench: Any, **more: str) -> Any:
    roles = bench("roles")
    (cache,) = (row for row in roles.variants() if row.name == "kv_cache")
    return evolve(cache, name="alternatives", roles={**cache.roles, **more})


@pytest.mark.parametrize("more", [{"attention": "flash-attn"}, {"fused_ops": "Triton"}, {"attention": "flash-attn", "fused_ops": "Triton"}])
def test_a_role_is_served_by_what_the_search_did_not_select(bench: Any, loaded: Any, monkeypatch: pytest.MonkeyPatch,
                                                            more: dict[str, str]) -> None:
    kernels, roles, row = ablation_doubles.put(monkeypatch), bench("roles"), with_alternatives(bench, **more)
    program = roles.program_of(loaded, loaded.compilation.programs["decode"], row.roles)
    layers, counts = loaded.loaded.module.config.num_hidden_layers, roles.steps_of(program)
    names = collections.Counter(segment.name for segment in program.segments if segment.step is not None)
    assert counts["attention"] == names["flashattn/attention"] == (layers if "attention" in more else 0) and counts["linear"] == 0
    fused = layers if "fused_ops" in more else 0
    assert (names["triton/rope"], names["triton/activation"]) == (2 * fused, fused)
    assert (names["triton/norm"] >= 4 * layers) == bool(fused)
    before = {name: kernel.launches for name, kernel in kernels.items()}
    model = on_processors(bench, monkeypatch)(loaded, row)
    prompt = torch.arange(5, 14)[None]
    wanted = loaded.loaded.module.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None,
                                           attention_mask=torch.ones_like(prompt))
    assert torch.equal(model.generate(prompt, 6, eos_token_id=None), wanted)
    assert all((kernel.launches > before[name]) == ("fused_ops" in more) for name, kernel in kernels.items())


def test_generated_steps_stay_beside_the_alternatives(bench: Any, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ablation_doubles.put(monkeypatch)
    roles, whole = bench("roles"), loaded.compilation.programs["decode"]
    (row,) = (row for row in roles.variants() if row.name == "triton")
    program, full = roles.program_of(loaded, whole, row.roles), roles.steps_of(whole)
    linear = [segment for segment in whole.segments if segment.step is not None and roles.role_of(segment) == "linear"]
    assert {segment.nodes for segment in linear} <= {segment.nodes for segment in program.segments}
    found = roles.steps_of(program)
    assert found["linear"] == full["linear"] and found["attention"] > 0 and found["fused_ops"] > 0
    timed = [SimpleNamespace(usable=True, signature=region.signature, measurement=SimpleNamespace(us=us), step=SimpleNamespace(
        match_id=match.id, implementation="flashattn/attention", schedule=Schedule({"splits": splits})))
        for region in loaded.compilation.regions for match in region.matches for us, splits in ((2.0, 4), (1.0, 16), (3.0, 0))]
    loaded.compilation.records = timed
    steps = [segment.step for segment in roles.program_of(loaded, whole, row.roles).segments if segment.name == "flashattn/attention"]
    assert steps and all(step.schedule == Schedule({"splits": 16}) for step in steps), "the fastest that the search timed"
    assert roles.program_of(loaded, whole, roles.variants()[-1].roles) == whole


@pytest.mark.parametrize(("more", "wrong"), [({"attention": "flash-attn"}, "attention"), ({"fused_ops": "Triton"}, "norm")])
def test_a_wrong_implementation_is_refused(bench: Any, loaded: Any, monkeypatch: pytest.MonkeyPatch, more: dict[str, str],
                                           wrong: str) -> None:
    kernels = ablation_doubles.put(monkeypatch)
    if wrong == "norm":
        right = kernels["rms_norm"].act
        monkeypatch.setattr(kernels["rms_norm"], "act", lambda reads, writes, columns, eps, NORM: right(reads, writes, columns, 1.0, NORM))
    else:
        right = ablation_doubles.flash_attn_with_kvcache
        monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_with_kvcache", lambda *o, **more: right(*o, **more) * 1.1)
    with pytest.raises(bench("peers.child").PeerDied, match=r"alternatives was not installed: .* beyond the error budget"):
        on_processors(bench, monkeypatch)(loaded, with_alternatives(bench, **more))


def test_what_is_not_there_is_one_sentence(bench: Any, loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ablation_doubles.put(monkeypatch)
    roles, died, whole = bench("roles"), bench("peers.child").PeerDied, loaded.compilation.programs["decode"]
    flash = with_alternatives(bench, attention="flash-attn").roles
    monkeypatch.setattr("agentcompile_runtime_flashattn.attention.TYPES", ())
    with pytest.raises(died, match=r"flash-attn: none of the nodes .* is served: flashattn/attention: "):
        roles.program_of(loaded, whole, flash)
    monkeypatch.setattr(loaded.context.catalog, "offers", collections.defaultdict(dict))
    with pytest.raises(died, match="flash-attn: the plugin flashattn is not installed"):
        roles.program_of(loaded, whole, flash)
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(died, match=r"flash-attn: the package flash_attn is not installed; .* --peer-path"):
        roles.program_of(loaded, whole, flash)


def test_a_folder_is_found_behind_all_that_is_installed(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_of_a_folder", "attrs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", list(sys.path))
    bench("ablation").put_on_path((tmp_path,))
    found = [importlib.util.find_spec(name) for name in ("flash_of_a_folder", "attrs")]
    assert [str(tmp_path) in str(spec.origin) for spec in found] == [True, False]


def test_linear_layers_of_the_frameworks_own_loop(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import agentcompile_runtime_cudalinear

    child, asked = bench("peers.framework_child"), []
    left = SimpleNamespace(layers={}, left={"head": "no GPU"})
    some = SimpleNamespace(layers={"a": "gemv/gemv", "b": "gemv/gemv", "c": "vendor/linear"}, left={})
    monkeypatch.setattr(agentcompile_runtime_cudalinear, "replace_linears", lambda module, **options: asked.append(options) or answer)
    answer = some
    assert child.with_linears(None, device="cpu") == {"replaced": {"gemv/gemv": 2, "vendor/linear": 1}, "left": 0}
    answer = left
    with pytest.raises(RuntimeError, match="no linear layer was replaced: no GPU"):
        child.with_linears(None)
    assert asked == [{"device": "cpu"}, {}]


def test_what_is_installed_is_what_was_asked_for_or_nothing(bench: Any, loaded: Any) -> None:
    roles, model = bench("roles"), loaded
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


def test_a_variant_has_the_chunks_of_its_prompts_alone(bench: Any, loaded: Any) -> None:
    roles, every, prompt = bench("roles"), loaded.session.chunk_sizes, torch.arange(5, 14)[None]
    (cache,) = (row for row in roles.variants() if row.name == "kv_cache")
    assert len(every) > 1 and roles.installed(loaded, cache).session.chunk_sizes == every
    few = roles.installed(loaded, cache, (every[0], 9))
    assert few.session.chunk_sizes == every[:1]
    assert torch.equal(few.generate(prompt, 6, eos_token_id=None), loaded.generate(prompt, 6, eos_token_id=None))


def test_a_row_that_fails_says_so_and_all_are_measured_together(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, roles = bench("peers.command"), bench("roles")
    monkeypatch.setattr(command.harness, "machine", lambda: {"gpu": "NVIDIA X", "gpu_uuid": "GPU-1", "driver": "1.2"})
    monkeypatch.setattr(command.harness, "read_ceiling_gbps", lambda: 1000.0)
    monkeypatch.setattr(command, "step_bytes", lambda graphs, positions: 1_000_000 * positions)
    monkeypatch.setattr(command, "accuracy_row", lambda name, model, positions: None)
    asked: list[str] = []

    def stand_in(name: str) -> Any:
        return SimpleNamespace(generate=lambda ids, count, **how: asked.append(name),
                               session=SimpleNamespace(ready=lambda given, new: (), give_back=lambda: None))

    def installed(model: Any, variant: Any, lengths: Any) -> Any:
        assert lengths == (6,)
        if variant.name == failing:
            raise RuntimeError("no\nmemory")
        return stand_in(variant.name)

    monkeypatch.setattr(roles, "installed", installed)
    monkeypatch.setattr(roles, "program_of", lambda model, program, which: program)
    monkeypatch.setattr(roles, "steps_of", lambda program: {"linear": 3, "attention": 2, "fused_ops": 4, "framework nodes": 9})
    model = SimpleNamespace(**vars(stand_in("agentcompile")), graphs=SimpleNamespace(kv=object(), model=SimpleNamespace(vocab_size=50)),
                            compilation=SimpleNamespace(programs={"decode": None}), context=SimpleNamespace(close=lambda: None), notes=())
    monkeypatch.setattr(command, "compiled_model", lambda name, options, store: (model, 1.0))
    given = ["qwen3-4b", "--workloads", "6/4", "--systems", ",".join(OURS), "--repetitions", "2", "--commit", "a" * 40,
             "--out", str(tmp_path), "--search-s", "1"]

    def rows() -> list[dict[str, Any]]:
        asked.clear()
        assert bench("ablation").main(given) == 0
        found: list[dict[str, Any]] = json.loads((tmp_path / "ablation.json").read_text())["rows"]
        return found

    failing = "linear"
    first = {row["system"]: row for row in rows()}
    assert list(first) and set(first) == set(OURS)
    assert first["linear"]["why"] == "linear failed: RuntimeError: no memory" and first["linear"]["e2e_ms"] is None
    assert all(first[name]["repetitions"] == 2 for name in first if name != "linear")
    assert first["attention"]["roles"]["linear"] == "generated" and first["attention"]["adds"] == {"attention": "generated"}
    assert "steps" in first["attention"] and "steps" not in first["linear"] and first["linear"]["place"] == 3
    failing = ""
    second = rows()
    run = next(row["run"] for row in second if row["system"] == "linear")
    assert {row["system"] for row in second if row["run"] == run} == set(OURS), "rows are compared with each other: all again"
    assert rows() == second and asked == []


def test_the_table_compares_within_one_command_and_stands_beside_the_papers(bench: Any) -> None:
    module, variants = bench("ablation_tables"), bench("roles").variants()

    def row(name: str, workload: str, ms: float | None, run: str, **more: Any) -> dict[str, Any]:
        place = NAMES.index(name)
        return {"model": "qwen3-4b", "dtype": "float16", "workload": workload, "system": name, "e2e_ms": ms, "estimated": False,
                "why": "" if ms else "it died", "run": run, "place": place, "roles": variants[place].roles,
                "adds": variants[place].adds, **more}

    steps = {"linear": 5, "attention": 2, "fused_ops": 0, "framework nodes": 9}
    rows = [row("eager", "128/128", 9999.0, "a"), row("kv_cache", "128/128", 400.0, "b"), row("eager", "128/128", 800.0, "b"),
            row("eager", "2048/512", 1600.0, "b", estimated=True), row("kv_cache", "2048/512", 200.0, "b"),
            row("linear", "128/128", 100.0, "b", steps=steps), row("linear", "2048/512", None, "b", steps=steps),
            row("flash_attn", "128/128", None, "b"), row("attention", "128/128", 50.0, "b")]
    text = module.ablation({"rows": rows})
    assert "| ms of a whole generation | linear | attention | fused_ops | kv_cache | decode | 128/128 | 2048/512 | over" in text
    assert "| baseline (eager) | framework | SDPA | none | DynamicCache | Python loop | 800 | 1600 est. | - |\n" \
        "| + kv_cache FlashKV, linear framework | framework | SDPA | none | FlashKV | Python loop | 400 | 200 | 4.00x |" in text
    assert "| + linear generated (7 kernels per token) | generated | SDPA | none | FlashKV | Python loop | 100 | - | 4.00x |" in text
    assert "2048/512: it died." in text and "9999" not in text
    assert "| + attention flash-attn | generated | flash-attn | none | FlashKV | Python loop | - | - | - |" in text
    assert "| + attention generated | generated | generated | none | FlashKV | Python loop | 50 | - | 2.00x |" in text
    assert "| ms of a whole generation | 128/128 | 2048/512 | 8192/4096" in text
    assert "| + CUDA Graph replay | 1180 | 4879 | 42477 | 89312 | 197032 | 2.05x |" in text
