"""Covers that isolated timings hardly tell apart are judged inside the captured chain: the one that is faster there is selected."""

import json
import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chain import planned as planned
from test_chain_descents import Search, answered, choice_of, log_of, rugged, steps_of
from test_chain_neighbours import MARGIN, selected

from agentcompile_core.budget import Budget
from agentcompile_core.configuration import Config
from agentcompile_core.ir import serial
from agentcompile_core.ir.baseline import baseline_step
from agentcompile_core.ir.candidate import Candidate, Kernel, Resources
from agentcompile_core.ir.decisions import CHAIN_MARGIN, ChainLog, Decisions, chain_margin, choices_of
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.plan import Cover, Fusion, Origin, Step
from agentcompile_core.ir.record import Measurement, TuningRecord
from agentcompile_core.ir.selection import Basis, Selection
from agentcompile_core.ir.verdict import Outcome, Verdict
from agentcompile_core.report import audit_chain
from agentcompile_core.report.audit import audit
from agentcompile_core.runtime.sources import source_of
from agentcompile_core.stages.select import chain, isolated
from agentcompile_core.stages.select.isolated import LEAST_SHARE, MOST_IN_ALL, MOST_RUNNERS_UP, NEARLY_US, Taken, best_alone, runners_up
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.worker import descent
from agentcompile_core.worker.chain_question import Alternative, ChainAnswer, ChainQuestion, replaced, toward

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, database=None)
COVERS = (("a", "b", "c"), ("a", "d"), ("e", "c"), ("f",))  # of one region: what each may hold together
PLACES = tuple(dict.fromkeys(place for cover in COVERS for place in cover))


def cover(number: int) -> Selection:
    return Selection(signature="s", region="s", cover=Cover(matches=COVERS[number], fusion=Fusion.FULL, rank=number), basis=Basis.MEASURED,
                     steps=tuple(selected(place, 0) for place in COVERS[number]))


def everything(options: int = 3) -> tuple[Alternative, ...]:
    found = [Alternative(signature="s", match_id=place, selected=selected(place, number)) for place in PLACES for number in range(options)]
    return (*found, *(Alternative(signature="s", match_id=place, selected=None) for place in PLACES))


def searched(us: Any, budget_s: float = 1e9) -> tuple[Search, ChainAnswer]:
    """A search among all covers that begins with the first one; the region's nodes are those of all matches."""
    search = Search(us, everything(), budget_s)
    nodes = [SimpleNamespace(name=f"node_{place}") for place in PLACES]
    search.q.selections, search.q.covers = (cover(0),), tuple(cover(number) for number in range(1, len(COVERS)))
    search.q.regions = (SimpleNamespace(signature="s", graph=SimpleNamespace(nodes=nodes), instances=(None,)),)
    return search, answered(search)


@SETTINGS
@given(seed=st.integers(0, 10_000), budget_s=st.sampled_from([0.3, 1.0, 3.0, 1e9]))
def test_what_is_held_is_of_one_cover_and_the_log_leads_to_it(seed: int, budget_s: float) -> None:
    times, seen = rugged(seed), list[frozenset[str]]()

    def us(choice: dict[str, int]) -> float:
        seen.append(frozenset(choice))
        return float(times(choice))

    _, found = searched(us, budget_s)
    assert all(any(held <= set(matches) for matches in COVERS) for held in seen), "steps that no cover has together were captured"
    log = evolve(log_of(found), started=tuple(("s", x.step) for x in cover(0).steps))
    again = audit_chain.replayed(log, MARGIN)
    assert again.problems == () and again.held == steps_of(found.selections) and found.us <= found.first_us


@SETTINGS
@given(seed=st.integers(0, 10_000))
def test_no_cover_that_was_tried_as_a_whole_is_faster_than_the_end(seed: int) -> None:
    times = rugged(seed)
    _, found = searched(times)
    whole = [times(dict.fromkeys(matches, 0)) for matches in COVERS]
    assert found.us <= min(whole) / (1.0 - CHAIN_MARGIN * MARGIN)


