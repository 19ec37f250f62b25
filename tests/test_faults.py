"""Faults: those that take no second here, all by `make faults`; the list covers every area, and the committed results are green."""

import json
from pathlib import Path

import pytest
from faults import registry

ROOT = Path(__file__).parents[1]
FAULTS = registry.load()
HOST = sorted(name for name, one in FAULTS.items() if one.tier == registry.HOST)
COMMITTED = ROOT / "benchmarks" / "results" / "cpu" / "faults.json"
# Those that took a second when all were injected last: they start processes that import torch, or wait for somebody's end. And those
# with signals, which a job in the background may not get.
SLOW = {row["fault"] for row in json.loads(COMMITTED.read_text())["rows"] if row["seconds"] >= 1.0 or row["area"] == "signals"}


def test_at_least_a_hundred_faults_over_every_area() -> None:
    assert len(HOST) >= 100 and {FAULTS[name].area for name in HOST} == set(registry.AREAS)
    assert len({FAULTS[name].injected + FAULTS[name].name for name in HOST}) == len(HOST)


@pytest.mark.parametrize("name", sorted(set(HOST) - SLOW))
def test_a_fault_is_met_said_and_costs_nothing(name: str, tmp_path: Path) -> None:
    row = registry.result(FAULTS[name], tmp_path)
    assert row["detected"], row["seen"]
    assert row["seen"] and row["lost"].startswith("nothing: ")


def test_a_fault_that_is_not_met_is_a_red_row(tmp_path: Path) -> None:
    def silent(folder: Path) -> str:
        return ""

    def wrong(folder: Path) -> str:
        raise AssertionError("the program is wrong")

    for run in (silent, wrong):
        one = registry.Fault(area="kernels", name="x", injected="y", lost="nothing: z", run=run)
        row = registry.result(one, tmp_path)
        assert not row["detected"] and row["lost"] == "unknown"


def test_the_committed_results_are_whole_and_green() -> None:
    found = json.loads(COMMITTED.read_text())
    assert [row["fault"] for row in found["rows"] if not row["detected"]] == []
    assert {row["fault"] for row in found["rows"]} == set(HOST), "the list has changed: run `make faults` and commit what it wrote"
    assert all(row["seen"] and row["lost"].startswith("nothing: ") for row in found["rows"])
