"""benchmarks/batches.py: both ways to run a batch are timed, and the table says what they took or why there is one way."""

import argparse
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from capture_models import CONTEXT, SIZES, tiny

from agentcompile_core import compile

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("batches", "batch_tables", "harness", "full_models", "markdown_table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("batches"), importlib.import_module("batch_tables")


def test_rows_are_timed_in_both_ways(modules: Any) -> None:
    batches, tables = modules
    model = compile(tiny("qwen3", SIZES), max_context=CONTEXT, run_on="framework", origins=(), validators=())
    model.session.rows._made = {(size, "decode"): SimpleNamespace(seconds=(size * 1e-3, 9e-4)) for size in (8, 4, 2)}
    options = argparse.Namespace(model="tiny", dtype="float32", rows=(2, 3), input=4, output=3, repetitions=2, eager=False)
    rows = batches.rows_of(model, options)
    assert [(row["batch"], row["system"]) for row in rows] == [(2, "together"), (2, "one by one"), (3, "together"), (3, "one by one")]
    assert all(row["e2e_ms"] > 0 and row["repetitions"] == 2 for row in rows)
    text = tables.batches({"rows": rows})
    assert "| 2 x 4/3 | 2000 | 1800 |" in text and "| 3 x 4/3 | 4000 | 2700 |" in text  # a step of four serves three
    assert "| 2 x 4/3 | - | - |" in tables.batches({"rows": [{**row, "together_us": 0.0} for row in rows]})
    timed = [{**row, "together_us": 30.0, "single_us": 20.0, "e2e_ms": 4.0 if row["system"] == "together" else 10.0,
              "why": "no rows"} for row in rows]
    text = tables.batches({"rows": timed})
    assert "| 3 x 4/3 | 30 | 60 | 4.0 | 10.0 | 2.50x |" in text and "tiny 2 x 4/3: no rows." in text


def test_what_is_no_number_of_rows_is_refused(modules: Any) -> None:
    for text in ("1", "2,x", "", "0", "9"):
        with pytest.raises(SystemExit, match="from 2 to 8"):
            modules[0].rows_asked(text)
    assert modules[0].rows_asked("2, 8") == (2, 8)