def test_the_steps_of_a_cover_that_came_in_are_searched_like_any_others() -> None:
    """Only the second cover is fast, and with another way to do its own step, and the step that both have. The last one is slow by far."""
    sampled: list[dict[str, int]] = []

    def us(choice: dict[str, int]) -> float:
        sampled.append(choice)
        return 100.0 - 2.0 * ("d" in choice) - (choice.get("d") == 2) - (choice.get("a") == 1) + 50.0 * ("f" in choice)

    _, found = searched(us)
    assert choice_of(found.selections) == {"a": 1, "d": 2} and found.us == 96.0
    assert sum("f" in choice for choice in sampled) == 2, "what lost by far is looked at once"


def test_the_way_back_is_found_where_a_cover_lost_little_before_its_steps_were_tuned() -> None:
    """The other cover is a little slower at first; with what the common step became it is the faster one."""
    def us(choice: dict[str, int]) -> float:
        tuned = choice.get("a") == 1
        return 100.0 - tuned + (1.0 if not tuned else -3.0) * ("d" in choice)

    assert choice_of(searched(us)[1].selections) == {"a": 1, "d": 0}


@SETTINGS
@given(held=st.integers(0, len(COVERS) - 1), other=st.integers(0, len(COVERS) - 1), gone=st.sets(st.sampled_from(PLACES)))
def test_what_leads_to_a_cover_keeps_the_steps_that_both_have(held: int, other: int, gone: set[str]) -> None:
    kept = tuple(selected(place, 7) for place in COVERS[held] if place not in gone)
    selections = (evolve(cover(held), steps=kept),)
    for change in toward(selections, cover(other)):
        selections = replaced(selections, change)
    assert choice_of(selections) == {place: 7 if place in COVERS[held] and place not in gone else 0 for place in COVERS[other]}


def measured(planned: Any, us: Any, usable: Any = lambda match: True) -> Evaluated:
    """Evidence of every match of the plans: the framework takes 9 us a node, the first schedule of its first family ``us(match)``."""
    ctx, _, _, plans = planned
    records, candidates = list[TuningRecord](), list[Candidate]()

    def record(signature: str, step: Step, time_us: float, **more: Any) -> None:
        timed = Measurement(us=time_us, spread_us=0.01, repetitions=5, floor_us=1.0)
        records.append(TuningRecord(key=f"{signature}{step}", signature=signature, step=step, measurement=timed, **more))

    for plan in plans:
        for match in plan.region.matches:
            spaces = plan.space.spaces_of(match.id)
            record(plan.signature, baseline_step(match.id), 9.0 * len(match.nodes), source_digest="", verdict=None)
            if not spaces or not usable(match.id):
                continue
            step = Step(match_id=match.id, implementation=spaces[0].implementation, origin=spaces[0].origin,
                        schedule=spaces[0].space.points[0])
            source = source_of(step, match, ctx.catalog, ctx.target)
            candidates.append(Candidate(signature=plan.signature, step=step, source=source))
            record(plan.signature, step, us(match.id), source_digest=source.digest, resources=Resources(registers=32),
                   verdict=Verdict(validator="numerics", outcome=Outcome.PASS))
    digests = {c.source.digest for c in candidates}
    kernels = {d: Kernel(digest=d, backend="fake", arch="sm_90a", binary=b"\x00", sha256="s", compiler="c") for d in digests}
    return Evaluated(candidates=tuple(candidates), records=tuple(records), kernels=kernels)


def matches_of(selections: Iterable[Selection], signature: str) -> list[frozenset[str]]:
    return [frozenset(x.step.match_id for x in s.steps) for s in selections if s.signature == signature]


