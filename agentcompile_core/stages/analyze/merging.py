"""Equal regions are one: a signature over structure, with values by position and never by name."""

import math
from collections.abc import Iterable

from attrs import evolve, frozen

from ...ir import serial
from ...ir.graph import Argument, Graph, map_refs
from ...ir.region import Instance, Region
from .boundaries import Part

RULES_VERSION = 2  # part of every signature: bump when regions are cut or described differently


@frozen(kw_only=True)
class Canonical:
    """A graph without its names: its signature, and its nodes and values in canonical order."""

    signature: str
    nodes: tuple[str, ...]
    values: tuple[str, ...]


def canonical(graph: Graph) -> Canonical:
    """The canonical form of a region's graph. Equal up to the names of nodes and values means an equal signature.

    What counts: operators, normalized kinds, arguments and constants, shapes, dtypes, strides, who owns a value, what is
    mutated and what leaves. Weights count by position.
    """
    names: dict[str, str] = {}
    for node in graph.nodes:
        for name in (*node.inputs, *node.mutates, *node.outputs):
            names.setdefault(name, f"v{len(names)}")
    values = []
    for name in names:
        value = graph.by_name[name]
        values.append([value.kind.value, list(value.spec.shape), value.spec.dtype.value, list(value.spec.strides)])
    nodes = [
        [
            node.op,
            node.kind,
            [_plain(map_refs(argument, names)) for argument in node.args],
            [[key, _plain(map_refs(argument, names))] for key, argument in node.kwargs],
            [names[out] for out in node.outputs],
            [names[name] for name in node.mutates],
        ]
        for node in graph.nodes
    ]
    outputs = [name for value, name in names.items() if value in graph.outputs]
    signature = serial.digest("region", RULES_VERSION, graph.kind.value, graph.tokens, values, nodes, outputs)
    return Canonical(signature=signature, nodes=tuple(node.name for node in graph.nodes), values=tuple(names))


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


def _plain(argument: Argument) -> Argument:
    """The argument with infinities and NaN as text, which JSON lacks, and with their type kept beside integers."""
    if isinstance(argument, tuple):
        return tuple(_plain(item) for item in argument)
    if isinstance(argument, float) and not math.isfinite(argument):
        return f"float:{argument}"
    return argument
