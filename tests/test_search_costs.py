"""What a search pays and what it may save: hangs cost what they took, quick timings are believed only where noise says nothing, and cases
that schedules share miss no family of inputs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from advice_cases import record_of
from agentcompile_cuda_kit.targets import preset
from agentcompile_rules_transformers.testing import attention_case
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from select_cases import context, plan, region, step

from agentcompile_core.cli.progress import candidate_document
from agentcompile_core.errors import Reject
from agentcompile_core.ir.plan import Schedule
from agentcompile_core.ir.search_log import Reason
from agentcompile_core.ir.verdict import Trial
from agentcompile_core.ops.bits import same_bits
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin.events import CandidateFinished
from agentcompile_core.stages import lower, validate
from agentcompile_core.stages.validate import ledger as ledgers
from agentcompile_core.stages.validate.entries import environment
from agentcompile_core.stages.validate.input_cases import cases_for
from agentcompile_core.stages.validate.resume import Search
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Worker, timing
from agentcompile_core.worker import execution as execution_module
from agentcompile_core.worker.execution import Execution, Oracles
from agentcompile_core.worker.operands import make_inputs
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
    seen: list[Any] = []
    ctx = context()
    ctx = evolve(ctx, catalog=ctx.catalog.for_one_run(seen.append))
    ordered = (plan(step("honest", 5.0), step("hang", 6.0)),)
    entries = validate.Queue(ordered, ctx.backend, ctx).entries(lower.run(ordered, ctx))
    ledger = ledgers.Ledger(ctx.backend, ctx)
    ledger.take(entries[0], Evaluation(seconds=0.5))
    assert ledger.seconds[entries[0].place] == 0.5
    now[0] = 15.0
    ledger.take(entries[1], Evaluation())  # a lost worker says no seconds
    assert ledger.seconds[entries[1].place] == 15.0
    told = [candidate_document(event)["seconds"] for event in seen if isinstance(event, CandidateFinished)]
    assert told == [0.5, 15.0], "the log says what each of them took of the search"
    record = ledger.records[0]
    again = ledgers.Ledger(ctx.backend, ctx)
    again.recall_record(entries[0], record)
    assert candidate_document(seen[-1])["seconds"] == 0.0, "what was known took nothing"


def test_a_round_behind_the_one_that_used_up_the_time_is_over_before_it_is_lowered() -> None:
    ctx = context()
    ordered = (plan(step("honest")),)
    later = tuple(evolve(one, record=evolve(one.record, round=1)) for one in ordered)
    assert validate.over(ordered, 0.0, ctx) is Reason.TIME
    assert validate.over(later, 1.0, ctx) is None
    Search(ordered, (), environment(ctx.backend, ctx), ctx).end(out_of_time=True)
    assert validate.over(later, 1.0, ctx) is Reason.ENDED
    assert validate.over(ordered, 1.0, ctx) is None, "what that round measured is taken up"
    other = evolve(ctx, config=evolve(ctx.config, budget_s=ctx.config.budget_s + 1.0))
    assert validate.over(later, 1.0, other) is None, "another budget is another search"


def test_what_failed_of_the_moment_is_tried_once_more_by_the_next_run_and_nothing_else_is(tmp_path: Path) -> None:
    """Else a compile beside a job that filled the device's memory would have lost the candidate for good, and silently."""
    ordered = (plan(step("honest", 5.0), step("raises", 4.0), step("wrong", 3.0)),)
    tried = []
    for _ in range(3):
        seen: list[Any] = []
        with Worker(catalog="agentcompile_core.testing.doubles:catalog") as worker:
            ctx = context(worker)
            ctx = evolve(ctx, store=Store(tmp_path), catalog=ctx.catalog.for_one_run(seen.append))
            validate.run(lower.run(ordered, ctx), ordered, 60.0, ctx)
        tried.append({dict(e.record.step.schedule.items)["behave"] for e in seen if isinstance(e, CandidateFinished) and not e.cached})
    assert tried == [{"honest", "raises", "wrong"}, {"raises"}, set()]


def test_a_retry_says_nothing_of_the_search_that_it_belongs_to() -> None:
    """What there was no time for stays to be tried; later rounds, and who is still new, are as they were."""
    ctx, ordered = context(), (plan(step("honest")),)
    later = tuple(evolve(one, record=evolve(one.record, round=1)) for one in ordered)
    search = Search(ordered, (), environment(ctx.backend, ctx), ctx)
    search.end(out_of_time=False, lost=("a", "b"))
    search.retried({"b"})
    again = Search(ordered, (), environment(ctx.backend, ctx), ctx)
    assert again.ended and again.lost == {"b"} and validate.over(later, 1.0, ctx) is None