@settings(SETTINGS, max_examples=25)
@given(data=st.data())
def test_runners_up_are_whole_nearly_as_good_and_few(planned: Any, data: st.DataObject) -> None:
    ctx, _, _, plans = planned
    seed, lacking = data.draw(st.integers(0, 10_000)), data.draw(st.integers(0, 3))
    competes = data.draw(st.booleans())
    if not competes:
        ctx = evolve(ctx, config=evolve(ctx.config, origins=(Origin.GENERATED,)))
    times: dict[str, float] = {}

    def us(match: str) -> float:
        return times.setdefault(match, random.Random(f"{seed} {match}").uniform(1.0, 6.0))

    evidence = measured(planned, us, lambda match: random.Random(f"{lacking} {match}").random() > 0.1 * lacking)
    best = best_alone(plans, evidence, ctx, Taken.BEST)
    found = runners_up(plans, best, evidence, ctx)
    backwards = evolve(evidence, records=tuple(reversed(evidence.records)))
    assert found == runners_up(plans, best, backwards, ctx)
    shares = {c.signature: c.region_us * len(p.region.instances) for p, c in zip(plans, best, strict=True)}
    assert len(found) <= MOST_IN_ALL and [shares[c.signature] for c in found] == sorted((shares[c.signature] for c in found), reverse=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolated, "MOST_IN_ALL", 99)
        every = runners_up(plans, best, evidence, ctx)
    assert every[:MOST_IN_ALL] == found
    for plan, chosen in zip(plans, best, strict=True):
        if shares[plan.signature] < LEAST_SHARE * sum(shares.values()):
            assert not matches_of(every, plan.signature)
            continue
        mine, views = matches_of(every, plan.signature), {n.name for n in plan.region.graph.nodes if n.kind == "view"}
        timed = {r.step.match_id for r in evidence.records if r.signature == plan.signature and r.verdict is not None}
        wholes = {frozenset(c.matches): c for c in plan.space.covers if c.matches and set(c.matches) <= timed}
        assert len(mine) <= MOST_RUNNERS_UP and len(set(mine)) == len(mine)
        held = matches_of((chosen,), plan.signature)[0]
        assert held not in mine and set(mine) <= set(wholes)

        def covered(matches: Iterable[str], plan: Any = plan, views: Any = views) -> frozenset[str]:
            return frozenset(n for m in matches for n in plan.region.match_by_id[m].nodes) - views

        same = {one: sum(map(us, one)) - sum(map(us, held)) for one in wholes if covered(one) == covered(held) and one != held}
        taken = [same[one] for one in mine if one in same]
        assert all(lost <= NEARLY_US + 1e-9 for lost in taken) and taken == sorted(taken)
        assert all(lost >= max(taken, default=lost) - 1e-9 for one, lost in same.items() if one not in mine)
        if len(mine) < MOST_RUNNERS_UP and held in wholes:
            assert all(one in mine for one, lost in same.items() if lost <= NEARLY_US - 1e-9)


class Worker:
    """Answers as a chain on a device would in which the first of the other covers of a region is the fastest."""

    def __init__(self) -> None:
        self.asked = list[ChainQuestion]()

    def call(self, function: str, argument: Any, **_: object) -> Any:
        question = serial.structure(json.loads(json.dumps(argument)), ChainQuestion)
        self.asked.append(question)
        held, trials = question.selections, []
        for signature in dict.fromkeys(c.signature for c in question.covers):
            changes = toward(held, next(c for c in question.covers if c.signature == signature))
            trials.append(descent.logged(changes, descent.Outcome(ratio=0.5, winner=SimpleNamespace())))  # type: ignore[arg-type]
            for change in changes:
                held = replaced(held, change)
        answer = ChainAnswer(selections=held, us=9.0, first_us=9.5, framework_us=99.0, tried=0, accepted=len(trials), trials=tuple(trials))
        return json.loads(serial.dumps(answer))


