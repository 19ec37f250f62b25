"""A plugin whose version or settings changed is a changed plugin: on a warm cache it is tried again, and nothing else is."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agentcompile_cuda_kit.targets import PRESETS
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.advice import Advice, AdviceRecord, OrderedPlan, Question
from agentcompile_core.ir.baseline import FRAMEWORK
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.plan import Origin, Parameter, PlanSpace, RegionPlan, Schedule, ScheduleSpace, Step, StepSpace
from agentcompile_core.ir.region import Instance, Region, RegionSummary
from agentcompile_core.plugin import settings
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.plugin.interfaces import Advisor
from agentcompile_core.stages import lower, validate
from agentcompile_core.stages.validate import resume
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add the test folder
from inline_worker import Here

MATCH = "elementwise:add+1:add"
FIRST, LATE = "doubles/fake_family", "late/late"


@frozen
class Settings:
    """How many microseconds the family's words say: its only setting."""

    us: float = 6.5


class Late(doubles.FakeFamily):
    """A family that is slower to be asked than the first one, and lowers to what its settings say."""

    name = "late"
    settings_class = Settings

    def lower(self, match: Any, schedule: Schedule, target: Any) -> Any:
        """Words with the setting in them."""
        return doubles.fake_source("honest", self.settings.us + float(schedule["us"]), match.need("out").spec.numel)


class Told(Advisor):
    """An advisor with settings."""

    name = "told"
    settings_class = Settings

    def advise(self, question: Question) -> Advice:
        """Nothing."""
        return Advice()


class Strict(doubles.SimpleValidator):
    """A validator with settings."""

    name = "strict"
    settings_class = Settings


@frozen(kw_only=True)
class Installed:
    """Versions and settings of the three plugins of this page."""

    family: int = 1
    family_us: float = 6.5
    advisor: int = 1
    advisor_us: float = 6.5
    validator: int = 1
    validator_us: float = 6.5

    def catalog(self) -> Catalog:
        """The doubles with the three, as this says."""
        made = doubles.catalog()
        for hook, cls, version in (("template_families", Late, self.family), ("advisors", Told, self.advisor),
                                   ("validators", Strict, self.validator)):
            offer = cls()
            offer.version = version  # type: ignore[misc]
            made.offers[f"agentcompile_{hook}"][f"{cls.name}/{cls.name}"] = offer
        sections = {"late": {"us": self.family_us}, "told": {"us": self.advisor_us}, "strict": {"us": self.validator_us}}
        return settings.configured(made, Config(plugins=sections))[0]


def context(installed: Installed, store: Store) -> Context:
    catalog = installed.catalog()
    return Context(catalog=catalog, target=PRESETS["h200"], config=Config(validators=("simple", "strict"), advisor="told"), store=store,
                   backend=catalog.backends["doubles/no_time"], worker=Here(catalog))  # type: ignore[arg-type]


def ordered(ctx: Context) -> tuple[OrderedPlan, ...]:
    """One addition, which two families serve; the late one comes second, so that the first one settles it."""
    match, graph = doubles.fake_match()
    region = Region(name="addition", signature="s1", graph=graph, instances=(Instance(nodes=(("add", "add"),), values=()),),
                    matches=(match,))
    point = Schedule({"behave": "honest", "us": 5.0})
    space = ScheduleSpace(parameters=(Parameter(name="behave", values=("honest",)), Parameter(name="us", values=(5.0,))), points=(point,))
    served = tuple(StepSpace(match_id=MATCH, implementation=name, origin=Origin.GENERATED, space=space,
                             version=ctx.catalog.template_families[name].version) for name in (FIRST, LATE))
    steps = tuple(Step(match_id=MATCH, implementation=name, origin=Origin.GENERATED, schedule=point) for name in (FIRST, LATE))
    summary = RegionSummary(signature="s1", label="mixed", operators=(), instances=1, matches=(), dominant="elementwise")
    plan = RegionPlan(region=region, summary=summary, space=PlanSpace(signature="s1", covers=(), steps=served))
    record = AdviceRecord(advisor="told", signature="s1", round=0, accepted=Advice())
    return (OrderedPlan(plan=plan, steps=steps, ranks=(0, 1), record=record),)


def search(installed: Installed, store: Store) -> resume.Search:
    ctx = context(installed, store)
    return resume.Search(ordered(ctx), ["record"], "environment", ctx)


VERSIONS, SECONDS = st.integers(1, 3), st.sampled_from([1.0, 6.5, 8.0])
MADE = st.builds(Installed, family=VERSIONS, family_us=SECONDS, advisor=VERSIONS, advisor_us=SECONDS)


@given(before=MADE, after=MADE)
def test_an_ended_search_is_repeated_exactly_where_something_changed(before: Installed, after: Installed) -> None:
    store = Store(None)
    first = search(before, store)
    assert not first.ended and not first.new
    first.end(out_of_time=True)
    again = search(after, store)
    assert again.ended == (before == after)
    changed = (before.family, before.family_us) != (after.family, after.family_us)
    assert again.new == ({("s1", LATE)} if changed else frozenset())
    again.end(out_of_time=True)
    assert again.new == search(after, store).new, "it stays a newcomer while time runs out before it is tried"
    search(after, store).end(out_of_time=False)
    assert not search(after, store).new and not search(before, store).new


def evaluate(installed: Installed, store: Store) -> Evaluated:
    ctx = context(installed, store)
    plans = ordered(ctx)
    return validate.run(lower.run(plans, ctx), plans, 60.0, ctx)


def who(found: Evaluated) -> dict[str, bool]:
    """Who was evaluated, and whether the record came from the store."""
    cached = {step for _, step in found.cached}
    return {r.step.implementation: r.step in cached for r in found.records if r.step.implementation != FRAMEWORK}


@pytest.mark.parametrize(("changed", "expected"), [
    (Installed(), {FIRST: True}),
    (Installed(family_us=8.0), {FIRST: True, LATE: False}),
    (Installed(family=2), {FIRST: True, LATE: False}),
    (Installed(advisor_us=8.0), {FIRST: True}),
    (Installed(advisor=2), {FIRST: True}),
    (Installed(validator_us=8.0), {FIRST: False}),
    (Installed(validator=2), {FIRST: False}),
], ids=["nothing", "family's settings", "family's version", "advisor's settings", "advisor's version", "validator's settings",
        "validator's version"])
def test_what_changed_is_evaluated_again_though_a_cached_rival_serves_the_match(changed: Installed, expected: dict[str, bool]) -> None:
    store = Store(None)
    assert who(evaluate(Installed(), store)) == {FIRST: False}, "where nothing is timed, one kernel that passes settles its match"
    assert who(evaluate(changed, store)) == expected
    assert who(evaluate(changed, store)) == dict.fromkeys(expected, True), "and the next run finds everything in the store"


def test_an_advisor_that_is_not_installed_has_its_name_only() -> None:
    assert resume._advisor("nobody", SimpleNamespace(advisors={})) == ("nobody",)
