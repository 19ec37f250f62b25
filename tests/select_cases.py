"""What tests of selection share: one region of doubles, its steps and plans, and the stages run over them."""

from agentcompile_cuda_kit.targets import PRESETS

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.ir.advice import Advice, AdviceRecord, OrderedPlan
from agentcompile_core.ir.candidate import Candidate
from agentcompile_core.ir.evaluated import Evaluated
from agentcompile_core.ir.plan import Cover, Fusion, Origin, PlanSpace, RegionPlan, Schedule, Step
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.ir.region import Instance, Region, RegionSummary
from agentcompile_core.ir.selection import Selection
from agentcompile_core.stages import lower, select, validate
from agentcompile_core.store import Store
from agentcompile_core.testing import doubles
from agentcompile_core.worker import Worker

FAMILY = "doubles/fake_family"
MATCH = "elementwise:add+1:add"


def context(worker: Worker | None = None, **config: object) -> Context:
    catalog = doubles.catalog()
    return Context(catalog=catalog, target=PRESETS["h200"], config=Config(**{"validators": ("simple",), **config}), store=Store(None),
                   backend=catalog.backends["doubles/fake"], worker=worker)


def region() -> Region:
    match, graph = doubles.fake_match()
    return Region(name="addition", signature="s1", graph=graph, instances=(Instance(nodes=(("add", "add"),), values=()),), matches=(match,))


def step(behaviour: str, us: float = 5.0, match_id: str = MATCH) -> Step:
    return Step(match_id=match_id, implementation=FAMILY, origin=Origin.GENERATED, schedule=Schedule({"behave": behaviour, "us": us}))


def plan(*steps: Step) -> OrderedPlan:
    record = AdviceRecord(advisor="test", signature="s1", round=0, accepted=Advice())
    return OrderedPlan(plan=planned(region()), steps=steps, ranks=tuple(range(len(steps))), record=record)


def planned(of: Region, *covers: Cover) -> RegionPlan:
    full = covers or (Cover(matches=(MATCH,), fusion=Fusion.FULL, rank=0),)
    space = PlanSpace(signature="s1", covers=(*full, Cover(matches=(), fusion=Fusion.FRAMEWORK, rank=99)), steps=())
    summary = RegionSummary(signature="s1", label="mixed", operators=(), instances=1, matches=(), dominant="elementwise")
    return RegionPlan(region=of, summary=summary, space=space)


def validated(ctx: Context, ordered: tuple[OrderedPlan, ...], left_s: float = 60.0) -> tuple[TuningRecord, ...]:
    return validate.run(lower.run(ordered, ctx), ordered, left_s, ctx).records


def run(ctx: Context, *steps: Step):
    ordered = (plan(*steps),)
    found = validate.run(lower.run(ordered, ctx), ordered, 60.0, ctx)
    return found.records, select.run((ordered[0].plan,), found, ctx).selections[0]


def chosen(of: Region, records: tuple[TuningRecord, ...] | list[TuningRecord], ctx: Context, *covers: Cover) -> Selection:
    """What is selected on ``records``, of which every one has the source of its step."""
    candidates = tuple(Candidate(signature="s1", step=r.step, source=doubles.fake_source("honest", r.measurement.us))
                       for r in records if r.measurement and r.step.implementation == FAMILY)
    found = Evaluated(candidates=candidates, records=tuple(records))
    return select.run((planned(of, *covers),), found, ctx).selections[0]
