"""The framework's time of each match, told by the same parts for all of them: so covers differ by their kernels and not by noise."""

from collections.abc import Collection, Mapping


def by_parts(measured_us: Mapping[str, float], nodes: Mapping[str, Collection[str]]) -> dict[str, float]:
    """Of every match in ``measured_us`` (by its id, as it was measured alone) the sum of its parts' times, where parts make it up; else
    as it was measured.

    Parts are matches of few nodes that share none, smallest first. Two covers of the same nodes whose matches parts make up are then told
    the same time of the framework, however they cut them. As measured they are not: attention over a long cache takes the framework
    hundreds of microseconds, of which the noise is larger than what a fused kernel saves.
    """
    parts: dict[str, frozenset[str]] = {}
    taken: set[str] = set()
    for match in sorted(measured_us, key=lambda match: (len(nodes[match]), match)):
        if taken.isdisjoint(nodes[match]):
            parts[match] = frozenset(nodes[match])
            taken |= parts[match]
    return {match: _of_parts(frozenset(nodes[match]), own_us, parts, measured_us) for match, own_us in measured_us.items()}


def _of_parts(whole: frozenset[str], own_us: float, parts: Mapping[str, frozenset[str]], measured_us: Mapping[str, float]) -> float:
    inside = [match for match, part in parts.items() if part <= whole]
    complete = bool(inside) and sum(len(parts[match]) for match in inside) == len(whole)
    return sum(measured_us[match] for match in inside) if complete else own_us
