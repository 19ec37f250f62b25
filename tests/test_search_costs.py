"""What a search pays and what it may save: hangs cost what they took, quick timings are believed only where noise says nothing, and cases
that schedules share miss no family of inputs."""

from types import SimpleNamespace
from typing import Any

import pytest
from agentcompile_rules_transformers.testing import attention_case
from hypothesis import given
from hypothesis import strategies as st
from select_cases import context, plan, step

from agentcompile_core.errors import Reject
from agentcompile_core.ir.plan import Schedule
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.stages import lower, validate
from agentcompile_core.stages.validate import ledger as ledgers
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.worker import timing
from agentcompile_core.worker.protocol import Evaluation

MATCH, _ = attention_case(heads=(4, 2), head_dim=64, capacity=24576)
CATALOG = load_catalog()


@given(st.integers(0, 10**6), st.sampled_from((2, 4, 8, 16)), st.sampled_from((4, 8, 16, 32)))
def test_every_family_is_among_the_positions_that_a_schedule_makes_special(seed: int, splits: int, warps: int) -> None:
    kind = CATALOG.kind(MATCH.kind)
    schedule = Schedule({"splits": splits, "warps": warps})
    plain = set(cases_for(MATCH, kind, str(seed)))
    special = [case for case in cases_for(MATCH, kind, str(seed), schedule=schedule) if case not in plain]
    assert kind.families and {case.family for case in special} >= set(kind.families)


def test_schedules_share_the_cases_of_a_period() -> None:
    kind = CATALOG.kind(MATCH.kind)
    one, other = (set(cases_for(MATCH, kind, "seed", schedule=Schedule({"splits": 8, "warps": warps}))) for warps in (5, 7))
    fixed = set(cases_for(MATCH, kind, "seed"))
    assert len((one & other) - fixed) >= 4


@pytest.mark.parametrize(("first", "count"), [((100.0, 101.0, 100.0, 310.0, 100.0), 25), ((100.0, 101.0, 100.0, 102.0, 100.0), 5)])
def test_a_few_timings_are_enough_only_without_an_outlier(first: tuple[float, ...], count: int) -> None:
    class Clock:
        def time(self, run: Any, *, repetitions: int, runs_per_repetition: int) -> tuple[float, ...]:
            return first if repetitions == timing.SCREENING else (100.0,) * repetitions

    found: Any = timing._time(Clock(), lambda stream: None, 1, 1.0, 40.0)  # type: ignore[arg-type]
    assert not isinstance(found, Reject) and found.repetitions == count
    assert found.us - found.spread_us > 80.0


def test_what_hangs_costs_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(ledgers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ctx = context()
    ordered = (plan(step("honest", 5.0), step("hang", 6.0)),)
    entries = validate.Queue(ordered, ctx.backend, ctx).entries(lower.run(ordered, ctx))
    ledger = ledgers.Ledger(ctx.backend, ctx)
    ledger.take(entries[0], Evaluation(seconds=0.5))
    assert ledger.seconds[entries[0].place] == 0.5
    now[0] = 15.0
    ledger.take(entries[1], Evaluation())  # a lost worker says no seconds
    assert ledger.seconds[entries[1].place] == 15.0
