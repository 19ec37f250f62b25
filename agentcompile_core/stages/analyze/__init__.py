"""Stage 2, analyze: GraphSet -> Analyses. Cuts graphs into regions, merges equal ones, asks the rules for matches."""

from collections.abc import Mapping
from itertools import islice

from attrs import evolve

from ...context import Context
from ...errors import Cause, ContractError, Failure, StageName
from ...ir.graph import Graph, GraphKind, GraphSet
from ...ir.region import Analysis, Match, Region
from ...ops.dependency import Dependencies, dependencies
from ...plugin.interfaces import RegionRule
from ...plugin.match_kind import MatchKind
from .boundaries import partition
from .checking import completed, kind_problem, normalized, problem
from .merging import merge
from .shared_weights import without_torn
from .summaries import region_label, summarize

MAX_MATCHES = 100_000  # of one rule in one region

def run(graphs: GraphSet, ctx: Context) -> tuple[Analysis, ...]:
    """Analyze the decode graphs, or the forward graphs of a plain module; prefill stays on the framework.

    Equal regions are merged within a graph, and rules are asked once per merged region. A rule that raises, and a match
    that the core refuses, become failures; the run goes on.
    """
    chosen = graphs.of_kind(GraphKind.DECODE) or graphs.of_kind(GraphKind.FORWARD)
    return tuple(analyze(graph, ctx) for graph in chosen)


def analyze(graph: Graph, ctx: Context) -> Analysis:
    """The merged regions of one graph, with their matches and summaries."""
    regions = without_torn(graph, tuple(with_matches(region, ctx) for region in merge(graph, partition(graph))))
    return Analysis(graph=graph.name, regions=regions, summaries=tuple(summarize(region, ctx.catalog.kinds) for region in regions))


def with_matches(region: Region, ctx: Context) -> Region:
    """The region with every match that a rule of the catalog finds and the core accepts, by first node, smaller first."""
    deps = dependencies(region.graph)
    found: dict[str, Match] = {}
    kinds = ctx.catalog.kinds
    for name, rule in sorted(ctx.catalog.region_rules.items()):
        for match in _ask(name, rule, region, ctx):
            checked = _checked(name, match, region, deps, kinds, ctx)
            if checked is not None:
                found.setdefault(checked.id, checked)
    order = sorted(found.values(), key=lambda m: (deps.index[m.nodes[0]], len(m.nodes), m.id))
    return evolve(region, matches=tuple(order), label=region_label(order, region.graph))


def _ask(name: str, rule: RegionRule, region: Region, ctx: Context) -> list[Match]:
    def ask() -> list[Match]:
        answer = list(islice(rule.find(region.graph, ctx.target), MAX_MATCHES + 1))
        if len(answer) > MAX_MATCHES:
            raise ContractError(f"find() gave more than {MAX_MATCHES} matches; a region has {len(region.graph.nodes)} nodes")
        return answer

    found = ctx.catalog.guard(ask, stage=StageName.ANALYZE, cause=Cause.EXCEPTION, plugin=name, subject=f"region {region.name}")
    return found or []


def _checked(name: str, match: Match, region: Region, deps: Dependencies, kinds: Mapping[str, MatchKind], ctx: Context) -> Match | None:
    def check() -> Match:
        if not isinstance(match, Match):
            raise ContractError(f"expected Match, got {type(match).__name__}")
        unknown = [node for node in match.nodes if node not in deps.index]
        if unknown:
            raise ContractError(f"it names {unknown[0]!r}, which is no node of the region")
        if not match.nodes:
            raise ContractError("it covers no node; a match covers at least one")
        kind = kinds.get(match.kind) or ctx.catalog.kind(match.kind)
        reason = kind_problem(match, kind)
        if reason:
            raise ContractError(f"{match.id} is no {kind.name} match: {reason}")
        return completed(normalized(match, deps, name), kind, region.graph)

    same = ctx.catalog.guard(check, stage=StageName.ANALYZE, cause=Cause.CONTRACT, plugin=name, subject=f"region {region.name}")
    reason = problem(same, region.graph, deps) if same is not None else ""
    if same is not None and reason:
        ctx.catalog.fail(Failure(stage=StageName.ANALYZE, cause=Cause.CONTRACT, plugin=name, subject=f"match {same.id}",
                                 message=f"match refused: {reason}"))
        return None
    return same
