"""What advice was worth: figures from drawn searches agree with what they mean, and the command reads bundles of one model."""

import json
import math
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.errors import UsageError
from agentcompile_core.ir.advice import Advice, AdviceRecord, RejectedItem
from agentcompile_core.ir.decisions import Decisions, RegionChoices
from agentcompile_core.ir.plan import Origin, Schedule, Step
from agentcompile_core.ir.record import Measurement, TuningRecord
from agentcompile_core.ir.verdict import Outcome, Verdict
from agentcompile_core.report import worth
from agentcompile_core.runtime import bundle_reader

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=60)
PASS = Verdict(validator="v", outcome=Outcome.PASS)


def record(match: str, n: int, us: float | None, origin: Origin = Origin.GENERATED) -> TuningRecord:
    step = Step(match_id=match, implementation="a/a", origin=origin, schedule=Schedule({"n": n}))
    measured = None if us is None else Measurement(us=us, spread_us=0.0, repetitions=1)
    return TuningRecord(key=f"{match}{n}", signature="s", step=step, source_digest="d", measurement=measured,
                        verdict=PASS if us is not None else evolve(PASS, outcome=Outcome.FAIL))


def search(advisor: str, order: dict[str, list[int]], us: dict[tuple[str, int], float | None], **told: Any) -> worth.Search:
    """A search that met candidates ``n`` of every match in the order given."""
    records = [record(match, n, us[match, n]) for match, numbers in order.items() for n in numbers]
    decisions = Decisions(margin=0.0, advisor=advisor, validators=(), places=tuple(range(len(records))),
                          regions=(RegionChoices(signature="s", region="r", instances=3, covers=(), matches=()),), **told)
    return worth.search_of(f"{advisor}.bundle", records, decisions)


@st.composite
def drawn(draw: Any) -> tuple[dict[tuple[str, int], float | None], list[worth.Search]]:
    """Times of candidates of some matches, and searches that met some of them in some order."""
    us: dict[tuple[str, int], float | None] = {}
    for match in draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)):
        for n in range(draw(st.integers(1, 6))):
            us[match, n] = draw(st.one_of(st.none(), st.floats(0.5, 500.0)))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        order: dict[str, list[int]] = {}
        for match, n in draw(st.permutations(list(us))):
            if draw(st.booleans()):
                order.setdefault(match, []).append(n)
        found.append(search(draw(st.sampled_from(("one", "two"))), order, us))
    return us, found


@SETTINGS
@given(drawn())
def test_figures_lie_where_they_can_and_say_what_the_searches_met(case: tuple[dict, list[worth.Search]]) -> None:
    us, searches = case
    document = worth.document_of(searches)
    json.dumps(document, allow_nan=False)
    assert worth.text_of(document)
    met = {(place[1], dict(step.schedule.items)["n"]) for one in searches for place, steps in one.met.items() for step in steps}
    assert document["candidates_timed"] == sum(us[key] is not None for key in met)
    for row in document["advisors"]:
        for cell in (row["order_correlation"], *row["until_near"].values(), *row["never_near"].values()):
            if None not in cell.values():
                assert cell["low"] <= cell["high"]
        tau = row["order_correlation"]["value"]
        assert tau is None or -1.0 <= tau <= 1.0
        assert row["behind_best"] is None or row["behind_best"] >= -1e-12
        near, nearer = (row["never_near"][f"{one:g}"]["value"] for one in reversed(worth.NEAR))
        assert near is None or near <= nearer, "whoever is within 2 % is within 5 %"


@SETTINGS
@given(drawn())
def test_the_order_of_the_bundles_changes_nothing(case: tuple[dict, list[worth.Search]]) -> None:
    one, other = (worth.document_of(searches)["advisors"] for searches in (case[1], list(reversed(case[1]))))
    assert {row["advisor"]: row for row in one}.keys() == {row["advisor"]: row for row in other}.keys()
    for row in one:
        twin = next(r for r in other if r["advisor"] == row["advisor"])
        assert row["behind_best"] == pytest.approx(twin["behind_best"])
        assert row["order_correlation"]["value"] == pytest.approx(twin["order_correlation"]["value"])


