"""A graph without its names: what makes two computations the same one."""

import math

from attrs import frozen

from ..ir import serial
from ..ir.graph import Argument, Graph, map_refs

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


def _plain(argument: Argument) -> Argument:
    """The argument with infinities and NaN as text, which JSON lacks, and with their type kept beside integers."""
    if isinstance(argument, tuple):
        return tuple(_plain(item) for item in argument)
    if isinstance(argument, float) and not math.isfinite(argument):
        return f"float:{argument}"
    return argument
