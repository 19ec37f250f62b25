"""What explain says of candidates: counts, who refused which and why, and what was selected in their place."""

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core import report
from agentcompile_core.errors import Cause
from agentcompile_core.ir.plan import Cover, Fusion, Origin, Schedule, Step
from agentcompile_core.ir.record import Measurement, TuningRecord
from agentcompile_core.ir.search_log import Tried
from agentcompile_core.ir.selection import Basis, SelectedStep, Selection
from agentcompile_core.ir.verdict import Outcome, Verdict

JUDGES, CAUSES = ("numerics", "emulation", ""), (Cause.TOLERANCE, Cause.CRASH, Cause.REGISTERS)


def step(n: int, implementation: str = "a/a", match: str = "m") -> Step:
    return Step(match_id=match, implementation=implementation, origin=Origin.GENERATED, schedule=Schedule({"n": n}))


def record(n: int, implementation: str = "a/a", match: str = "m", us: float | None = 5.0, judge: str = "", cause: Cause | None = None,
           message: str = "") -> TuningRecord:
    verdict = None if cause is not None and not judge else Verdict(validator=judge or "numerics",
                                                                   outcome=Outcome.PASS if cause is None else Outcome.FAIL)
    return TuningRecord(key=f"{match}{implementation}{n}", signature="s", step=step(n, implementation, match), source_digest="d",
                        verdict=verdict, measurement=None if us is None or cause else Measurement(us=us, spread_us=0.0, repetitions=1),
                        failure=cause, message=message)


def selection(*steps: Step, us: float = 3.0, start: int = 0) -> Selection:
    return Selection(signature="s", region="r", start=start,
                     cover=Cover(matches=tuple(x.match_id for x in steps), fusion=Fusion.FULL, rank=0),
                     steps=tuple(SelectedStep(step=x, label="linear", nodes=(), source=None, basis=Basis.MEASURED,
                                              measurement=Measurement(us=us, spread_us=0.0, repetitions=1)) for x in steps))


@st.composite
def drawn(draw: Any) -> list[TuningRecord]:
    made = []
    for n in range(draw(st.integers(1, 12))):
        cause = draw(st.sampled_from((None, *CAUSES)))
        made.append(record(n, draw(st.sampled_from(("a/a", "b/b"))), draw(st.sampled_from("mn")), judge=draw(st.sampled_from(JUDGES)),
                           cause=cause, message=draw(st.text(max_size=300))))
    return made


@settings(derandomize=True, database=None, deadline=None, max_examples=80)
@given(drawn())
def test_every_refusal_is_counted_once_by_who_refused_it(records: list[TuningRecord]) -> None:
    found = report.candidates_document(records)
    assert sum(c["evaluated"] for c in found) == len(records)
    for one in found:
        mine = [r for r in records if (r.step.match_id, r.step.implementation) == (one["match"], one["implementation"])]
        assert one["passed"] + sum(r["count"] for r in one["refused"]) == one["evaluated"] == len(mine)
        wanted = Counter((r.verdict.validator if r.verdict else "", r.failure.value) for r in mine if r.failure)
        assert {(r["by"], r["cause"]): r["count"] for r in one["refused"]} == wanted
    text = report.candidates_text(records)
    assert text.isprintable() or ("\n" in text and all(line.isprintable() for line in text.splitlines()))


def test_the_reason_and_the_judge_are_said() -> None:
    text = report.candidates_text([record(0, judge="numerics", cause=Cause.TOLERANCE, message="max rel 0.2,\nbudget 0.001"), record(1)])
    assert "  a/a on m: 1 refused by numerics, tolerance: max rel 0.2, budget 0.001" in text.splitlines()
    text = report.candidates_text([record(0, cause=Cause.CRASH, message="signal 11")])
    assert "  a/a on m: 1 refused, crash: signal 11" in text.splitlines()


def test_what_passed_and_was_not_selected_says_what_was() -> None:
    records = [record(0), record(1, "b/b", us=3.0), record(2, "c/c", cause=Cause.TOLERANCE, judge="numerics"), record(3, match="n")]
    said = {(c["match"], c["implementation"]): c["outcome"] for c in report.candidates_document(records, [selection(step(1, "b/b"))])}
    assert said == {("m", "a/a"): "b/b was selected, 3.00 us", ("m", "b/b"): "selected", ("m", "c/c"): "none passed",
                    ("n", "a/a"): "its match is in no cover that was selected"}


def test_what_is_selected_at_later_positions_alone_is_selected() -> None:
    later = [selection(step(1, "b/b"), start=1024), selection(step(0))]
    assert {c["outcome"] for c in report.candidates_document([record(0), record(1, "b/b")], later)} == {"selected"}


def test_who_serves_another_kind_is_counted_and_not_listed() -> None:
    tried = [Tried(signature="s", region="r", match="linear:x", implementation=f"f{n}/f{n}", refused="serves norm matches, not linear")
             for n in range(5)]
    text = report.untried_text([*tried, Tried(signature="s", region="r", match="linear:x", implementation="g/g", refused="needs sm_100")])
    assert "g/g: 1 matches: it refused them: needs sm_100" in text and "5 implementations serve other kinds" in text and "f0" not in text
