"""Stage 3, plan: Analyses -> RegionPlans. Who can implement which match, with which schedules, and which covers to consider."""

from collections.abc import Iterator

from ...context import Context
from ...errors import Cause, ContractError, Reject, StageName, bounded
from ...ir.plan import MAX_POINTS, Needs, Origin, PlanRisk, PlanSpace, RegionPlan, ScheduleSpace, StepSpace
from ...ir.region import Analysis, Match, Region
from ...ir.target import Target
from ...plugin.interfaces import Implementation, TemplateFamily
from .covers import covers
from .risk import risk_of

Server = TemplateFamily | Implementation


def run(analyses: tuple[Analysis, ...], ctx: Context) -> tuple[RegionPlan, ...]:
    """Every merged region with its summary and its space, in order, each signature once.

    Raises:
        UsageError: the configuration names an origin that does not exist.
    """
    allowed = origins(ctx)
    found: dict[str, RegionPlan] = {}
    for region, summary in (pair for analysis in analyses for pair in zip(analysis.regions, analysis.summaries, strict=True)):
        if region.signature not in found:
            found[region.signature] = RegionPlan(region=region, summary=summary, space=plan(region, allowed, ctx))
    return tuple(found.values())


def origins(ctx: Context) -> frozenset[Origin]:
    """The origins of what may be planned, as the configuration allows; the framework is never planned, it is what is left.

    Raises:
        UsageError: it names an unknown one.
    """
    from ...errors import UsageError

    known = {origin.value: origin for origin in Origin}
    unknown = [name for name in ctx.config.origins if name not in known]
    if unknown:
        raise UsageError(f"unknown origin {unknown[0]!r}; known origins: {', '.join(known)}; set some of them as Config.origins")
    return frozenset(known[name] for name in ctx.config.origins) - {Origin.FRAMEWORK}


def plan(region: Region, allowed: frozenset[Origin], ctx: Context) -> PlanSpace:
    """The space of one region: every match with everyone who can serve it, and ranked covers of what can be served."""
    steps: list[StepSpace] = []
    rejects: list[tuple[str, str, str]] = []
    broken: list[tuple[str, str, str]] = []
    for match in region.matches:
        for name, server in _servers(ctx):
            origin = _origin(server)
            if origin not in allowed:
                continue
            wrong = unfit(server, ctx.target)
            found = wrong if wrong is not None else _ask(name, server, match, ctx)
            if isinstance(found, Reject):
                rejects.append((match.id, name, found.reason))
            elif isinstance(found, str):
                broken.append((match.id, name, found))
            else:
                steps.append(StepSpace(match_id=match.id, implementation=name, origin=origin, version=server.version, space=found,
                                       risk=_risk(name, server, match, found, ctx)))
    served = {step.match_id for step in steps}
    usable = tuple(match for match in region.matches if match.id in served)
    return PlanSpace(signature=region.signature, covers=covers(region.graph, usable, ctx.target), steps=tuple(steps),
                     rejects=tuple(rejects), broken=tuple(broken))


def _servers(ctx: Context) -> Iterator[tuple[str, Server]]:
    yield from sorted(ctx.catalog.template_families.items())
    yield from sorted(ctx.catalog.implementations.items())


def unfit(server: Server, target: Target) -> Reject | None:
    """Why nothing of a family may reach what builds for ``target``: another language, or a capability that is not there."""
    if isinstance(server, Implementation):
        return None
    if server.language not in target.languages:
        return Reject(f"its kernels are written in {server.language}; {target.name} runs {', '.join(target.languages) or 'no kernels'}")
    lacking = [feature for feature in server.features if not target.has(feature)]
    return Reject(f"it needs {', '.join(lacking)}, which {target.name} lacks") if lacking else None


def _origin(server: Server) -> Origin:
    return server.origin if isinstance(server, Implementation) else Origin.GENERATED


def _ask(name: str, server: Server, match: Match, ctx: Context) -> ScheduleSpace | Reject | str:
    """The schedules of one server for one match, or its no; what it raised, and a recorded failure, if it broke its contract."""
    raised: list[str] = []

    def ask() -> ScheduleSpace | Reject:
        answer = server.accepts(match, ctx.target)
        if isinstance(answer, Reject):
            return answer
        if answer is not True:
            raise ContractError(f"accepts() returned {answer!r}; allowed are True and Reject(reason)")
        return checked(server.space(match, ctx.target))

    def noted() -> ScheduleSpace | Reject:
        try:
            return ask()
        except (Exception, SystemExit) as exc:
            raised.append(bounded(f"{type(exc).__name__}: {exc}"))
            raise

    found = ctx.catalog.guard(noted, stage=StageName.PLAN, cause=Cause.EXCEPTION, plugin=name, subject=f"match {match.id}")
    return found if found is not None else raised[0] if raised else "it did not come back in time"


def _risk(name: str, server: Server, match: Match, space: ScheduleSpace, ctx: Context) -> PlanRisk:
    """The risk of the best guess; none where nothing is foreseen, or where the family raises (recorded)."""
    if isinstance(server, Implementation):
        return PlanRisk()
    needs = ctx.catalog.guard(lambda: server.needs(match, space.points[0], ctx.target), stage=StageName.PLAN, cause=Cause.EXCEPTION,
                              plugin=name, subject=f"needs of match {match.id}")
    return risk_of(needs, ctx.target) if isinstance(needs, Needs) else PlanRisk()


def checked(space: ScheduleSpace) -> ScheduleSpace | Reject:
    """The space if it keeps its contract; a Reject if it is empty.

    Raises:
        ContractError: it is no ScheduleSpace, too large, repeats a point, or a point lies outside its own parameters.
    """
    if not isinstance(space, ScheduleSpace):
        raise ContractError(f"space() returned {type(space).__name__}; it must return a ScheduleSpace")
    if not space.points:
        return Reject("no schedule is legal for this match on this target")
    if len(space.points) > MAX_POINTS:
        raise ContractError(f"a space of {len(space.points)} points; at most {MAX_POINTS} are allowed: narrow its parameters")
    if len(set(space.points)) != len(space.points):
        raise ContractError("a space that lists a schedule twice")
    values = {parameter.name: {(type(v), v) for v in parameter.values} for parameter in space.parameters}
    for point in space.points:
        for name, value in point.items:
            if (type(value), value) not in values.get(name, ()):
                raise ContractError(f"schedule {point} has {name}={value!r}, which its parameters do not list")
    return space
