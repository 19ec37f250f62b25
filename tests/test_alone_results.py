"""Rows of models by themselves are put together only where every file has them, at one commit."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import alone
import tables

COMMITTED = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "h200" / "alone.json"


def written(folder: Path, suffix: str, model: str, **changed: Any) -> None:
    """What decode.py leaves in a folder about one model."""
    row = next(row for row in json.loads(COMMITTED.read_text())["rows"]) | {"model": model, **changed}
    head = {**json.loads(COMMITTED.read_text()), "commit": row["commit"]}
    for name in ("decode", *alone.FILES):
        mine = row if name == "decode" else {key: row[key] for key in ("model", "commit", *alone.FILES[name])}
        (folder / f"{name}{suffix}.json").write_text(json.dumps({**head, "rows": [mine]}))


def test_both_types_are_put_together(tmp_path: Path) -> None:
    written(tmp_path, "", "qwen3-1.7b")
    written(tmp_path, "_bf16", "llama-3.1-8b", dtype="bfloat16")
    found = alone.merged(tmp_path)
    tables.check("alone", found)
    assert [row["model"] for row in found["rows"]] == ["qwen3-1.7b", "llama-3.1-8b"]
    assert "| llama-3.1-8b | bf16 |" in tables.alone_table(found)


def test_what_a_command_that_was_cut_off_has_not_timed_stays_open(tmp_path: Path) -> None:
    written(tmp_path, "", "qwen3-1.7b")
    head = json.loads((tmp_path / "compile_time.json").read_text())
    (tmp_path / "compile_time.json").write_text(json.dumps({**head, "rows": []}))
    found = alone.merged(tmp_path)
    tables.check("alone", found)
    assert found["rows"][0]["cold_s"] is None and "| - | - |" in tables.alone_table(found)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda folder: written(folder, "_bf16", "llama-3.1-8b", commit="f" * 40), "measure all of them at one commit"),
    (lambda folder: (folder / "memory.json").unlink(), "memory.json is missing"),
    (lambda folder: (folder / "accuracy.json").write_text(json.dumps({"rows": []})), "accuracy.json has no row of qwen3-1.7b"),
    (lambda folder: (folder / "decode.json").unlink(), "no decode.json in it"),
])
def test_what_is_missing_or_of_another_commit_is_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    written(tmp_path, "", "qwen3-1.7b")
    spoil(tmp_path)
    with pytest.raises(SystemExit, match=message):
        alone.merged(tmp_path)
