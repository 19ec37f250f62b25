"""Equal regions are one: a signature over structure, with values by position and never by name."""

from collections.abc import Iterable

from attrs import evolve

from ...ir.graph import Graph
from ...ir.region import Instance, Region
from ...ops.canonical import Canonical, canonical
from .boundaries import Part


def merge(graph: Graph, parts: Iterable[Part]) -> tuple[Region, ...]:
    """One region per signature, in graph order of the first instances, which lend their names to the regions."""
    regions: dict[str, Region] = {}
    first: dict[str, Canonical] = {}
    taken: dict[str, int] = {}
    for part in parts:
        sub = graph.sub(part.nodes, part.name)
        form = canonical(sub)
        leader = first.setdefault(form.signature, form)
        instance = Instance(nodes=tuple(zip(leader.nodes, form.nodes, strict=True)),
                            values=tuple(zip(leader.values, form.values, strict=True)))
        if form.signature in regions:
            region = regions[form.signature]
            regions[form.signature] = evolve(region, instances=(*region.instances, instance))
            continue
        taken[part.name] = taken.get(part.name, 0) + 1
        name = part.name if taken[part.name] == 1 else f"{part.name}_{taken[part.name]}"
        regions[form.signature] = Region(name=name, signature=form.signature, graph=evolve(sub, name=name),
                                         instances=(instance,))
    return tuple(regions.values())
