"""Cutting a graph into regions: between hard boundaries, at most one instance of a repeated layer, always convex."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from attrs import frozen

from ...ir.graph import DType, Graph, Node, ValueKind
from ...ops.aliasing import is_alias, seen_changing
from ...ops.dependency import Dependencies, bits, dependencies
from ...ops.operator_names import DATA_DEPENDENT, operator

UNSUPPORTED = frozenset({DType.F64})  # nothing here computes in double precision
SMALLEST_LAYER = 4  # a repeated part of fewer nodes is not a layer (Linear, ReLU, Linear, ...)
_NUMBERED = re.compile(r"(?:(.*?)\.)?(\d+)(?=\.|$)")


@frozen(kw_only=True)
class Part:
    """Nodes of one region before equal ones are merged. ``layer`` is -1 outside repeated layers."""

    name: str
    nodes: tuple[str, ...]
    layer: int = -1


def boundary_reason(graph: Graph, node: Node, changing: frozenset[str] = frozenset()) -> str:
    """Why nothing may be fused across a node; empty if it is no hard boundary. ``changing`` is what ``seen_changing`` says."""
    name, overload = operator(node)
    if ((name.endswith("_") and not name.endswith("__")) or overload.startswith("out")) and not node.mutates:
        return "undeclared mutation"
    if name in DATA_DEPENDENT:
        return "data-dependent operator"
    if any(value in changing for value in (*node.inputs, *node.outputs)):
        return "memory that is seen changing"
    for value in (*node.inputs, *node.outputs):
        if graph.spec(value).dtype in UNSUPPORTED:
            return f"dtype {graph.spec(value).dtype.value}"
    return ""


def partition(graph: Graph) -> tuple[Part, ...]:
    """The regions of a graph in order of their first node. Boundary nodes, and parts that only move views, are in none.

    A layer that something outside interrupts is cut in several parts, so that each part is convex and the parts can run
    one after the other.
    """
    deps = dependencies(graph)
    keys = _keys(graph, deps)
    groups: dict[tuple[str, int], list[int]] = {}
    cyclic = _cyclic_keys(deps, keys)
    levels = _levels(deps, keys)
    for i, key in enumerate(keys):
        groups.setdefault((key, levels[i] if key in cyclic else 0), []).append(i)
    parts = []
    for (key, _), members in groups.items():
        kind, _, number = key.partition(":")
        nodes = tuple(graph.nodes[i] for i in members)
        if kind != "boundary" and not all(is_alias(graph, node) for node in nodes):
            parts.append(Part(name=kind, nodes=tuple(node.name for node in nodes), layer=int(number) if number else -1))
    return tuple(parts)


def _keys(graph: Graph, deps: Dependencies) -> list[str]:
    layers = layer_indices(graph.nodes)
    layered = deps.mask(name for name, layer in layers.items() if layer >= 0)
    changing = seen_changing(graph)
    keys = []
    for i, node in enumerate(graph.nodes):
        layer = layers[node.name]
        if boundary_reason(graph, node, changing):
            keys.append(f"boundary:{i}")
        elif layer >= 0:
            keys.append(f"layer:{layer}")
        elif not layered:
            keys.append("body")
        else:
            keys.append("head" if deps.ancestors[i] & layered else "prologue")
    return _with_what_it_reads(graph, keys)


def _with_what_it_reads(graph: Graph, keys: list[str]) -> list[str]:
    """``keys``, where what is made of weights alone and read by the head alone belongs to the head (Nemotron's last weight + 1)."""
    found, place = list(keys), {node.name: i for i, node in enumerate(graph.nodes)}
    for i, node in reversed(list(enumerate(graph.nodes))):
        of_weights = all(graph.kind_of(value) is ValueKind.WEIGHT for value in node.inputs)
        if found[i] == "prologue" and of_weights and not any(value in graph.outputs for value in node.outputs):
            readers = {found[place[user.name]] for value in node.outputs for user in graph.users.get(value, ())}
            found[i] = "head" if readers == {"head"} else found[i]
    return found


def layer_indices(nodes: Sequence[Node]) -> dict[str, int]:
    """The repeated layer of each node: as captured, else from its module path (``model.layers.3.mlp``); -1 for none.

    The members of a small ``Sequential`` are numbered too; they are no layers unless one has at least four nodes.
    """
    captured = Counter(node.layer for node in nodes if node.layer >= 0)
    if captured:
        is_layered = max(captured.values()) >= SMALLEST_LAYER
        return {node.name: node.layer if is_layered else -1 for node in nodes}
    found = dict.fromkeys((node.name for node in nodes), -1)
    containers: dict[str, dict[int, list[str]]] = {}
    for node in nodes:
        numbered = _NUMBERED.match(node.module)
        if numbered:
            containers.setdefault(numbered[1] or "", {}).setdefault(int(numbered[2]), []).append(node.name)
    ops = {node.name: node.op for node in nodes}
    best = max(containers.items(), key=lambda item: sum(map(len, item[1].values())), default=None)
    if best is not None and _repeats(best[1], ops):
        for layer, names in best[1].items():
            found.update(dict.fromkeys(names, layer))
    return found


def _repeats(layers: Mapping[int, list[str]], ops: Mapping[str, str]) -> bool:
    shapes = Counter(tuple(ops[name] for name in names) for names in layers.values() if len(names) >= SMALLEST_LAYER)
    return any(count >= 2 for count in shapes.values())


def _levels(deps: Dependencies, keys: Sequence[str]) -> list[int]:
    """A number that never falls along a dependency and grows wherever the key changes, so (key, level) is convex."""
    levels = [0] * len(keys)
    for i, mask in enumerate(deps.before):
        levels[i] = max((levels[p] + (keys[p] != keys[i]) for p in bits(mask)), default=0)
    return _beside_their_readers(deps, keys, levels)


def _beside_their_readers(deps: Dependencies, keys: Sequence[str], levels: Sequence[int]) -> list[int]:
    """``levels`` in which what reads nothing of its own key waits for others of that key that come before what needs it.

    Alone it would be a part of its own. It joins a part that there is in any case: none is torn apart.
    """
    found, latest = list(levels), [-1] * len(keys)
    reads_own = [any(keys[p] == key for p in bits(before)) for key, before in zip(keys, deps.before, strict=True)]
    there: dict[str, set[int]] = {}
    for key, level, staying in zip(keys, levels, reads_own, strict=True):
        there.setdefault(key, set()).update((level,) if staying else ())
    for i in reversed(range(len(keys))):
        if not reads_own[i]:
            found[i] = max((level for level in there[keys[i]] if found[i] < level <= latest[i]), default=found[i])
        for p in bits(deps.before[i]):
            most = found[i] - (keys[p] != keys[i])
            latest[p] = most if latest[p] < 0 else min(latest[p], most)
    return found


def _cyclic_keys(deps: Dependencies, keys: Sequence[str]) -> set[str]:
    """Keys whose nodes cannot all run as one unit: they lie on a circle of the graph between keys."""
    after: dict[str, set[str]] = {key: set() for key in keys}
    for i, mask in enumerate(deps.before):
        for p in bits(mask):
            if keys[p] != keys[i]:
                after[keys[p]].add(keys[i])
    # Take away what has no successor left, then what has no predecessor left: circles and what joins two of them remain.
    remaining = dict(after)
    for graph in (remaining, None):
        links = graph if graph is not None else _reversed(remaining)
        while True:
            free = [key for key, targets in links.items() if not targets & links.keys()]
            if not free:
                break
            for key in free:
                del links[key]
        remaining = {key: after[key] & links.keys() for key in links}
    return set(remaining)


def _reversed(links: Mapping[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {key: set() for key in links}
    for key, targets in links.items():
        for target in targets & links.keys():
            found[target].add(key)
    return found
