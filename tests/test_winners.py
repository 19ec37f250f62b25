"""Every selected kernel has passed the validators of winners, also where the chain selects another one than the best alone."""

from typing import Any

import pytest
from attrs import evolve
from select_cases import FAMILY, context, plan, step

from agentcompile_core import pipeline
from agentcompile_core.errors import Cause
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.search_log import Seen
from agentcompile_core.ir.selection import Basis
from agentcompile_core.stages import lower, select, validate
from agentcompile_core.stages.select import isolated
from agentcompile_core.worker import Worker


@pytest.fixture(scope="module")
def worker():
    with Worker(catalog="agentcompile_core.testing.bad_validators:catalog", builders=1) as made:
        yield made


class Chain:
    """Selects the timed candidate with the largest ``us`` that is left, as a chain that judges otherwise than the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[float]] = []
        monkeypatch.setattr(pipeline.select, "run", self.run)

    def run(self, plans: Any, found: Evaluated, ctx: Any, graph: Any = None) -> select.Selected:
        left = [r for r in found.records if r.usable and r.step.implementation == FAMILY]
        self.asked.append(sorted(r.step.schedule["us"] for r in left))
        (one,) = plans
        best = max(left, key=lambda r: r.measurement.us, default=None)
        if best is None:
            return select.Selected(selections=(isolated.fallback("s1", "addition", "nothing is left"),))
        chosen = isolated.step_of(best, one.region, found.source(best), None, ctx.catalog)
        (start,) = isolated.best_alone(plans, found, ctx, isolated.Taken.BEST)
        return select.Selected(selections=(evolve(start, steps=(chosen,), basis=Basis.CHAIN),))


def selected(ctx: Any, *us: float) -> tuple[Any, Evaluated]:
    ordered = (plan(*(step("honest", one) for one in us)),)
    found = validate.run(lower.run(ordered, ctx), ordered, 60.0, ctx)
    rounds = pipeline._Rounds(found=found, advice=(), seen=Seen(), ordered=(ordered,))
    chosen, known = pipeline._selected((ordered[0].plan,), rounds, ctx, None, ranged=False)
    return chosen.selections[0], known


def context_for(worker: Worker, validators: tuple[str, ...], **config: Any) -> Any:
    from agentcompile_core.testing import bad_validators

    made = context(worker, validators=validators, **config)
    made.catalog.offers["agentcompile_validators"] = bad_validators.catalog().offers["agentcompile_validators"]
    return made


def test_what_the_chain_selects_is_judged_and_the_next_is_taken(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(monkeypatch)
    judged: list[float] = []
    ctx = context_for(worker, ("simple", "picky"))
    asked = ctx.running_worker().evaluate

    def noted(jobs: Any, **given: Any) -> Any:
        jobs = list(jobs)
        judged.extend(float(job.step.schedule["us"]) for job in jobs if job.validators == ("picky",))
        return asked(jobs, **given)

    monkeypatch.setattr(worker, "evaluate", noted)
    selection, _ = selected(ctx, 5.0, 6.0, 7.0)
    assert [s.step for s in selection.steps] == [step("honest", 7.0)]
    assert judged == [5.0, 7.0], "the best alone before the chain, and what the chain took behind it"
    assert selection.steps[0].reason.endswith("picky found nothing") and chain.asked == [[5.0, 6.0, 7.0]]
    again, _ = selected(ctx, 5.0, 6.0, 7.0)
    assert again == selection and judged == [5.0, 7.0], "what was said is kept"


def test_a_refused_selection_is_closed_told_and_made_again(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(monkeypatch)
    ctx = context_for(worker, ("simple", "picky"))
    monkeypatch.setattr(validate.winners, "best_of_each", lambda records, winners, ctx: records)  # as if the chain had come first
    selection, found = selected(ctx, 2.0, 3.0, 3.5)
    assert selection.steps == () and chain.asked == [[2.0, 3.0, 3.5], [2.0, 3.0], [2.0], []], "picky refuses all below 4"
    closed = {r.step.schedule["us"]: r for r in found.records if r.step.implementation == FAMILY}
    assert {us for us, r in closed.items() if r.failure is Cause.MEMORY_FAULT} == {2.0, 3.0, 3.5}
    assert len(ctx.failures) == 1 and ctx.failures[0].count == 3 and "a race that only this validator sees" in ctx.failures[0].message


def test_without_time_only_what_was_judged_is_selected(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(monkeypatch)
    ctx = context_for(worker, ("simple", "picky"))
    ordered = (plan(*(step("honest", us) for us in (5.0, 6.0, 7.0))),)
    found = validate.run(lower.run(ordered, ctx), ordered, 60.0, ctx)
    monkeypatch.setattr(ctx.budget, "left_s", lambda purpose="": 0.0)
    rounds = pipeline._Rounds(found=found, advice=(), seen=Seen(), ordered=(ordered,))
    chosen, known = pipeline._selected((ordered[0].plan,), rounds, ctx, None, ranged=False)
    assert [s.step for s in chosen.selections[0].steps] == [step("honest", 5.0)], "the one that was judged before the chain"
    assert chain.asked == [[5.0, 6.0, 7.0], [5.0, 6.0], [5.0]]
    closed = {r.step.schedule["us"]: r.failure for r in known.records if r.step.implementation == FAMILY}
    assert closed == {5.0: None, 6.0: Cause.UNAVAILABLE, 7.0: Cause.UNAVAILABLE}


def test_validators_that_need_not_be_asked_refuse_but_do_not_hold_up(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    Chain(monkeypatch)
    ctx = context_for(worker, ("simple",), winners=("picky", "not_installed"))
    ctx.backend.__class__.emulated, before = False, ctx.backend.__class__.emulated
    try:
        selection, found = selected(ctx, 3.0, 3.5)
        assert selection.steps == () and {r.failure for r in found.records if r.step.implementation == FAMILY} == {Cause.MEMORY_FAULT}
        ctx = context_for(worker, ("simple",), winners=("picky",))
        monkeypatch.setattr(pipeline.validate, "SPARE_SHARE", 0.0)
        selection, _ = selected(ctx, 3.0, 3.5)
        assert [s.step for s in selection.steps] == [step("honest", 3.5)]
        assert "picky: no time was left for it" in selection.steps[0].reason
        ctx = context_for(worker, ("simple",), winners=("winner_raises",))
        monkeypatch.setattr(pipeline.validate, "SPARE_SHARE", 0.5)
        selection, _ = selected(ctx, 2.0)
        assert [s.step for s in selection.steps] == [step("honest", 2.0)]
        assert "the validator winner_raises raised" in selection.steps[0].reason
    finally:
        ctx.backend.__class__.emulated = before


def test_where_nothing_is_measured_they_are_not_asked(worker: Worker) -> None:
    from agentcompile_core.stages.validate import final_checks

    ctx = context_for(worker, ("simple",), winners=("picky",))
    assert final_checks.affordable(ctx) == (), "the double is emulated"


def test_the_command_says_what_sanitize_lacks_here_and_begins_nothing(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentcompile_runtime_cuda.backend import CudaBackend

    from agentcompile_core.errors import Reject

    monkeypatch.setattr(CudaBackend, "available", lambda self: Reject("torch sees no CUDA device"))
    code, out, err = cli("compile", "examples/tiny_model", "--device", "cpu", "--target", "h200", "--sanitize", "--no-cache")
    assert (code, out) == (2, "") and "--sanitize runs kernels on a GPU under compute-sanitizer, and there is none here" in err
