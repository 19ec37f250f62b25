"""A shorter model for the chain: the same graph with as many of its layers as fit into two GiB, so that it is judged as it will run."""

from attrs import evolve

from ...ir.graph import Graph, Node, ValueKind, map_refs
from ...ir.region import Instance, Region
from ...ir.target import Target

LAYERS = 8  # at the least: of fewer, what does not repeat (head, embedding) is most of the time
WEIGHTS_BYTES = 2 << 30  # of the kept layers, beside the model's own on the same device


def layers_needed(graph: Graph, target: Target) -> int:
    """How many layers the chain keeps: at least eight, and enough that their weights exceed twice the L2; then as many as two GiB hold."""
    per_layer = {node.layer: 0 for node in graph.nodes if node.layer >= 0}
    seen: set[str] = set()
    for node in graph.nodes:
        for name in node.inputs:
            value = graph.by_name[name]
            if value.kind is ValueKind.WEIGHT and name not in seen and node.layer >= 0:
                seen.add(name)
                per_layer[node.layer] += value.spec.nbytes
    sizes = [size for size in per_layer.values() if size]
    if not sizes:
        return 0
    return min(len(per_layer), max(LAYERS, -(-2 * target.l2_bytes // min(sizes)), WEIGHTS_BYTES // max(sizes)))


def cut(graph: Graph, regions: tuple[Region, ...], layers: int) -> tuple[Graph, tuple[Region, ...]]:
    """Keep the first ``layers`` layers, everything outside of layers, and each further layer that no kept one can stand for.

    What a dropped layer handed to a kept node is replaced by the same region-local value of the last kept instance of
    its region: the numbers differ from the model's, the work does not. Where there is no such instance, or it comes after
    the reader, that layer is kept: the parts of a plain module are numbered like layers and need not repeat.
    """
    numbers = sorted({node.layer for node in graph.nodes if node.layer >= 0})
    wanted = {-1, *numbers[:layers]}
    while True:
        kept = [node for node in graph.nodes if node.layer in wanted]
        kept_names = {node.name for node in kept}
        renamed = _renaming(regions, kept_names)
        missing = _missing(graph, kept, renamed)
        if not missing:
            break
        wanted |= missing - wanted or set(numbers)
    nodes = tuple(_renamed(n, renamed) for n in kept)
    used = {name for n in nodes for name in (*n.inputs, *n.outputs, *n.mutates)}
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    used |= set(outputs)
    values = tuple(v for v in graph.values if v.name in used)
    inputs = tuple(name for name in graph.inputs if name in used)
    short = Graph(name=graph.name, kind=graph.kind, tokens=graph.tokens, values=values, nodes=nodes, inputs=inputs, outputs=outputs)
    return short.verify(), tuple(r for r in (_shortened(region, kept_names, renamed) for region in regions) if r.instances)


def _missing(graph: Graph, kept: list[Node], renamed: dict[str, str]) -> set[int]:
    """The layers whose values a kept node, or the outputs, would read before anything defines them."""
    layer = {name: node.layer for node in graph.nodes for name in node.outputs}
    defined = {value.name for value in graph.values if value.kind is not ValueKind.INTERMEDIATE}
    missing = set()
    for node in kept:
        missing |= {layer[name] for name in (*node.inputs, *node.mutates) if renamed.get(name, name) not in defined}
        defined |= set(node.outputs)
    return missing | {layer[name] for name in graph.outputs if renamed.get(name, name) not in defined}


def _renaming(regions: tuple[Region, ...], kept: set[str]) -> dict[str, str]:
    renamed: dict[str, str] = {}
    for region in regions:
        inside = {out for node in region.graph.nodes for out in node.outputs}
        whole = [i for i in region.instances if all(node in kept for _, node in i.nodes)]
        if not whole:
            continue
        for instance in region.instances:
            if instance not in whole:
                for local, name in instance.values:
                    if local in inside:
                        renamed[name] = whole[-1].value[local]
    return renamed


def _renamed(node: Node, names: dict[str, str]) -> Node:
    if not any(name in names for name in node.inputs):
        return node
    return evolve(node, args=tuple(map_refs(a, names) for a in node.args), kwargs=tuple((k, map_refs(v, names)) for k, v in node.kwargs))


def _shortened(region: Region, kept: set[str], renamed: dict[str, str]) -> Region:
    instances = []
    for instance in region.instances:
        if all(node in kept for _, node in instance.nodes):
            values = tuple((local, renamed.get(name, name)) for local, name in instance.values)
            instances.append(Instance(nodes=instance.nodes, values=values))
    return evolve(region, instances=tuple(instances))
