"""Changes to what a search selected, as `benchmarks/in_chain.py` reads and makes them, and which answer of the chain a position has."""

import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from test_chain import planned as planned
from test_chain import selected

from agentcompile_core.ir.plan import Schedule
from agentcompile_core.stages.select import chain
from agentcompile_core.worker.chain_question import ChainAnswer, ChainQuestion

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import in_chain

VALUES = st.one_of(st.integers(-9, 1 << 20), st.booleans(), st.sampled_from(["ring", "staged", None]))
KEYS = st.sampled_from(["warps", "columns", "path", "early_kv"])
CHANGES = st.builds(in_chain.Change, match=st.sampled_from(["linear_3+", "2048x6144", "attention"]),
                    values=st.dictionaries(KEYS, VALUES).map(lambda values: tuple(values.items())))


@given(st.lists(CHANGES, min_size=1, max_size=3))
def test_a_line_says_its_changes(changes: list[in_chain.Change]) -> None:
    def said(value: Any) -> str:
        return "" if value is None else str(value)

    line = " ; ".join(f"{c.match} {','.join(f'{key}={said(value)}' for key, value in c.values)}" for c in changes)
    assert in_chain.changes_of(line) == tuple(changes)


def test_a_change_sets_values_and_takes_keys_out() -> None:
    before = Schedule({"warps": 8, "columns": 1024, "static_groups": 3})
    change, = in_chain.changes_of("x warps=4,static_groups=")
    assert in_chain.changed(before, change) == Schedule({"warps": 4, "columns": 1024})


def tried(planned: Any) -> in_chain.Tried:
    """Without a device: nothing is captured."""
    ctx, _, regions, _ = planned
    found = object.__new__(in_chain.Tried)
    found.context, found.regions, found.held = ctx, {region.signature: region for region in regions}, selected(planned)[0]
    return found


def test_the_step_that_is_meant_gets_the_schedule_and_its_source_and_no_other_one_does(planned: Any) -> None:
    one = tried(planned)
    steps = [step for selection in one.held for step in selection.steps]
    linear = next(step for step in steps if step.step.implementation == "gemv/gemv")
    match = next(r for r in one.regions.values() if linear.step.match_id in r.match_by_id).match_by_id[linear.step.match_id]
    ids = {m.id: m for region in one.regions.values() for m in region.matches}
    for name in (match.id, f"{match.integer('n')}x{match.integer('k')}"):
        after = [step for x in one.with_changes(in_chain.changes_of(f"{name} in_flight=1,stages=2")) for step in x.steps]
        other = {new.step.match_id for new in after if new not in steps}
        assert match.id in other and all(name in (m, f"{ids[m].integer('n')}x{ids[m].integer('k')}") for m in other)
        made = next(step for step in after if step.step.match_id == match.id)
        assert (made.step.schedule["in_flight"], made.step.schedule["stages"]) == (1, 2) and made.source != linear.source
    twice = one.with_changes(in_chain.changes_of(f"{match.id} in_flight=1 ; {match.id} stages=2 ;"))
    made = next(step for x in twice for step in x.steps if step.step.match_id == match.id)
    assert (made.step.schedule["in_flight"], made.step.schedule["stages"]) == (1, 2)
    with pytest.raises(LookupError, match=r"no step has nothing in its match"):
        one.with_changes(in_chain.changes_of("nothing warps=4"))


def test_a_position_is_asked_of_its_range(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, graphs, regions, _ = planned
    selections, _ = selected(planned)
    monkeypatch.setattr(chain, "capacity_of", lambda graph: 24576)  # ranges from 1,024, 4,096 and 16,384 on
    asked = in_chain.Asked()
    with pytest.raises(SystemExit, match="no chain was judged"):
        asked.at(256)
    question = ChainQuestion(graph=graphs.graphs[0], regions=regions, selections=selections, alternatives=(), target=ctx.target,
                             backend="cuda", position=256, margin=0.01, budget_s=1.0)
    answers: dict[int, Any] = {256: ChainAnswer(selections=(), us=1.0, first_us=1.0, framework_us=1.0, tried=0, accepted=0), 9: None}
    answers[9216] = evolve(answers[256], earlier=((8192, 1.1),))  # what it chose holds from 12,288 on
    monkeypatch.setattr(chain, "ask", lambda question, held: (held, answers.get(question.position, answers[256])))
    with in_chain.Asked() as asked:
        for position, start, held in ((256, (), "first"), (9, (1024,), "second"), (9216, (4096,), "third")):  # of the second: no answer
            assert chain.ask(evolve(question, position=position, earlier=start), held) == (held, answers.get(position, answers[256]))
    found = {position: asked.at(position) for position in (0, 1023, 1024, 2080, 8192, 12287, 12288)}
    assert [held for _, held in found.values()] == ["first", "first", "second", "second", "second", "second", "third"]
    assert [q.position for q, _ in found.values()] == list(found)
