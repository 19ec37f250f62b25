"""Task sets: found as they lie in public checkouts, judged one process each, scored over all tasks; a fallback is never a win."""

import json
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
OWN = ROOT / "benchmarks" / "kernelbench_tasks"
TASK = '''
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x, factor):
        BODY

def get_inputs():
    return [torch.rand(4, 96), 0.5]

def get_init_inputs():
    return []
'''


def test_tasks_are_found_as_public_checkouts_hold_them(bench: Any, tmp_path: Path) -> None:
    find, missing = bench("kernelbench_run.tasks").find, bench("kernelbench_run.tasks").NoTasks
    for name in ("level1/10_B.py", "level1/2_A.py", "level1/notes.txt", "level1/__init__.py", "level3-pike/1_C.py", "src/1_No.py"):
        path = tmp_path / "KernelBench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TASK)
    assert [(t.level, t.number, t.name) for t in find(tmp_path)] == [("1", 2, "A"), ("1", 10, "B"), ("3-pike", 1, "C")]
    assert [t.number for t in find(tmp_path / "KernelBench" / "level1")] == [2, 10]
    assert [t.name for t in find(tmp_path, "1", "3-12")] == ["B"] and [t.name for t in find(tmp_path, "", "A")] == ["A"]
    for level, only in (("9", ""), ("", "77")):
        with pytest.raises(missing, match="none of them is asked for"):
            find(tmp_path, level, only)
    with pytest.raises(missing, match="is no folder"):
        find(tmp_path / "absent")


@pytest.mark.parametrize("path", sorted(OWN.rglob("*.py")), ids=lambda path: path.stem)
def test_our_own_tasks_are_tasks(path: Path) -> None:
    from agentcompile_core.stages.capture.modules import load_file

    loaded = load_file(path, dtype=None, device="cpu", meta=True)
    with torch.device("meta"):
        result = loaded.module(*loaded.example_inputs)
    assert result.numel() and sum(t.numel() for t in loaded.example_inputs) < 1 << 28


def test_our_own_set_follows_the_published_mix(bench: Any) -> None:
    chosen = bench("kernelbench_run.tasks").find(OWN)
    assert len(chosen) >= 40 and {t.level for t in chosen} == {"1", "2", "3"}
    assert sum("onvolution" in t.name or "block" in t.name.lower() for t in chosen) >= 5


ROWS = st.lists(st.one_of(
    st.builds(lambda n: {"error": "x", "level": "1", "number": n, "name": "e", "seconds": 1.0}, st.integers(1, 9)),
    st.builds(lambda n, correct, fallback, speed: {
        "level": "1", "number": n, "name": "t", "correct": correct, "is_fallback": fallback, "speedup": speed, "generated_share": 0.6,
        "why": "", "reason": "a|b", "fallbacks": [], "correct_ours": None, "compile_s": 1.0, "us": 2.0, "baseline_us": 2.0},
        st.integers(1, 9), st.booleans(), st.booleans(), st.floats(0.01, 100.0))), max_size=12)


@given(ROWS)
def test_scores_count_all_tasks_and_no_fallback_wins(bench: Any, rows: list[dict[str, Any]]) -> None:
    scores = bench("kernelbench_run.scores")
    found = scores.summary(rows)
    won = [r for r in rows if r.get("correct") and not r["is_fallback"]]
    for threshold in (1.0, 1.5, 2.0):
        assert found[f"fast_{threshold:g}"] == sum(r["speedup"] > threshold for r in won) / max(1, len(rows))
    assert found["fast_0"] >= found["fast_1"] >= found["fast_1.5"] >= found["fast_2"]
    assert all(scores.speedup(r) == 1.0 for r in rows if r.get("correct") and r["is_fallback"])
    assert all(scores.speedup(r) == 0.0 for r in rows if not r.get("correct"))
    assert len(scores.markdown(rows).splitlines()) == len(rows) + 2
    ElementTree.fromstring(scores.chart(rows, "eager"))


@pytest.mark.slow
def test_a_folder_is_run_and_what_fails_stops_nobody(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "level1"
    folder.mkdir()
    (folder / "1_Fails.py").write_text(TASK.replace("BODY", "raise ValueError('on purpose')"))
    (folder / "2_Halved.py").write_text(TASK.replace("BODY", "return torch.relu(x) * factor"))
    out = tmp_path / "found.json"
    little = ["--device", "cpu", "--budget-plans", "2", "--budget-s", "40"]
    code = bench("kernelbench").main([str(tmp_path), *little, "--out", str(out), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 1 and document == json.loads(out.read_text())
    fails, halved = document["rows"]
    assert "on purpose" in fails["error"]
    assert halved["correct"] and halved["correct_ours"] and not halved["is_fallback"] and halved["generated_share"] == 1.0
    assert len(set(halved["seeds"])) == 5 and "speedup" not in halved
    assert document["summary"]["tasks"] == 2 and document["summary"]["fast_0"] == 0.5 and document["summary"]["fast_1"] == 0.0
    assert out.with_suffix(".md").read_text().count("\n") == 4 and out.with_suffix(".svg").exists()

    document["rows"][0]["error"] = "kept"
    out.write_text(json.dumps(document | {"rows": document["rows"][:1]}))
    resumed = [str(tmp_path), *little, "--out", str(out), "--json", "--resume"]
    assert bench("kernelbench").main([*resumed, "--only", "1"]) == 1
    assert json.loads(capsys.readouterr().out)["rows"] == document["rows"][:1]
    anew = type("Anew", (), {"__init__": lambda self, task, gpu: None, "answer": lambda self, terms, seconds: {"error": "judged anew"}})
    monkeypatch.setattr(bench("kernelbench"), "_Waiting", anew)  # what a process answers is said above
    bench("kernelbench").main([*resumed, "--only", "1", "--commit", "f" * 40])
    assert json.loads(capsys.readouterr().out)["rows"][0]["error"] == "judged anew"


@pytest.mark.slow
def test_tasks_are_dealt_to_several_devices_and_keep_their_order(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    runner, seen = bench("kernelbench"), []
    for number in range(1, 6):
        (tmp_path / f"{number}_Task.py").write_text(TASK.replace("BODY", "return x * factor"))

    class Waiting:
        def __init__(self, task: Any, gpu: int | None) -> None:
            seen.append(gpu)
            self._late, self._gpu = task.number % 2, gpu

        def answer(self, terms: dict[str, Any], seconds: float) -> dict[str, Any]:
            time.sleep(0.2 * self._late)
            return {"error": "on purpose"}

        def kill(self) -> None:
            seen.append("killed")

        def end(self) -> None:
            seen.append("ended")

    monkeypatch.setattr(runner, "_Waiting", Waiting)
    assert runner.main([str(tmp_path), "--device", "cpu", "--gpus", "2", "--json"]) == 1
    assert [row["number"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1, 2, 3, 4, 5]
    assert sorted(set(seen)) == [0, 1] and len(seen) == 5

    def broken(self: Any, terms: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self._gpu == 1:
            raise KeyboardInterrupt
        deadline = time.monotonic() + 20
        while "killed" not in seen and time.monotonic() < deadline:
            time.sleep(0.01)
        return {"error": "its process ended with code -9"}

    seen.clear()
    monkeypatch.setattr(Waiting, "answer", broken)
    out = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        runner.main([str(tmp_path), "--device", "cpu", "--gpus", "2", "--json", "--out", str(out)])
    assert "killed" in seen and "ended" in seen and not out.exists()
