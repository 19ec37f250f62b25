"""Matches that want one weight behind several others are none: a layer that is run again, with other weights beside its own."""

from collections import defaultdict
from collections.abc import Iterator

from attrs import evolve

from ...ir.graph import Graph
from ...ir.region import Match, Region, Role
from ...ir.weight_source import parameter_of
from ...ops.aliasing import alias_roots

Place = tuple[str, str]  # a region, by its signature, and the id of a match in it
Group = tuple[str, ...]  # parameters that lie behind each other


def without_torn(graph: Graph, regions: tuple[Region, ...]) -> tuple[Region, ...]:
    """``regions`` without the matches that read a weight of several as one matrix where it lies beside others for another match.

    Memory has one order, that of the larger matrix. Matches of a region that have nodes in common are alternatives, of which one is
    selected; all others may be selected beside each other, and each is in every instance of its region. Zamba2's feed-forward layer is an
    example: one matrix for all its places, and behind it, of the same rows, an adapter of each place.
    """
    kept: dict[str, list[tuple[Place, Group]]] = defaultdict(list)  # by parameter: what reads it, and what lies behind each other there
    found = {(region.signature, match.id): tuple(_groups(graph, region, match)) for region in regions for match in region.matches}
    nodes = {(region.signature, match.id): frozenset(match.nodes) for region in regions for match in region.matches}
    torn: set[Place] = set()

    def differ(place: Place, group: Group, other: Place, its: Group) -> bool:
        alternatives = place[0] == other[0] and place != other and not nodes[place].isdisjoint(nodes[other])
        return group != its and not alternatives

    seen: dict[tuple[Group, ...], int] = {}  # what is read alike in several places is kept in all of them
    for groups in found.values():
        seen.setdefault(groups, len(seen))
    for place, groups in sorted(found.items(), key=lambda item: (-max(map(len, item[1]), default=0), seen[item[1]])):
        mine = {(parameter, group) for group in groups for parameter in group}
        twice = len({parameter for parameter, _ in mine}) < len(mine)  # in two places of the match itself
        if twice or any(differ(place, group, *one) for parameter, group in mine for one in kept[parameter]):
            torn.add(place)
            continue
        for parameter, group in mine:
            kept[parameter].append((place, group))
    return tuple(evolve(region, matches=tuple(m for m in region.matches if (region.signature, m.id) not in torn)) for region in regions)


def _groups(graph: Graph, region: Region, match: Match) -> Iterator[Group]:
    roots = alias_roots(graph)
    for operand in match.operands:
        if operand.role is Role.WEIGHT and len(operand.values) > 1:
            for instance in region.instances:
                values = [graph.by_name[roots[instance.value[value]]] for value in operand.values]
                yield tuple(parameter_of(value.source)[0] for value in values)
