"""The graph of a deep model, from that of its first layers: what the last period of them adds is repeated.

A guess, made as exactly as it can be and never relied upon: ``performed.py`` finds out whether it is what the model calls.
"""

import re
from collections.abc import Iterable, Mapping

from attrs import evolve, field, frozen

from ...ir.graph import Argument, Graph, Node, Ref, Value, ValueKind, map_refs
from .between import Unlike
from .importer import layer_of
from .layers import Depth

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?(\.\d+)?$", re.DOTALL)  # add, add_7, split_2.1: as torch.fx numbers its nodes
_DIGITS = re.compile(r"(\d+)")


@frozen
class _Periods:
    """The last two periods of a graph, node for node; ``growth``: how many names of each kind one of them takes.

    ``external``: what is no node's; ``inside``: what the two periods and all behind them define.
    """

    first: tuple[Node, ...]
    last: tuple[Node, ...]
    external: frozenset[str]
    inside: frozenset[str]
    growth: Mapping[str, int] = field(factory=dict)

    def renamed(self, name: str, times: int) -> str:
        """What is called ``name``, so many periods later."""
        base, number, item = _parts(name)
        count = number + times * self.growth.get(base, 0)
        return name if name not in self.inside or count == number else f"{base}_{count}{item}"

    def node(self, index: int, times: int) -> Node:
        """The node at ``index`` of the period that is ``times`` behind the last one."""
        one, other = self.first[index], self.last[index]
        module = _spelled(one.module, other.module, times)
        return evolve(
            other, name=self.renamed(other.name, times), module=module, layer=layer_of(module),
            args=tuple(self._argument(a, b, times) for a, b in zip(one.args, other.args, strict=True)),
            kwargs=tuple((name, self._argument(a, b, times)) for (_, a), (name, b) in zip(one.kwargs, other.kwargs, strict=True)),
            outputs=tuple(self.renamed(name, times) for name in other.outputs),
            mutates=tuple(self._named(a, b, times) for a, b in zip(one.mutates, other.mutates, strict=True)),
        )

    def _named(self, one: str, other: str, times: int) -> str:
        if one in self.external and other in self.external:
            return _spelled(one, other, times)
        return other if one == other else self.renamed(other, times)

    def _argument(self, one: Argument, other: Argument, times: int) -> Argument:
        if isinstance(one, Ref) and isinstance(other, Ref):
            return Ref(self._named(one.value, other.value, times))
        if isinstance(one, tuple) and isinstance(other, tuple):
            return tuple(self._argument(a, b, times) for a, b in zip(one, other, strict=True))
        if type(one) is int and type(other) is int:
            return other + times * (other - one)
        if repr(one) != repr(other):
            raise Unlike(f"{one!r} and {other!r}")
        return other


def deepened(graph: Graph, depth: Depth, given: tuple[Value, ...]) -> Graph:
    """The graph of all layers, over ``given`` (weights, buffers, inputs and states of the deep model, in their order).

    Raises:
        Unlike: the last two periods of layers do not do the same.
        VerificationError: what comes of it is no graph.
    """
    start, periods = _periods(graph, depth)
    behind = start + 2 * len(periods.last)
    renamed = {name: periods.renamed(name, depth.repeats) for name in periods.inside}
    nodes = [*graph.nodes[:behind], *(periods.node(i, t) for t in range(1, depth.repeats + 1) for i in range(len(periods.last)))]
    nodes += [_later(node, renamed) for node in graph.nodes[behind:]]
    layouts = {value.name: value for value in graph.values}
    made = [value for node in graph.nodes[:behind] for value in _made(node, node, layouts)]
    made += [value for new, old in zip(nodes[behind:], _originals(graph, behind, periods, depth), strict=True)
             for value in _made(new, old, layouts)]
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    return evolve(graph, values=(*given, *made), nodes=tuple(nodes), outputs=outputs).verify()


def _originals(graph: Graph, behind: int, periods: _Periods, depth: Depth) -> list[Node]:
    return [*(periods.last * depth.repeats), *graph.nodes[behind:]]


def _made(node: Node, original: Node, layouts: Mapping[str, Value]) -> Iterable[Value]:
    return [evolve(layouts[old], name=new) for new, old in zip(node.outputs, original.outputs, strict=True)]


def _later(node: Node, names: Mapping[str, str]) -> Node:
    return evolve(
        node, name=names.get(node.name, node.name), args=tuple(map_refs(argument, names) for argument in node.args),
        kwargs=tuple((key, map_refs(argument, names)) for key, argument in node.kwargs),
        outputs=tuple(names.get(name, name) for name in node.outputs), mutates=tuple(names.get(name, name) for name in node.mutates),
    )


def _periods(graph: Graph, depth: Depth) -> tuple[int, _Periods]:
    """Where the last period but one begins, and both of them."""
    starts: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        starts.setdefault(depth.layer_of(node.module), index)
    try:
        begin, middle = (starts[depth.shallow - count * depth.period] for count in (2, 1))
    except KeyError:
        raise Unlike("a layer that does nothing") from None
    first, last = graph.nodes[begin:middle], graph.nodes[middle : 2 * middle - begin]
    if [(n.op, len(n.outputs)) for n in first] != [(n.op, len(n.outputs)) for n in last]:
        raise Unlike("two periods of layers that call other operators")
    external = frozenset(value.name for value in graph.values if value.kind is not ValueKind.INTERMEDIATE)
    inside = frozenset(name for node in graph.nodes[begin:] for name in (node.name, *node.outputs))
    growth: dict[str, int] = {}
    for one, other in zip(first, last, strict=True):
        (base, low, _), (same, high, _) = _parts(one.name), _parts(other.name)
        if base != same or growth.setdefault(base, high - low) != high - low:
            raise Unlike(f"{one.name} and {other.name}")
    return begin, _Periods(first, last, external, inside, growth)


def _parts(name: str) -> tuple[str, int, str]:
    found = _NUMBERED.match(name)
    assert found is not None
    return found.group(1), int(found.group(2) or 0), found.group(3) or ""


def _spelled(one: str, other: str, times: int) -> str:
    """A name with numbers, so many steps behind ``other`` as ``other`` is one behind ``one``."""
    if one == other:
        return other
    parts = list(zip(_DIGITS.split(one), _DIGITS.split(other), strict=True))
    if any(a != b for a, b in parts[::2]):
        raise Unlike(f"{one!r} and {other!r}")
    return "".join(b if i % 2 == 0 else str(int(b) + times * (int(b) - int(a))) for i, (a, b) in enumerate(parts))
