"""A small world to advise on: one region, three toy families, an advisor that says what it is told to."""


from agentcompile_cuda_kit.targets import PRESETS
from agentcompile_rules_transformers.elementwise import ElementwiseRule
from agentcompile_rules_transformers.testing import Draft

from agentcompile_core.configuration import Config
from agentcompile_core.context import Context
from agentcompile_core.errors import Cause
from agentcompile_core.ir.advice import Advice, Question
from agentcompile_core.ir.candidate import Resources
from agentcompile_core.ir.graph import DType
from agentcompile_core.ir.plan import Parameter, RegionPlan, Schedule, ScheduleSpace, Step
from agentcompile_core.ir.record import TuningRecord
from agentcompile_core.ir.verdict import Outcome, Verdict
from agentcompile_core.plugin.catalog import Catalog
from agentcompile_core.plugin.interfaces import Advisor, TemplateFamily
from agentcompile_core.stages import advise, analyze, plan
from agentcompile_core.store import Store
from agentcompile_core.testing.doubles import measurement

SHAPE = (1, 1, 4096)


class Family(TemplateFamily):
    """Serves every elementwise match with ``count`` schedules."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count

    def accepts(self, match, target):
        return True

    def space(self, match, target):
        width = (1, 2, 4)
        points = [Schedule({"tile": tile, "width": w, "fast": tile % 2 == 0}) for tile in range(16, 16 + self.count) for w in width]
        parameters = (Parameter(name="tile", values=tuple(range(16, 16 + self.count))), Parameter(name="width", values=width),
                      Parameter(name="fast", values=(False, True)))
        return ScheduleSpace(parameters=parameters, points=tuple(points[: self.count]))

    def lower(self, match, schedule, target):
        raise NotImplementedError


class Says(Advisor):
    """Answers what it was told to, or raises it."""

    name = "says"

    def __init__(self, answer: object) -> None:
        self.answer, self.questions = answer, []

    def advise(self, question):
        self.questions.append(question)
        answer = self.answer(question) if callable(self.answer) else self.answer
        if isinstance(answer, BaseException):
            raise answer
        return answer


def world(answer: object = Advice(), **options) -> tuple[Context, tuple[RegionPlan, ...], Says]:
    """A context, and the planned regions of add -> mul -> silu with three families for every match."""
    catalog, advisor = Catalog(strict=options.pop("strict", False)), Says(answer)
    catalog.region_rules["transformers_rules/elementwise"] = ElementwiseRule()
    catalog.advisors["test/says"] = advisor
    for name, count in (("many", 20), ("some", 5), ("one", 1)):
        catalog.template_families[f"{name}/{name}"] = Family(name, count)
    ctx = Context(catalog=catalog, target=PRESETS["h200"], config=Config(advisor="says", **options), store=Store(None))
    draft = Draft()
    x, y, z = (draft.given(name, SHAPE, DType.F32) for name in "xyz")
    total = draft.one("aten.add.Tensor", (x, y), SHAPE, DType.F32)
    product = draft.one("aten.mul.Tensor", (total, z), SHAPE, DType.F32)
    analysis = analyze.analyze(draft.graph(draft.one("aten.silu.default", (product,), SHAPE, DType.F32)), ctx)
    return ctx, plan.run((analysis,), ctx), advisor


def asked(answer: object = Advice(), records: tuple = (), round_number: int = 0, **options):
    ctx, plans, advisor = world(answer, **options)
    ordered = advise.run(plans, records, round_number, ctx)
    return ordered[0], plans[0].space, ctx, advisor


PLAN, SPACE, _, _ADVISOR = asked()
QUESTION: Question = _ADVISOR.questions[0]
MATCHES = tuple(dict.fromkeys(s.match_id for s in SPACE.steps))
USED = {m for cover in SPACE.covers for m in cover.matches}


def steps_of(space, match_id: str, implementation: str) -> tuple[Schedule, ...]:
    return next(s for s in space.steps if (s.match_id, s.implementation) == (match_id, implementation)).space.points


def in_space(step: Step, space=SPACE) -> bool:
    return any(s.match_id == step.match_id and s.implementation == step.implementation and s.origin is step.origin
               and step.schedule in s.space for s in space.steps)


def check_plan(ordered, space) -> None:
    assert all(in_space(step, space) for step in ordered.steps)
    assert len(set(ordered.steps)) == len(ordered.steps) == len(ordered.ranks)
    assert {step.match_id for step in ordered.steps} == USED
    for match_id in USED:
        for step_space in space.spaces_of(match_id):
            points = step_space.space.points
            chosen = [s.schedule for s in ordered.steps if (s.match_id, s.implementation) == (match_id, step_space.implementation)]
            assert points[0] in chosen, "the family's own best guess is always measured"
            assert len(chosen) >= min(advise.DIVERSITY, len(points)), "every implementation is measured"
    assert set(ordered.primary) <= USED and any(ordered.primary == cover.matches for cover in space.covers)


def record_of(step: Step, us: float = 3.0, failure: Cause | None = None, signature: str = SPACE.signature) -> TuningRecord:
    verdict = Verdict(validator="numerics", outcome=Outcome.FAIL if failure else Outcome.PASS)
    return TuningRecord(key="k", signature=signature, step=step, source_digest="d", advisor="says", advisor_rank=0, verdict=verdict,
                        measurement=None if failure else measurement(us), resources=Resources(registers=40), failure=failure)
