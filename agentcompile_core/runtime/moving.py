"""What lies in its caller's memory: inputs and results of a bound program that have other addresses at every call."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

from ..ir.graph import Graph, ValueKind
from ..ir.region import Role
from ..ops.aliasing import alias_roots, memory_roots
from .moving_launches import MovingLaunch
from .program import Segment

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 16  # kernels read and write that much at a time


def own_results(graph: Graph, segments: Sequence[Segment], fixed: Sequence[str]) -> tuple[str, ...]:
    """Memory of the graph's outputs that steps write and that nobody else has a part in: a call can give each a tensor of its own.

    ``fixed`` values, and those that lie side by side with others, keep the place that was planned for them.
    """
    roots, memory = alias_roots(graph), memory_roots(graph)
    beside = {roots[v] for s in segments for _, values in s.operands if len(values) > 1 for v in values}
    made = {roots[v] for s in segments for v in s.values((Role.OUTPUT,))}
    wanted = dict.fromkeys(roots[output] for output in graph.outputs)
    return tuple(root for root in wanted if root in made and root not in beside and root not in fixed and memory[root] == root
                 and graph.kind_of(root) is ValueKind.INTERMEDIATE)


def late_values(graph: Graph, segments: Sequence[Segment], fixed: Sequence[str]) -> frozenset[str]:
    """Memory that framework operators make anew at every call, which steps can read where it is then; ``fixed`` values keep their place.

    None where anything is written in place: what shares memory with what is not known before the call.
    """
    if any(node.mutates for node in graph.nodes):
        return frozenset()
    roots = alias_roots(graph)
    beside = {roots[v] for s in segments for _, values in s.operands if len(values) > 1 for v in values}
    made = {o for s in segments if s.step is None for name in s.nodes for o in graph.node_by_name[name].outputs}
    return frozenset(name for name in made if roots[name] == name and name not in beside and name not in fixed)


def lies_as(tensor: "torch.Tensor", planned: "torch.Tensor") -> bool:
    """Whether a step that was planned to read ``planned`` can read ``tensor`` instead, where it is."""
    return (tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0 and tensor.dtype is planned.dtype
            and tensor.shape == planned.shape and tensor.device == planned.device)


class Moving:
    """Puts a call's tensors in their places before a run, and forgets them behind it.

    ``launches``: the whole program, in order, where it is launches and nothing else; else None.

    Args:
        graph: what the program computes.
        results: see ``own_results``.
        environment: tensors by value, as the program's segments read them.
        planned: tensors of values that steps read or write.
    """

    def __init__(self, graph: Graph, results: tuple[str, ...], environment: "MutableMapping[str, torch.Tensor]",
                 planned: "MutableMapping[str, torch.Tensor]") -> None:
        self.results, self._graph = results, graph
        self._passing: tuple[str, ...] = ()
        self._names = (*graph.inputs, *results)
        self.launches: tuple[MovingLaunch, ...] | None = None
        self._environment, self._planned = environment, planned
        roots = alias_roots(graph)
        self._views = {name: tuple((v.name, v.spec.shape) for v in graph.values if roots[v.name] == name and v.name != name)
                       for name in self._names}

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def to(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        """Put one contiguous tensor for every input and for each of ``results`` in its place."""
        for name in self._names:
            tensor = self._environment[name] = tensors[name]
            for view, shape in self._views[name]:
                self._environment[view] = tensor.view(shape)
        for name in self.results:
            self._planned[name] = tensors[name]

    def begin(self) -> None:
        """What the environment holds now, besides inputs and results, stays in it; whatever a run adds is forgotten behind it."""
        made = (output for node in self._graph.nodes for output in node.outputs)
        passing = (*self._names, *(view for views in self._views.values() for view, _ in views))
        self._passing = tuple(dict.fromkeys((*passing, *(name for name in made if name not in self._environment))))
        self.forget()

    def forget(self) -> None:
        """Hold no tensor of a call any longer."""
        for name in self._passing:
            self._environment.pop(name, None)
        for name in self.results:
            self._planned.pop(name, None)
