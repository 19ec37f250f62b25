"""What must run before what: data, and the order of accesses to whatever is mutated. Node sets are bit masks."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from attrs import frozen

from ..ir.graph import Graph
from .aliasing import memory_roots
from .per_graph import once_per_graph


@frozen(kw_only=True)
class Dependencies:
    """Order between the nodes of one graph. Bit ``i`` of a mask is the node at position ``i``; see ``dependencies``."""

    names: tuple[str, ...]
    index: Mapping[str, int]
    before: tuple[int, ...]  # direct predecessors of each node
    ancestors: tuple[int, ...]
    descendants: tuple[int, ...]

    def mask(self, nodes: Iterable[str]) -> int:
        """The mask of nodes by name. Raises KeyError for a name that the graph does not have."""
        found = 0
        for name in nodes:
            found |= 1 << self.index[name]
        return found

    def members(self, mask: int) -> tuple[str, ...]:
        """Names of the nodes of a mask, in graph order."""
        return tuple(self.names[i] for i in bits(mask))

    def descendants_of(self, mask: int) -> int:
        """Everything that depends on a node of ``mask``."""
        found = 0
        for i in bits(mask):
            found |= self.descendants[i]
        return found

    def is_convex(self, mask: int) -> bool:
        """Whether no path leaves the set and comes back."""
        above = 0
        for i in bits(mask):
            above |= self.ancestors[i]
        return not self.descendants_of(mask) & above & ~mask

    def is_schedulable(self, groups: Sequence[int]) -> bool:
        """Whether disjoint sets can each run as one unit beside the remaining nodes: no circle between them."""
        group_of = {i: g for g, mask in enumerate(groups) for i in bits(mask)}
        units = {**dict(enumerate(groups)), **{-1 - i: 1 << i for i in range(len(self.names)) if i not in group_of}}
        needs = {}
        for unit, mask in units.items():
            earlier = 0
            for i in bits(mask):
                earlier |= self.before[i]
            needs[unit] = {group_of.get(i, -1 - i) for i in bits(earlier & ~mask)}
        done: set[int] = set()
        waiting = sorted(units)
        while waiting:
            ready = [unit for unit in waiting if needs[unit] <= done]
            if not ready:
                return False
            done.update(ready)
            waiting = [unit for unit in waiting if unit not in done]
        return True


def bits(mask: int) -> Iterable[int]:
    """Positions of the bits set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@once_per_graph
def dependencies(graph: Graph) -> Dependencies:
    """The dependencies of a graph's nodes: read after write, write after read and write after write, through aliases."""
    names = tuple(node.name for node in graph.nodes)
    index = {name: i for i, name in enumerate(names)}
    before = _direct(graph, index)
    ancestors = [0] * len(names)
    for i, mask in enumerate(before):
        for p in bits(mask):
            ancestors[i] |= ancestors[p] | 1 << p
    descendants = [0] * len(names)
    for i in reversed(range(len(names))):
        for p in bits(before[i]):
            descendants[p] |= descendants[i] | 1 << i
    return Dependencies(names=names, index=MappingProxyType(index), before=tuple(before), ancestors=tuple(ancestors),
                        descendants=tuple(descendants))


def _direct(graph: Graph, index: Mapping[str, int]) -> list[int]:
    roots = memory_roots(graph) if any(node.mutates for node in graph.nodes) else {v.name: v.name for v in graph.values}
    touched = {roots[name] for node in graph.nodes for name in node.mutates}
    before = [0] * len(index)
    last_write: dict[str, int] = {}
    readers: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        for name in node.inputs:
            producer = graph.producer.get(name)
            if producer is not None:
                before[i] |= 1 << index[producer.name]
            root = roots[name]
            if root in touched:
                if root in last_write:
                    before[i] |= 1 << last_write[root]
                readers[root] = readers.get(root, 0) | 1 << i
        for name in node.mutates:
            root = roots[name]
            before[i] |= readers.pop(root, 0)
            if root in last_write:
                before[i] |= 1 << last_write[root]
            last_write[root] = i
        before[i] &= ~(1 << i)
    return before
