"""A small storm: writers and compiles killed at random moments; `make storm` is the whole of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "benchmarks" / "results" / "cpu" / "storm.json"


def check(document: dict, kills: int, seconds: int) -> None:
    compiles, writers = document["rows"]
    assert compiles["kills"] >= kills and writers["seconds"] >= seconds and writers["writers"] == 4 and document["clean"]
    for row in (compiles, writers):
        assert row["committed"] > 0 and row["wrong_reads"] == row["lost"] == row["left"] == 0 and row["warnings"] == []
    assert compiles["wrong_answers"] == compiles["processes"] == 0 and writers["reads"] > 100 * writers["seconds"]


@pytest.mark.slow
def test_a_small_storm_loses_nothing(tmp_path: Path) -> None:
    small = ["--seconds", "4", "--kills", "8", "--seed", "1", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "storm.py"), *small], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    check(json.loads((tmp_path / "storm.json").read_text()), kills=8, seconds=4)


def test_the_committed_storm_is_a_whole_and_a_clean_one() -> None:
    check(json.loads(COMMITTED.read_text()), kills=200, seconds=300)
