"""The framework's time of each match, told by the same parts for all of them: so covers differ by their kernels and not by noise."""

from collections.abc import Collection, Iterable, Mapping

from .region import Region

Nodes = Mapping[str, Collection[str]]  # of every match, by its id


def working_nodes(region: Region) -> dict[str, frozenset[str]]:
    """The nodes of every match that take the framework time: a view takes none, and which of them a match has says nothing of its work."""
    views = {node.name for node in region.graph.nodes if node.kind == "view"}
    return {name: frozenset(match.nodes) - views for name, match in region.match_by_id.items()}


def by_parts(measured_us: Mapping[str, float], nodes: Nodes) -> dict[str, float]:
    """Of every match in ``measured_us`` (as it was measured alone) the sum of its parts' times, where parts make it up; else as measured.

    Nothing for a match without working nodes.

    Parts are matches of few ``nodes`` that share none, smallest first. Two covers of the same nodes whose matches parts make up are then
    told the same time of the framework, however they cut them. As measured they are not: attention over a long cache takes the framework
    hundreds of microseconds, of which the noise is larger than what a fused kernel saves.
    """
    parts: dict[str, frozenset[str]] = {}
    taken: set[str] = set()
    for match in sorted(measured_us, key=lambda match: (len(nodes[match]), match)):
        if nodes[match] and taken.isdisjoint(nodes[match]):
            parts[match] = frozenset(nodes[match])
            taken |= parts[match]
    return {match: _of_parts(frozenset(nodes[match]), own_us, parts, measured_us) for match, own_us in measured_us.items()}


def _of_parts(whole: frozenset[str], own_us: float, parts: Mapping[str, frozenset[str]], measured_us: Mapping[str, float]) -> float:
    if not whole:
        return 0.0
    inside = [match for match, part in parts.items() if part <= whole]
    complete = bool(inside) and sum(len(parts[match]) for match in inside) == len(whole)
    return sum(measured_us[match] for match in inside) if complete else own_us


def levelled(covers: Iterable[Collection[str]], told_us: Mapping[str, float], nodes: Nodes) -> list[float]:
    """The framework's time of what each cover's matches in ``told_us`` do, in microseconds: the same for all covers of the same nodes.

    It is the least sum of ``told_us`` among them. Where parts make up all matches, all sums are equal; where some are missing they are not.
    """
    sums = []
    for cover in covers:
        known = [match for match in cover if match in told_us]
        sums.append((frozenset(name for match in known for name in nodes[match]), sum(told_us[match] for match in known)))
    least: dict[frozenset[str], float] = {}
    for covered, us in sums:
        least[covered] = min(us, least.get(covered, us))
    return [least[covered] for covered, _ in sums]