def test_who_meets_the_fastest_first_is_worth_more() -> None:
    us: dict[tuple[str, int], float | None] = {(match, n): 10.0 + n for match in "abcd" for n in range(8)}
    good = search("good", {match: list(range(8)) for match in "abcd"}, us)
    bad = search("bad", {match: list(range(7, 1, -1)) for match in "abcd"}, us)
    rows = {row["advisor"]: row for row in worth.document_of([bad, good])["advisors"]}
    assert rows["good"]["order_correlation"]["value"] == 1.0 and rows["bad"]["order_correlation"]["value"] == -1.0
    assert rows["good"]["until_near"]["0.02"]["value"] == 1.0 and rows["bad"]["until_near"]["0.02"]["value"] is None
    assert rows["bad"]["never_near"]["0.02"]["value"] == 1.0 and rows["good"]["never_near"]["0.02"]["value"] == 0.0
    assert rows["good"]["behind_best"] == 0.0 and rows["bad"]["behind_best"] == pytest.approx(0.2)
    text = worth.text_of(worth.document_of([bad, good]))
    assert "never" in text and "20.0%" in text


def test_steps_weigh_as_often_as_they_are_in_the_model() -> None:
    times = {("a", 0): 10.0, ("a", 1): 20.0}
    one = search("one", {"a": [0, 1]}, times)
    late = search("late", {"a": [1]}, times)
    often = evolve(late, instances={"s": 9})
    assert worth.document_of([one, often])["advisors"][1]["behind_best"] == 1.0


@pytest.mark.parametrize("values", list(permutations((1.0, 2.0, 3.0, 3.0))))
def test_kendalls_tau_is_that_of_its_definition(values: tuple[float, ...]) -> None:
    wanted = [math.copysign(1, b - a) for i, a in enumerate(values) for b in values[i + 1:] if a != b]
    assert worth.kendall(values) == pytest.approx(sum(wanted) / math.sqrt(6 * len(wanted)))
    assert worth.kendall([2.0, 2.0]) is None and worth.kendall([1.0]) is None


def test_answers_items_and_what_they_cost_are_counted() -> None:
    told = (AdviceRecord(advisor="llm", signature="s", round=0, accepted=Advice(order=("a/a",)), tokens=70, seconds=1.5,
                         rejected=(RejectedItem(item="x", rule="A1"),)),
            AdviceRecord(advisor="llm", signature="s", round=1, accepted=Advice(), error="no answer", seconds=2.0))
    row = worth.document_of([search("llm", {"a": [0]}, {("a", 0): 1.0}, advice=told)])["advisors"][0]
    assert (row["answers"], row["unanswered"], row["tokens"], row["seconds"], row["refused_share"]) == (1, 1, 70, 3.5, 0.5)


def test_the_frameworks_times_are_no_candidates() -> None:
    records = [record("a", 0, 5.0), record("a", 1, 1.0, Origin.FRAMEWORK)]
    decisions = Decisions(margin=0.0, advisor="x", validators=(), places=(0, 1))
    assert len(worth.search_of("x", records, decisions).us) == 1


def test_bundles_that_nothing_was_timed_for_say_so(cli: Any, tiny_bundle: Path) -> None:
    code, out, err = cli("advice", tiny_bundle, tiny_bundle)
    assert code == 0, err
    assert "nothing was timed" in out and out.count(str(tiny_bundle)) == 1
    code, out, _ = cli("advice", tiny_bundle, "--json")
    document = json.loads(out)
    assert code == 0 and document["model"] == "tiny_model" and document["candidates_timed"] == 0
    assert document["bundles"][0]["evaluated"] > 0


def test_bundles_of_different_models_are_refused(tiny_bundle: Path) -> None:
    manifest = bundle_reader.read_manifest(tiny_bundle)
    worth.check_alike({"a": manifest, "b": manifest})
    for what, other in (("workload", evolve(manifest, workload=evolve(manifest.workload, max_context=64))),
                        ("target", evolve(manifest, target=evolve(manifest.target, name="other"))),
                        ("model", evolve(manifest, model=evolve(manifest.model, name="other")))):
        with pytest.raises(UsageError, match=f"a and b are of different {what}s"):
            worth.check_alike({"a": manifest, "b": other})


def test_what_is_no_bundle_is_refused(cli: Any, tmp_path: Path) -> None:
    code, _, err = cli("advice", tmp_path)
    assert code == 2 and "is not a bundle" in err