@pytest.fixture(scope="module")
def judged(planned: Any) -> Any:
    """A run in which another cover won inside the chain: context, evidence, what it began with, what it selected, answer, worker."""
    ctx, graphs, _, plans = planned
    evidence, worker = measured(planned, lambda match: 2.0), Worker()
    ctx = evolve(ctx, backend=doubles.FakeBackend(), store=Store(None), worker=worker, budget=Budget(60.0))
    ctx.budget.start()
    best = best_alone(plans, evidence, ctx, Taken.BEST)
    won, answer = chain.run(graphs.graphs[0], plans, best, evidence, ctx)
    return ctx, evidence, best, won, answer, worker


def test_the_chain_is_asked_for_covers_with_their_kernels_and_ways(planned: Any, judged: Any) -> None:
    _, _, best, _, _, worker = judged
    question, = worker.asked
    assert {c.signature for c in question.covers} & {p.signature for p in planned[3] if p.region.name == "layer"}
    digests = {x.source.digest for c in question.covers for x in c.steps if x.source is not None}
    assert digests <= {kernel.digest for kernel in question.kernels}
    ways = {(a.signature, a.selected.step) for a in question.alternatives if a.selected is not None}
    assert {(s.signature, x.step) for s in (*best, *question.covers) for x in s.steps} <= ways


def test_a_cover_that_won_is_selected_with_its_reasons(planned: Any, judged: Any) -> None:
    _, _, best, won, _, worker = judged
    changed = {c.signature for c in worker.asked[0].covers}
    for plan, old, new in zip(planned[3], best, won, strict=True):
        steps = {x.step.match_id for x in new.steps}
        assert steps == set(new.cover.matches) and new.basis is Basis.CHAIN
        assert any(set(c.matches) == steps and c.rank == new.cover.rank and c.fusion is new.cover.fusion for c in plan.space.covers)
        assert (new.cover.rank != old.cover.rank) == (new.signature in changed)
        reasons = {x.step.match_id: x.reason for x in new.steps}
        for match in steps - {x.step.match_id for x in old.steps}:
            assert f"2.00 us against {9.0 * len(plan.region.match_by_id[match].nodes):.2f} us" in reasons[match]
            assert f"its cover is faster inside the captured chain than cover {old.cover.rank}, which won alone" in reasons[match]
        left = {node.name for node in plan.region.graph.nodes} - {node for x in new.steps for node in x.nodes}
        counts = [what for what, why in new.fallback_reasons if why.startswith("on the framework")]
        assert counts == ([f"{len(left)} nodes"] if left else [])
        assert not any(what in plan.region.match_by_id for what, _ in new.fallback_reasons), "nothing was given to the framework"


def test_the_audit_makes_the_choice_of_the_cover_again(planned: Any, judged: Any) -> None:
    ctx, evidence, best, won, answer, _ = judged
    log = ChainLog(started=tuple((s.signature, x.step) for s in best for x in s.steps), trials=answer.trials)
    decisions = Decisions(margin=Config().margin, advisor="heuristic", validators=(), regions=choices_of(planned[3]), chain=log,
                          places=tuple(range(len(evidence.records))), step_us=(answer.us, answer.framework_us))

    def problems(decided: Decisions, selections: Any = won) -> list[str]:
        return [p for d in audit(selections, evidence.records, decided, {}) if d.kind in ("chain", "region", "step") for p in d.problems]

    assert problems(decisions) == [] and any(t.without for t in answer.trials) and chain_margin(ctx.config.margin) < 0.5
    turned = evolve(log, trials=tuple(evolve(t, taken=False) for t in log.trials))
    assert problems(evolve(decisions, chain=turned)) and problems(decisions, best)


def test_an_answer_for_other_covers_is_another_answer(planned: Any, judged: Any) -> None:
    question = judged[-1].asked[0]
    assert chain.timeless(question) == chain.timeless(evolve(question, covers=tuple(evolve(c, region_us=1.0) for c in question.covers)))
    assert chain.timeless(question) != chain.timeless(evolve(question, covers=question.covers[1:]))
