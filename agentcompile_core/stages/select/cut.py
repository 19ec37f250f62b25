"""A shorter model for the chain: the same graph with as many of its layers as fit into two GiB, so that it is judged as it will run."""

from attrs import evolve

from ...ir.graph import Graph, Node, ValueKind, map_refs
from ...ir.region import Instance, Region
from ...ir.target import Target

LAYERS = 8  # at the least: of fewer, what does not repeat (head, embedding) is most of the time
WEIGHTS_BYTES = 2 << 30  # of the kept layers, beside the model's own on the same device


def layers_needed(graph: Graph, target: Target) -> int:
    """How many layers the chain keeps: at least eight, and enough that their weights exceed twice the L2; then as many as two GiB hold."""
    per_layer: dict[int, int] = {}
    seen: set[str] = set()
    for node in graph.nodes:
        for name in node.inputs:
            value = graph.by_name[name]
            if value.kind is ValueKind.WEIGHT and name not in seen and node.layer >= 0:
                seen.add(name)
                per_layer[node.layer] = per_layer.get(node.layer, 0) + value.spec.nbytes
    if not per_layer:
        return 0
    smallest, largest = max(1, min(per_layer.values())), max(1, *per_layer.values())
    return min(len(per_layer), max(LAYERS, -(-2 * target.l2_bytes // smallest), WEIGHTS_BYTES // largest))


def cut(graph: Graph, regions: tuple[Region, ...], layers: int) -> tuple[Graph, tuple[Region, ...]]:
    """Keep the first ``layers`` layers and everything outside of layers.

    What a dropped layer handed to a kept node is replaced by the same region-local value of the last kept instance of
    its region: the numbers differ from the model's, the work does not.
    """
    kept = [n for n in graph.nodes if n.layer < layers]
    kept_names = {n.name for n in kept}
    renamed = _renaming(regions, kept_names)
    nodes = tuple(_renamed(n, renamed) for n in kept)
    used = {name for n in nodes for name in (*n.inputs, *n.outputs, *n.mutates)}
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    used |= set(outputs)
    values = tuple(v for v in graph.values if v.name in used)
    inputs = tuple(name for name in graph.inputs if name in used)
    short = Graph(name=graph.name, kind=graph.kind, tokens=graph.tokens, values=values, nodes=nodes, inputs=inputs, outputs=outputs)
    return short.verify(), tuple(r for r in (_shortened(region, kept_names, renamed) for region in regions) if r.instances)


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