def test_a_retry_without_time_leaves_what_was_lost_to_the_next_run(tmp_path: Path) -> None:
    ordered = (plan(step("raises", 4.0), step("honest", 5.0)),)
    later = tuple(evolve(one, record=evolve(one.record, round=1)) for one in (plan(step("honest", 6.0)),))
    tried = []
    with Worker(catalog="agentcompile_core.testing.doubles:catalog") as worker:
        for which, left_s in ((ordered, 60.0), (later, 60.0), (ordered, 1e-9), (ordered, 60.0)):
            seen: list[Any] = []
            ctx = evolve(context(worker), store=Store(tmp_path))
            ctx = evolve(ctx, catalog=ctx.catalog.for_one_run(seen.append))
            validate.run(lower.run(which, ctx), which, left_s, ctx)
            tried.append([dict(e.record.step.schedule.items)["behave"] for e in seen if isinstance(e, CandidateFinished) and not e.cached])
            assert validate.over(later, 1.0, ctx) is None
    assert tried == [["raises", "honest"], ["honest"], [], ["raises"]]


def test_earlier_times_are_taken_up_where_there_is_a_clock_and_settle_nothing() -> None:
    ctx = context()
    ordered = (plan(step("honest", 5.0), step("honest", 6.0)),)
    records = tuple(record_of(one, us, signature="s1") for one, us in zip(ordered[0].steps, (5.0, 4.0), strict=True))
    entries = validate.Queue(ordered, ctx.backend, ctx).entries(lower.run(ordered, ctx))
    ledger = ledgers.Ledger(ctx.backend, ctx)
    ledger.recall(records, (region(),))
    assert ctx.backend is not None and ctx.backend.clock
    assert ledger.best_us == {entries[0].place: 4.0}
    assert not any(ledger.is_settled(entry) or ledger.knows(entry) for entry in entries)
    ledger = ledgers.Ledger(ctx.backend, ctx)
    ledger.recall(records, ())
    assert ledger.best_us == {}, "of a region that is not asked for nothing is known"


def test_candidates_of_one_match_share_the_references_of_long_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept whole, the caches of one long case were 800 MB: of 42 cases none was there when the next candidate asked for it."""
    match, graph = attention_case(heads=(4, 2), head_dim=64, capacity=4096)
    kind, oracles, made = CATALOG.kind(match.kind), Oracles(), list[Any]()
    monkeypatch.setattr(execution_module, "ORACLE_BYTES", 8 << 20)
    reference = Execution._reference
    monkeypatch.setattr(Execution, "_reference", lambda self, case, *of: made.append(case) or reference(self, case, *of))
    cases = cases_for(match, kind, "seed", schedule=Schedule({"splits": 8, "warps": 8}))
    assert max(case.position for case in cases) == 4095
    trial = Trial(match=match, graph=graph, source=doubles.fake_source("honest", 1.0), target=preset("h200"), cases=cases)
    found = []
    for _ in range(2):
        execution = Execution(trial, SimpleNamespace(device="cpu"), None, oracles=oracles, kind=kind)  # type: ignore[arg-type]
        found.append([execution.expected(case, make_inputs(match, kind, case, "cpu")) for case in cases])
    assert len(made) == len(set(cases)), "a candidate made again what the one before it had made"
    for one, other in zip(*found, strict=True):
        assert all(same_bits(one[name].value, other[name].value) for name in one)


def test_references_are_shared_on_one_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie where they were made: a worker that emulates and launches had those of the processor compared with results of the device."""
    match, graph = attention_case(heads=(4, 2), head_dim=64, capacity=64)
    kind, oracles, made = CATALOG.kind(match.kind), Oracles(), list[Any]()
    reference = Execution._reference
    monkeypatch.setattr(Execution, "_reference", lambda self, case, *of: made.append(self.device) or reference(self, case, *of))
    cases = cases_for(match, kind, "seed")[:2]
    trial = Trial(match=match, graph=graph, source=doubles.fake_source("honest", 1.0), target=preset("h200"), cases=cases)
    for device in ("cpu", "another", "cpu", "another"):
        execution = Execution(trial, SimpleNamespace(device=device), None, oracles=oracles, kind=kind)  # type: ignore[arg-type]
        for case in cases:
            execution.expected(case, make_inputs(match, kind, case, "cpu"))
    assert made == ["cpu", "cpu", "another", "another"]
