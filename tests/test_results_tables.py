"""Published numbers: the committed documents say what the committed results files say, and nothing else."""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OTHERS = ("faults", "storm", "budgets", "mutants", "random_plans")  # lists of checks rather than measurements; their own tests read them
FILES = sorted(p for p in (ROOT / "benchmarks" / "results").glob("*/*.json") if p.stem not in OTHERS)


@pytest.fixture(scope="module")
def tables() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("tables")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in ("tables", "chart", "harness", "budget_tables", "coverage_tables", "kernel_tables", "operator_claims",
                     "mutant_tables", "sweep_tables", "ablation_tables", "markdown_table"):
            sys.modules.pop(name, None)


def budget_rows() -> dict[tuple[str, str, str], dict[str, Any]]:
    rows = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "budgets.json").read_text())["rows"]
    return {(row["family"], row["dtype"], row["size"]): row for row in rows}


def test_the_committed_budgets_are_tight_and_met() -> None:
    rows, exact = budget_rows(), {"gather", "argmax", "maximum and place"}
    assert len(rows) > 90 and all(row["outside"] == 0 and row["draws"] >= 2000 for row in rows.values())
    assert len({row["commit"] for row in rows.values()}) == 1, "rows of several commits: measure all of them together"
    beyond = {key: row["median"] for key, row in rows.items() if row["family"] not in exact and not 3 <= row["median"] <= 30}
    assert not beyond, "medians beyond 3 to 30"


def test_rows_of_families_that_are_not_measured_again_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("budget_table")
    old, new, other = (script.Row(family=family, dtype="fp16", size="64", draws=2000, median=5.0, least=1.1, outside=0, seconds=1.0,
                                  commit=commit) for family, commit in (("argmax", "a"), ("argmax", "b"), ("softmax", "a")))
    path = tmp_path / "budgets.json"
    rows = [script.asdict(row) for row in (other, old)]
    path.write_text(json.dumps({"versions": script.versions(), "rows": rows}))
    assert [(row["family"], row["commit"]) for row in script.kept(path, [new])] == [("softmax", "a"), ("argmax", "b")]
    path.write_text(json.dumps({"versions": {**script.versions(), "torch": "1.0"}, "rows": rows}))
    with pytest.raises(SystemExit, match=r"holds rows that may not stand .* \(torch 1\.0 there, .* here\): measure all rows here, without"):
        script.kept(path, [new])


def test_rows_of_another_processor_are_refused_before_any_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("budget_table")
    path, facts = tmp_path / "budgets.json", tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nvendor_id\t: X\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Some CPU @ 2.00GHz\nflags\t: a\n")
    other, here = script.processor(facts), script.processor()
    assert other.startswith("Some CPU @ 2.00GHz, family 6 model 143, ") and other != here
    assert other.rpartition(", ")[2] == here.rpartition(", ")[2] == script.torch.backends.cpu.get_cpu_capability()
    assert len(script.processor(tmp_path / "none")) > len(", DEFAULT")
    monkeypatch.setattr(script, "ProcessPoolExecutor", lambda *arguments, **named: pytest.fail("it measures"))
    monkeypatch.setattr(sys, "argv", ["budget_table.py", "--keep", "--family", "argmax", "--out", str(path)])
    for before in (other, "x86_64"):
        path.write_text(json.dumps({"versions": {**script.versions(), "processor": before}, "rows": []}))
        with pytest.raises(SystemExit) as refused:
            script.main()
        assert str(refused.value) == (f"{path} holds rows that may not stand beside those measured here (processor {before} there, {here} "
                                      "here): measure all rows here, without --keep, or these where the others were measured")
    path.unlink()
    with pytest.raises(SystemExit, match="is not there, so that --keep has nothing to keep"):
        script.main()


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"schema": 1, "gpu": "NVIDIA X", "gpu_uuid": "GPU-1", "driver": "1.2", "versions": {"torch": "2.11"}, "commit": "c0ffee" * 6,
            "date": "2030-01-02", "read_ceiling_gbps": 1000.0, "rows": rows}


def decode_row(system: str, e2e_ms: float, **changes: Any) -> dict[str, Any]:
    return {"model": "qwen3-1.7b", "dtype": "float16", "workload": "128/128", "system": system, "e2e_ms": e2e_ms, "prefill_ms": 10.0,
            "step_ms": (e2e_ms - 10.0) / 127, "floor_step_ms": 0.5, "repetitions": 10, "spread_ms": 0.25, "estimated": False, **changes}


def test_the_committed_documents_are_what_the_results_say(tables: Any) -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in tables.documents().items() if path.read_text() != text]
    assert stale == [], f"{', '.join(stale)}: stale; run `make results` and commit what it wrote"


