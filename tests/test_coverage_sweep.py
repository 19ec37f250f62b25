"""A seeded part of ``make coverage``, and its own rules: what counts as right, which bytes count, which rows are kept."""

import json
import random
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
SEED = 20240817
# Always judged: each was wrong once, or is the only one of its kind.
ALWAYS = ("relu", "tanh", "writes_its_input", "running_sum", "slice_written", "gated_mlp_one_row")


@pytest.fixture(scope="module")
def sweep() -> Iterator[Any]:
    """The module of the sweep, with one thread for torch."""
    before, threads = list(sys.path), torch.get_num_threads()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from covered import sweep

        torch.set_num_threads(1)
        yield sweep
    finally:
        torch.set_num_threads(threads)
        sys.path[:] = before


def options(**changes: Any) -> Namespace:
    return Namespace(**{"device": "cpu", "without_kernels": True, "budget_s": 30.0, "budget_plans": 8, "seconds": 600.0,
                        "item_seconds": 120, "commit": "c0ffee0", **changes})


@pytest.mark.parametrize("count", [1, 3, 24, 500])
def test_shards_share_the_work(sweep: Any, count: int) -> None:
    asked = [sweep.items(options(only="", all=False, kind="", limit=0, seed=7, shard=f"{i}/{count}")) for i in range(1, count + 1)]
    (everything,) = [sweep.items(options(only="", all=False, kind="", limit=0, seed=7, shard="1/1"))]
    assert sorted(item for part in asked for item in part) == sorted(everything)
    assert max(map(len, asked)) - min(map(len, asked)) <= 1
    for wrong in ("0/3", "4/3", "x", "2", "-1/2"):
        with pytest.raises(SystemExit, match="such as 2/8"):
            sweep.shard(wrong)


@pytest.mark.slow
def test_a_drawn_part_is_right_in_both_orders(sweep: Any, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    names = draw.sample(sweep.models.covered(), 2)
    chosen = [("model", name) for name in names] + [("module", name) for name in (*ALWAYS, *draw.sample(sorted(sweep.CASES), 5))]
    asked = options()
    rows = sweep.run(chosen, sweep.bench_of(asked, tmp_path), asked)
    assert len(rows) == 2 * len(chosen)
    assert [(row["name"], row["why"]) for row in rows if row["outcome"] != "ok"] == []


def test_kernels_that_ran_are_counted_and_their_results_are_right(sweep: Any, tmp_path: Path) -> None:
    asked = options(without_kernels=False)
    bench = sweep.bench_of(asked, tmp_path)
    rows = [sweep.row_of(("module", name), bench) for name in ("relu", "identity", "relu")]
    assert [row["outcome"] for row in rows] == ["ok"] * 3
    assert [row["kernels_run"] for row in rows] == [1, 0, 1]
    assert rows[0]["generated_share"] == 1.0 and rows[0]["bytes"] == rows[2]["bytes"]


class SharesAndTotals(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.softmax(x / 4.0, dim=-1), x.sum(0)


def test_a_plain_softmax_and_a_plain_sum_run_as_generated_kernels(sweep: Any, tmp_path: Path) -> None:
    from covered.ran import Launches

    bench = sweep.bench_of(options(without_kernels=False, budget_plans=2), tmp_path)
    launches, x = Launches(bench.catalog.backends.values()), torch.randn(3, 33)
    try:
        mine = bench.compiled(SharesAndTotals(), example_inputs=(x,))
        found = mine(x)
    finally:
        launches.stop()
    facts = launches.facts(mine.session.program)
    assert (facts["kernels_run"], facts["generated_share"], facts["framework_operators"]) == (2, 1.0, {})
    idle = Launches(())  # bytes of kernels that did not run count as the framework's
    assert idle.facts(mine.session.program)["generated_share"] == 0.0
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, SharesAndTotals()(x), strict=True))


@pytest.mark.parametrize(("found", "wanted", "why"), [
    ((1, 2), [1, 2], "is a tuple instead of a list"),
    ({"a": 1}, {"b": 1}, "has the keys"),
    ([1], [1, 2], "has 1 items instead of 2"),
    (torch.ones(2), torch.ones(2, dtype=torch.float64), "torch.float64"),
    (torch.ones(2), torch.ones(2) + 1e-3, "off by"),
    (torch.tensor([1.0, float("nan")]), torch.ones(2), "NaN"),
    ((None, 3), (None, 4), "is 3 instead of 4"),
    (7, torch.tensor(7), "is a int instead of a Tensor"),
])
def test_what_differs_is_said(sweep: Any, found: Any, wanted: Any, why: str) -> None:
    from covered.judging import results_differ

    assert why in results_differ(found, wanted)
    assert results_differ(wanted, wanted) == ""


def test_differing_tokens_are_found(sweep: Any) -> None:
    from covered.judging import tokens_differ

    assert tokens_differ(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 9, 3]])) == "token 1 is 2 instead of 9"
    assert "shape" in tokens_differ(torch.tensor([[1, 2]]), torch.tensor([[1, 2, 3]]))


def test_rows_of_what_was_not_judged_now_are_kept(sweep: Any, tmp_path: Path) -> None:
    def row(name: str, order: int, outcome: str) -> dict[str, Any]:
        return {"kind": "module", "name": name, "order": order, "outcome": outcome}

    from covered import results

    results.write([row("a", 1, "wrong"), row("a", 2, "ok"), row("b", 1, "ok"), row("b", 2, "ok")], tmp_path, options())
    results.write([row("a", 1, "ok"), row("a", 2, "ok")], tmp_path, options(commit="beef00d"))
    found = json.loads((tmp_path / "coverage.json").read_text())
    assert [(r["name"], r["outcome"], r["commit"]) for r in found["rows"]] == [
        ("a", "ok", "beef00d"), ("a", "ok", "beef00d"), ("b", "ok", "c0ffee0"), ("b", "ok", "c0ffee0")]
    assert not results.is_clean([row("a", 1, "ok")], [("module", "a")]), "one order only"
    assert not results.is_clean([row("a", 1, "ok"), row("a", 2, "raised")], [("module", "a")])


def test_what_raises_is_a_row(sweep: Any, tmp_path: Path) -> None:
    from covered.judge import judged

    def once(_: Any) -> Any:
        raise ValueError("no such thing")

    found = judged("module", "x", once, sweep.bench_of(options(), tmp_path))
    assert found["outcome"] == "raised" and found["why"] == "ValueError: no such thing"


def test_the_sweep_is_as_large_as_promised(sweep: Any) -> None:
    assert len(sweep.models.covered()) >= 60 and len(sweep.CASES) >= 60


def test_what_takes_too_long_is_a_row(sweep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from covered import judge

    def endless(*_: Any) -> Any:
        while True:
            try:
                torch.ones(1).sum()
            except Exception:  # as a guard of the compiler would
                continue

    monkeypatch.setattr(judge, "_module", endless)
    monkeypatch.setattr(sweep.signal, "alarm", lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds / 5))  # whole ones are long
    asked = options(item_seconds=1)
    rows = sweep.run([("module", "relu")], sweep.bench_of(asked, tmp_path), asked)
    assert [(row["outcome"], row["why"]) for row in rows] == [("raised", "TooLong: its time is over")] * 2
