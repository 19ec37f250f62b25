"""Where the framework is no allowed origin, its time is no bar: it takes only what nothing else can."""

from types import SimpleNamespace

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from select_cases import chosen, context, planned, region, step
from test_select_covers import BOTH, COVERS, ONE, TWO, Judge, record, two_additions

from agentcompile_core.configuration import Config
from agentcompile_core.configuration.values import ORIGINS
from agentcompile_core.ir.candidate import Candidate
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.plan import Origin
from agentcompile_core.ir.selection import Basis
from agentcompile_core.stages import plan, select
from agentcompile_core.testing import doubles

GENERATED = ("generated",)
TIMES = st.floats(min_value=0.5, max_value=500.0)


def test_by_default_the_framework_competes() -> None:
    assert Config().framework_competes and ORIGINS[-1] == "framework"
    assert not Config(origins=GENERATED).framework_competes
    assert plan.origins(context()) == plan.origins(context(origins=ORIGINS[:-1])), "it is never planned, only what is left"
    assert Origin.FRAMEWORK not in plan.origins(context(origins=("framework",)))


@given(TIMES, TIMES)
def test_without_it_no_clock_decides_between_them(us: float, framework_us: float) -> None:
    records = [record(ONE, framework_us, implementation="framework"), record(ONE, us)]
    selection = chosen(region(), records, context(origins=GENERATED))
    assert [s.step for s in selection.steps] == [step("honest", us)] and selection.basis is Basis.MEASURED
    assert "not among the allowed origins" in selection.steps[0].reason
    competing = chosen(region(), records, context(origins=("generated", "framework")))
    assert competing == chosen(region(), records, context()), "which of the others are allowed does not matter here"


def test_the_fastest_of_what_is_allowed_is_taken_also_where_the_framework_could_not_be_timed() -> None:
    selection = chosen(region(), [record(ONE, 9.0), record(ONE, 4.0, 1), record(ONE, 7.0, 2)], context(origins=GENERATED))
    assert [s.step for s in selection.steps] == [step("honest", 4.0)] and selection.steps[0].baseline is None


@given(st.lists(TIMES, min_size=3, max_size=3), st.lists(TIMES, min_size=3, max_size=3))
def test_as_much_as_can_be_is_covered_and_then_the_fastest_cover_wins(times: list[float], framework: list[float]) -> None:
    made = context(origins=GENERATED)
    records = [record(m, us, implementation="framework") for m, us in zip((ONE, TWO, BOTH), framework, strict=True)]
    records[2] = evolve(records[2], measurement=doubles.measurement(framework[0] + framework[1], 0.01))
    alone = [record(m, us) for m, us in zip((ONE, TWO), times[:2], strict=True)]
    assert chosen(two_additions(), [*records, *alone], made, *COVERS).cover.matches == (ONE, TWO), "nothing fused is there"
    fused = record(BOTH, times[2])
    assert chosen(two_additions(), [*records, alone[0], fused], made, *COVERS).cover.matches == (BOTH,), "both nodes, not one of them"
    if abs(times[2] - times[0] - times[1]) > 0.1:
        best = (BOTH,) if times[2] < times[0] + times[1] else (ONE, TWO)
        assert chosen(two_additions(), [*records, *alone, fused], made, *COVERS).cover.matches == best


@pytest.mark.parametrize(("origins", "basis"), [(ORIGINS, Basis.FALLBACK), (GENERATED, Basis.CHAIN)])
def test_the_whole_step_need_not_beat_it(origins: tuple[str, ...], basis: Basis, monkeypatch: pytest.MonkeyPatch) -> None:
    made = context(origins=origins)
    monkeypatch.setattr(select.chain, "possible", lambda ctx: True)
    monkeypatch.setattr(select.chain, "run", Judge(150.0, 100.0))
    records = (record(ONE, 10.0, implementation="framework"), record(ONE, 12.0))
    candidate = Candidate(signature="s1", step=records[1].step, source=doubles.fake_source("honest", 12.0))
    selected = select.run((planned(region()),), Evaluated(records=records, candidates=(candidate,)), made, doubles.fake_match()[1])
    assert [s.basis for s in selected.selections] == [basis]


@pytest.mark.parametrize(("origins", "removals"), [(ORIGINS, 1), (GENERATED, 0)])
def test_the_chain_takes_no_step_out_for_it(origins: tuple[str, ...], removals: int) -> None:
    made = context(origins=GENERATED)
    records = (record(ONE, 10.0, implementation="framework"), record(ONE, 12.0))
    candidate = Candidate(signature="s1", step=records[1].step, source=doubles.fake_source("honest", 12.0))
    found, selection = Evaluated(records=records, candidates=(candidate,)), chosen(region(), records, made)
    ctx = SimpleNamespace(config=Config(origins=origins), catalog=made.catalog)
    alternatives = select.chain.alternatives_of((region(),), (selection,), found, ctx)
    assert sum(a.selected is None for a in alternatives) == removals and sum(a.selected is not None for a in alternatives) == 1