def test_the_documents_have_the_sections_that_results_go_to(tables: Any) -> None:
    markers = {path.name: re.findall(r"<!-- results: (\w+)", path.read_text()) for path in tables.DOCUMENTS}
    assert markers["README.md"] == ["summary", "alone_summary", "sweep_ratios", "sweep_4b", "sweep_llama", "images", "supported"]
    assert {"decode", "memory", "pipeline", "origins", "accuracy", "compile_time"} <= set(markers["performance.md"])


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_a_committed_results_file_has_its_columns(tables: Any, path: Path) -> None:
    found = json.loads(path.read_text())
    assert path.stem in tables.COLUMNS, "no table knows this file"
    tables.check(path.stem, found)
    assert found["rows"]
    assert re.fullmatch(r"[0-9a-f]{7,40}", found["commit"]), "measured at no commit"
    for row in found["rows"]:
        assert row.get("gpu_uuid"), "rows say which GPU they were measured on"


def test_figures_come_from_the_file(tables: Any) -> None:
    rows = [decode_row("agentcompile", 137.0), decode_row("eager", 1280.0), decode_row("torch_compile", 391.0, estimated=True)]
    text = tables.section("decode", {"x": {"decode": document(rows)}})
    assert "| qwen3-1.7b | 128/128 | agentcompile | 137.0 | 0.2 | 10.00 | 1.000 | 1000 | 9.34x | 0.500 | 50% | 10 |" in text
    assert "torch_compile (estimated)" in text
    for condition in ("NVIDIA X", "driver 1.2", "torch 2.11", "1000 GB/s", "c0ffeec0ff", "2030-01-02"):
        assert condition in text
    summary = tables.section("summary", {"x": {"decode": document(rows)}})
    assert "| qwen3-1.7b | 128/128 | 10.00 | 3.00 | 1.00 | 1000 | 9.34x | 2.85x | 50% |" in summary


def test_first_tokens_are_sorted_by_length_and_say_what_was_not_measured(tables: Any) -> None:
    row = {"model": "qwen3-1.7b", "dtype": "float16", "context": 24576, "prefill": "live", "spread_ms": 0.1, "repetitions": 10,
           "extra_memory_bytes": 2**29}
    rows = [{**row, "length": n, "workload": f"{n} of 24576", "ms": ms, "eager_ms": eager}
            for n, ms, eager in ((20480, 180.0, None), (128, 4.0, 20.0))]
    rows[0] |= {"parts_ms": 160.0, "rested_ms": 171.0}
    text = tables.section("prefill", {"x": {"prefill": document(rows)}})
    assert "| qwen3-1.7b | float16 | 24576 | 128 | live | 4.00 | 0.10 | - | - | 20.0 | 5.00x | 0.50 | 10 |" in text
    assert text.index("| 128 |") < text.index("| 20480 | live | 180.00 | 0.10 | 171.00 | 160.00 | - | - |")


def swept(system: str, e2e_ms: float | None, run: str, **changes: Any) -> dict[str, Any]:
    return {**decode_row(system, e2e_ms or 10.0), "e2e_ms": e2e_ms, "context": 256, "run": run, "why": "", **changes}


def test_a_sweep_compares_within_one_command_and_says_what_is_estimated_or_missing(tables: Any) -> None:
    nothing = dict.fromkeys(("prefill_ms", "step_ms", "spread_ms"))
    rows = [swept("vllm", 300.0, "b"), swept("agentcompile", 100.0, "b"), swept("agentcompile", 150.0, "a"),
            swept("eager", 1500.0, "a", estimated=True), swept("vllm", 240.0, "a", workload="2048/512"),
            swept("agentcompile", 80.0, "a", workload="2048/512"),
            swept("eager", None, "a", workload="2048/512", why="eager did not start: no memory", repetitions=0, **nothing)]
    tables.check("sweep", document(rows))
    text = tables.section("sweep", {"x": {"sweep": document(rows)}})
    assert "| qwen3-1.7b | fp16 | 128/128 | vllm | 300.0 | 0.2 | 10.00 | 2.283 | 0.500 | 22% | 3.00x | 10 |" in text
    assert "| eager (estimated) | 1500.0 | 0.2 | 10.00 | 11.732 | 0.500 | 4% | 10.00x | 10 |" in text
    assert "| 2048/512 | eager | - | - | - | - | 0.500 | - | - | 0 |" in text
    assert "\n\nqwen3-1.7b 2048/512: eager did not start: no memory.\n\n" in text and "NVIDIA X, driver 1.2" in text
    ratios = tables.section("sweep_ratios", {"x": {"sweep": document(rows)}})
    assert "| qwen3-1.7b | fp16 | vllm | 3.00x | 3.00x | 3.00x |" in ratios
    assert "| qwen3-1.7b | fp16 | eager | 10.00x est. | - | 10.00x |" in ratios
    with pytest.raises(tables.ResultsError, match="why"):
        tables.check("sweep", document([{key: value for key, value in rows[0].items() if key != "why"}]))


def test_rows_that_were_measured_at_different_commits_say_so(tables: Any) -> None:
    rows = [decode_row("agentcompile", 137.0, commit="a" * 40), decode_row("eager", 1280.0, commit="b" * 40, date="2030-01-05")]
    assert f"commit {'a' * 10}, {'b' * 10}, 2030-01-02 to 2030-01-05" in tables.conditions(document(rows))


