"""Covers of a region: disjoint matches that can run one after the other, the others on the framework; a ranked few of them.

The search is exact up to its bounds: nodes are decided in graph order, each by a match that starts with it or by the
framework, keeping the cheapest few ways to have decided each set of nodes. Cost is the time floor of the bytes plus a
fixed price per step, and a higher one per framework node.
"""

from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve, frozen

from ...ir.graph import Graph
from ...ir.plan import MAX_COVERS, Cover, Fusion
from ...ir.region import Match
from ...ir.target import Target
from ...ops.aliasing import is_alias
from ...ops.dependency import Dependencies, bits, dependencies
from ...ops.traffic import bytes_of

STEP_US = 2.0  # launch, tail and dependency of one kernel in a captured chain
FRAMEWORK_US = 6.0  # the same of one framework operator, without programmatic dependent launch
WAYS = 12  # kept per set of decided nodes
SETS = 192  # kept per step of the search
NEIGHBOUR_WORK = 6000  # nodes times matches for which the cheapest cover that holds the match is looked for


@frozen
class _Way:
    """One way to decide a set of nodes: its cost and its matches by index."""

    cost_us: float
    matches: tuple[int, ...]


@frozen(kw_only=True)
class _Problem:
    """What the search needs: everything by index and as bit masks over the region's nodes."""

    deps: Dependencies
    matches: tuple[Match, ...]
    masks: tuple[int, ...]
    work: int  # nodes that compute something; the others are addresses
    costs_us: tuple[float, ...]
    framework_us: tuple[float, ...]


def covers(graph: Graph, matches: Sequence[Match], target: Target, most: int = MAX_COVERS) -> tuple[Cover, ...]:
    """At most ``most`` covers, the planner's favourite first, the one without any match always among them.

    After the cheapest cover come those that bring a match no better cover has, then the next cheapest. A cover without
    fusion is kept if there is one.
    """
    problem = _problem(graph, matches, target)
    every = range(len(matches))
    single = [i for i in every if (problem.masks[i] & problem.work).bit_count() == 1]
    picked = _picked(_search(problem, every), _search(problem, single)[:1], _neighbours(problem), most - 1)
    ranked = sorted(picked, key=lambda way: (way.cost_us, way.matches))
    framework = _Way(sum(problem.framework_us), ())
    fullest = _fullest(problem, ranked)
    found = [_cover(problem, way, fullest) for way in [way for way in ranked if way.matches] + [framework]]
    return tuple(evolve(cover, rank=rank) for rank, cover in enumerate(found))


def _problem(graph: Graph, matches: Sequence[Match], target: Target) -> _Problem:
    deps = dependencies(graph)
    work = deps.mask(node.name for node in graph.nodes if not is_alias(graph, node))
    framework = [FRAMEWORK_US + target.floor_us(bytes_of(node, graph)) if work >> i & 1 else 0.0 for i, node in enumerate(graph.nodes)]
    return _Problem(
        deps=deps, matches=tuple(matches), masks=tuple(deps.mask(match.nodes) for match in matches), work=work,
        costs_us=tuple(STEP_US + target.floor_us(match.bytes_moved) for match in matches), framework_us=tuple(framework),
    )


