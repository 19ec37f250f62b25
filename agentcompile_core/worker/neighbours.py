"""Which steps of the chain are changed two at a time: neighbours, by alternatives that came close alone.

Rings, caps on what is in flight and residency of two kernels that run behind each other interact: what loses a little beside one
neighbour may win beside another.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product

from ..ir.plan import Step
from ..ir.region import Region
from ..ir.selection import SelectedStep, Selection

NEAR = 1.03  # times the incumbent, by the upper bound of its ratio: what an alternative may have lost by
MOST_PER_STEP = 3
Key = tuple[str, Step]  # signature and step


def replacements(selections: Sequence[Selection], regions: Sequence[Region], ratios: Mapping[Key, float]) -> tuple[tuple[Key, Key], ...]:
    """Two replacements each, those that came closest alone first. ``ratios``: of what was tried and not taken, 0 where nothing was found.

    Neighbours are steps that follow each other in a region; the last and the first one too, where the region repeats.
    """
    found: list[tuple[float, Key, Key]] = []
    for selection in selections:
        region = next(r for r in regions if r.signature == selection.signature)
        for first, second in _neighbours(selection, region):
            both = (_close(selection.signature, step, ratios) for step in (first, second))
            found += [(ratios[a] * ratios[b], a, b) for a, b in product(*both)]
    return tuple((a, b) for _, a, b in sorted(found, key=lambda one: (one[0], str(one[1][1]), str(one[2][1]))))


def in_order(selection: Selection, region: Region) -> list[SelectedStep]:
    """The steps of a selection as they follow each other in its region."""
    places = {node.name: place for place, node in enumerate(region.graph.nodes)}
    return sorted(selection.steps, key=lambda step: min(places[name] for name in step.nodes))


def _neighbours(selection: Selection, region: Region) -> Iterator[tuple[SelectedStep, SelectedStep]]:
    steps = in_order(selection, region)
    yield from pairwise(steps)
    if len(steps) > 2 and len(region.instances) > 1:
        yield steps[-1], steps[0]


def _close(signature: str, held: SelectedStep, ratios: Mapping[Key, float]) -> list[Key]:
    others = [key for key, ratio in ratios.items() if key[0] == signature and key[1].match_id == held.step.match_id
              and key[1] != held.step and 0.0 < ratio < NEAR]
    return sorted(others, key=lambda key: (ratios[key], str(key[1])))[:MOST_PER_STEP]