@pytest.mark.parametrize("lacking", ["e2e_ms", "floor_step_ms", "repetitions", "estimated"])
def test_a_row_that_lacks_a_column_is_refused(tables: Any, lacking: str) -> None:
    row = decode_row("eager", 100.0)
    del row[lacking]
    with pytest.raises(tables.ResultsError, match=lacking):
        tables.check("decode", document([row]))


@pytest.mark.parametrize("lacking", ["gpu", "driver", "versions", "commit", "date", "read_ceiling_gbps"])
def test_a_file_without_its_conditions_is_refused(tables: Any, lacking: str) -> None:
    found = document([decode_row("eager", 100.0)])
    del found[lacking]
    with pytest.raises(tables.ResultsError, match=lacking):
        tables.check("decode", found)


def test_text_outside_of_the_markers_stays(tables: Any) -> None:
    text = f"before\n{tables.BEGIN.format('accuracy')}\nold 99\n{tables.END}\nafter\n"
    row = {"model": "qwen3-4b", "positions": 256, "rms_ratio": 1.0123, "p999_ratio": 0.99}
    found = tables.rendered(text, {"x": {"accuracy": document([row])}}, "../")
    assert found.startswith("before\n") and found.endswith("\nafter\n")
    assert "old 99" not in found
    assert "| qwen3-4b | 256 | 1.012 | 0.990 |" in found
    assert "(../benchmarks/results/x/accuracy.json)" in found
    assert tables.rendered(found, {"x": {"accuracy": document([row])}}, "../") == found


def test_what_was_not_measured_says_so(tables: Any) -> None:
    assert tables.section("compile_time", {}) == "Not measured yet."


def test_an_unknown_section_is_refused(tables: Any) -> None:
    with pytest.raises(tables.ResultsError, match="no table is called 'magic'"):
        tables.rendered(f"{tables.BEGIN.format('magic')}\n{tables.END}", {}, "")


def test_the_chart_draws_every_bar_to_scale(tables: Any) -> None:
    rows = [decode_row("eager", 1280.0), decode_row("agentcompile", 137.0)]
    svg = tables.decode_chart(rows, "NVIDIA X")
    widths = [float(w) for w in re.findall(r'<rect x="130" y="\d+" width="([\d.]+)" height="13"', svg)]
    assert len(widths) == 2
    assert widths[0] == pytest.approx(10 * widths[1], rel=1e-2)
    import xml.etree.ElementTree as ElementTree

    ElementTree.fromstring(svg)


def test_the_harness_keeps_other_models_and_stamps_its_rows(tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = importlib.import_module("harness")
    monkeypatch.setattr(harness, "machine", lambda: {"gpu": "NVIDIA X", "gpu_uuid": "GPU-1", "driver": "1.2"})
    harness.write_results("decode", [decode_row("eager", 100.0), decode_row("eager", 100.0, model="qwen3-4b")], 1000.0, tmp_path, "a" * 40)
    path = harness.write_results("decode", [decode_row("eager", 90.0)], 1000.0, tmp_path, "b" * 40)
    found = json.loads(path.read_text())
    tables.check("decode", found)
    assert {(r["model"], r["e2e_ms"], r["commit"][0]) for r in found["rows"]} == {("qwen3-1.7b", 90.0, "b"), ("qwen3-4b", 100.0, "a")}
    assert {r["gpu_uuid"] for r in found["rows"]} == {"GPU-1"}


def test_models_that_were_not_measured_beside_eager_have_a_row_too(tables: Any) -> None:
    ours = {"model": "one", "workload": "128/128", "system": "agentcompile", "step_ms": 2.0, "floor_step_ms": 1.0, "generated_share": 1.0,
            "prefill_ms": 3.0, "repetitions": 5}
    eager = {**ours, "model": "other", "system": "eager", "step_ms": 20.0}
    made = importlib.import_module("architecture_tables").architectures(document([ours, {**ours, "model": "other"}, eager]))
    assert "| one | 128/128 | 2.000 | 1.000 | 2.00x | 100.0% | - | - | 3.00 | - | - | 5 |" in made
    assert "| 20.000 | 10.00x | 5 |" in made


def test_operators_that_are_left_to_the_framework_are_named(tables: Any) -> None:
    left = {"aten.topk.default": 48, "aten.index.Tensor": 1, "aten.where.self": 3, "agentcompile.rope.default": 2}
    ours = {"model": "one", "workload": "128/128", "system": "agentcompile", "step_ms": 2.0, "floor_step_ms": 1.0, "generated_share": 0.5,
            "prefill_ms": 3.0, "repetitions": 5, "generated_calls": 7, "framework_operators": left}
    made = importlib.import_module("architecture_tables").architectures(document([ours]))
    assert "| 50.0% | 7 | 48 topk, 3 where, 2 agentcompile.rope, 1 more | 3.00 |" in made