def _neighbours(problem: _Problem) -> list[_Way]:
    """For every match (the first ones, in a very large region) the cheapest cover that holds it, cheapest first."""
    found = []
    for index in range(min(len(problem.matches), NEIGHBOUR_WORK // len(problem.deps.names))):
        mask = problem.masks[index]
        beside = [other for other, taken in enumerate(problem.masks) if other == index or not taken & mask]
        found += _search(problem, beside, forced=index, ways=2)[:1]
    return sorted(set(found), key=lambda way: (way.cost_us, way.matches))


def _search(problem: _Problem, usable: Iterable[int], forced: int = -1, ways: int = WAYS) -> list[_Way]:
    """The cheapest ways to decide every node, using only matches in ``usable`` (all of which are disjoint from
    ``forced``, which must be used), cheapest first; only those whose matches can run one after the other."""
    must = problem.masks[forced] if forced >= 0 else 0
    starting: dict[int, list[int]] = {}
    for index in usable:
        first = next(iter(bits(problem.masks[index])))
        starting.setdefault(first, []).append(index)
    count = len(problem.deps.names)
    states: dict[int, list[_Way]] = {0: [_Way(0.0, ())]}
    for node in range(count):
        following: dict[int, list[_Way]] = {}
        for decided, before in states.items():
            if decided >> node & 1:
                _add(following, decided, before, 0.0, ())
                continue
            if not must >> node & 1:
                _add(following, decided | 1 << node, before, problem.framework_us[node], ())
            for index in starting.get(node, ()):
                mask = problem.masks[index]
                if not mask & decided:
                    _add(following, decided | mask, before, problem.costs_us[index], (index,))
        states = _bounded(following, ways)
    found = sorted((way for kept in states.values() for way in kept), key=lambda way: (way.cost_us, way.matches))
    return [way for way in found if problem.deps.is_schedulable([problem.masks[i] for i in way.matches])]


def _add(states: dict[int, list[_Way]], decided: int, ways: Iterable[_Way], cost_us: float, matches: tuple[int, ...]) -> None:
    states.setdefault(decided, []).extend(_Way(way.cost_us + cost_us, way.matches + matches) for way in ways)


def _bounded(states: Mapping[int, list[_Way]], most: int) -> dict[int, list[_Way]]:
    kept = {mask: sorted(ways, key=lambda way: (way.cost_us, way.matches))[:most] for mask, ways in states.items()}
    # Sets that decided more have paid more: compare per decided node, so that long matches are not thrown away early.
    order = sorted(kept, key=lambda mask: (kept[mask][0].cost_us / mask.bit_count(), mask))
    return {mask: kept[mask] for mask in order[:SETS]}


def _picked(ways: Sequence[_Way], unfused: Sequence[_Way], neighbours: Sequence[_Way], most: int) -> list[_Way]:
    """The cheapest way, the one without fusion, those that bring a new match, then the next cheapest."""
    picked: list[_Way] = []
    seen: set[int] = set()
    for way in (*ways[:1], *unfused, *neighbours):
        if len(picked) < most and way not in picked and not seen.issuperset(way.matches):
            picked.append(way)
            seen.update(way.matches)
    for way in ways:
        if len(picked) < most and way not in picked and way.matches:
            picked.append(way)
    return picked


def _fullest(problem: _Problem, ways: Sequence[_Way]) -> tuple[int, int]:
    """The most nodes that a way covers, negative the fewest steps it takes for that: larger is fuller."""
    return max((_fullness(problem, way) for way in ways), default=(0, 0))


def _fullness(problem: _Problem, way: _Way) -> tuple[int, int]:
    return (_covered(problem, way) & problem.work).bit_count(), -len(way.matches)


def _covered(problem: _Problem, way: _Way) -> int:
    covered = 0
    for index in way.matches:
        covered |= problem.masks[index]
    return covered


def _cover(problem: _Problem, way: _Way, fullest: tuple[int, int]) -> Cover:
    order = sorted(way.matches, key=lambda index: problem.masks[index] & -problem.masks[index])
    return Cover(matches=tuple(problem.matches[index].id for index in order), fusion=_fusion(problem, way, fullest), rank=0)


def _fusion(problem: _Problem, way: _Way, fullest: tuple[int, int]) -> Fusion:
    """FULL: all that can be covered, in the fewest steps. NONE: every step is one operator. PARTIAL: in between."""
    if not way.matches:
        return Fusion.FRAMEWORK
    if all((problem.masks[index] & problem.work).bit_count() == 1 for index in way.matches):
        return Fusion.NONE
    return Fusion.FULL if _fullness(problem, way) == fullest else Fusion.PARTIAL
