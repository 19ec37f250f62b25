"""Random plans of every family for all six targets: each is lowered within its limits, and what the compiler makes of some of them."""

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import attention_case, sloped_case

from agentcompile_core.plugin_api import DType
from agentcompile_core.stages.plan import checked

ROOT = Path(__file__).parents[1]
SEED, EACH = 23, 31  # plans per target: each draw once at the least
MODULES = ("random_planning", "random_planning.draws", "random_planning.plans", "random_planning.results", "random_plans", "harness")


@pytest.fixture(scope="module")
def tools() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield {name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def bench(tools: Any) -> Any:
    return tools["plans"].Bench()


@pytest.fixture(scope="module")
def rows(tools: Any, bench: Any) -> list[dict[str, Any]]:
    return [bench.plan(name, index, SEED, build=False) for index in range(EACH) for name in tools["plans"].TARGETS]


def test_every_random_plan_is_lowered_within_the_limits_of_its_target(rows: list[dict[str, Any]]) -> None:
    assert Counter(row["target"] for row in rows) == dict.fromkeys(Counter(row["target"] for row in rows), EACH)
    assert [(row["target"], row["family"], row["shapes"], row["why"]) for row in rows if row["outcome"] != "lowered"] == []
    assert len({row["arch"] for row in rows}) == 6


def test_every_installed_family_is_drawn(tools: Any, rows: list[dict[str, Any]]) -> None:
    assert tools["plans"].undrawn(rows, ()) == [], "add a draw of what this family serves to benchmarks/random_planning/draws.py"


def test_what_is_refused_has_a_reason_that_says_what(tools: Any, rows: list[dict[str, Any]]) -> None:
    refused = [(who, why) for row in rows for who, why in row["refused"]]
    assert refused, "random draws hold heads, rows and sizes that somebody has to refuse"
    assert all(len(why) > 20 for _, why in refused)
    reasons = tools["results"].reasons(rows)
    assert sum(count for _, _, count in reasons) == len(refused) and len(reasons) <= len(refused)


def test_reasons_that_differ_in_numbers_only_are_counted_together(tools: Any) -> None:
    rows = [{"refused": [["a", "a row of 123 elements"], ["b", "2 of 3"]]}, {"refused": [["a", "a row of 45678 elements"]]}]
    assert tools["results"].reasons(rows) == [("a", "a row of # elements", 2), ("b", "# of #", 1)]


def test_a_draw_depends_on_nothing_but_its_seed(bench: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows[7:30:11]:
        assert bench.plan(row["target"], row["index"], SEED, build=False) == row
    assert bench.plan(rows[7]["target"], rows[7]["index"], SEED + 1, build=False) != rows[7]


@pytest.mark.compile
def test_a_handful_is_built_for_each_architecture(tools: Any, bench: Any) -> None:
    if not bench.backend.can_build(preset("h200")):
        pytest.skip(bench.backend.can_build(preset("h200")).reason)
    built = [bench.plan(name, 4 + 7 * turn, SEED) for turn, name in enumerate(tools["plans"].TARGETS)]
    found = tools["results"].counts(built)
    assert tools["results"].is_clean(built), tools["results"].summary(built)
    assert found["built"] == found["lowered"] == found["planned"] == 6
    assert all(0 < row["registers"] <= row["registers_cap"] and row["shared_bytes"] >= row["dynamic_bytes"] for row in built)


@pytest.mark.parametrize("dtype", (DType.F16, DType.BF16, DType.F32), ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("vectors", range(1, 10))
def test_no_space_lists_a_schedule_twice_however_narrow_the_heads(bench: Any, dtype: DType, vectors: int) -> None:
    width = vectors * 16 // dtype.bytes
    family = bench.families["attention"]
    for match, _ in (attention_case(heads=(6, 2), head_dim=width, capacity=100, dtype=dtype),
                     sloped_case(heads=(2, 2), head_dim=width, capacity=9, slopes=(), value_dim=5 * 16 // dtype.bytes, dtype=dtype)):
        assert checked(family.space(match, preset("h200"))).points


def test_results_hold_the_counts_and_are_only_clean_where_all_were_built(tools: Any, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    results = tools["results"]
    built = [{**row, "outcome": "built", "registers": 40, "registers_cap": 64, "spill_bytes": 0, "shared_bytes": 0} for row in rows[:12]]
    failed = {**rows[12], "outcome": "failed", "lowered": True, "why": "ptxas error: too much shared data"}
    late = {**rows[13], "outcome": "refused", "lowered": False, "why": "no schedule is legal for this match on this target"}
    path = results.write([*built, failed, late], tmp_path, "a" * 40, SEED)
    found = json.loads(path.read_text())
    assert sum(counts["built"] for counts in found["counts"].values()) == 12 and found["seed"] == SEED
    assert sum(counts["lowered"] for counts in found["counts"].values()) == 13
    assert [row["why"] for row in found["rows"] if row["why"]] == [failed["why"], late["why"]]
    assert results.is_clean(built) and results.is_clean([*built, late]) and not results.is_clean([*built, failed])
    assert not results.is_clean([{**late, "why": ""}]), "a refusal without a reason is none"
    assert not results.is_clean([{**built[0], "lowered": False}]), "more built than lowered"
