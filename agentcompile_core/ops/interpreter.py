"""Runs a Graph, or some of its nodes, with torch: the fallback of every step, and the oracle.

``compile_nodes`` resolves everything that does not change between runs; a ``Prepared`` may be captured in a graph of the device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..ir.graph import Argument, Graph, Node, Ref, Symbol
from .bodies import Bodies, with_bodies
from .gated_products import with_gated_products
from .joint_products import Memory, with_joint_products
from .operator_names import LINEAR
from .overloads import operator_of
from .states_in_place import with_states_in_place


def resolve_symbol(symbol: Symbol, device: str | torch.device, dtype_override: torch.dtype | None = None) -> Any:
    """The torch object that ``symbol`` stands for; the device is always ``device``, a float type is overridden.

    Raises:
        UsageError: it stands for nothing known.
    """
    if symbol.kind == "device":
        return torch.device(device)
    if symbol.kind == "float" and symbol.name in ("inf", "-inf", "nan"):
        return float(symbol.name)
    found = getattr(torch, symbol.name, None)
    if symbol.kind == "dtype" and isinstance(found, torch.dtype):
        return dtype_override if dtype_override is not None and found.is_floating_point else found
    if symbol.kind == "layout" and isinstance(found, torch.layout):
        return found
    if symbol.kind == "memory_format" and isinstance(found, torch.memory_format):
        return found
    raise UsageError(f"a node argument of kind {symbol.kind!r} called {symbol.name!r} is unknown; recompile with this version")


class _Call:
    """One node with everything resolved: a template of its arguments and where values go in and come out."""

    __slots__ = ("args", "frees", "keywords", "kwargs", "lists", "operator", "outputs", "single", "slots")

    def __init__(self, node: Node, slots: Mapping[str, int], resolve: Callable[[Symbol], Any],
                 operator: Callable[..., Any] | None = None) -> None:
        self.operator = operator_of(node.op)
        self.args: list[Any] = []
        self.slots: list[tuple[int, int]] = []
        self.lists: list[tuple[int, Callable[[list[Any]], Any]]] = []
        self.keywords: list[tuple[str, Callable[[list[Any]], Any]]] = []
        self.kwargs: dict[str, Any] = {}
        for index, argument in enumerate(node.args):
            self.args.append(None)
            if isinstance(argument, Ref):
                self.slots.append((index, slots[argument.value]))
            elif _has_ref(argument):
                self.lists.append((index, _builder(argument, slots, resolve)))
            else:
                self.args[index] = _constant(argument, resolve)
        for name, argument in node.kwargs:
            if _has_ref(argument):
                self.keywords.append((name, _builder(argument, slots, resolve)))
            else:
                self.kwargs[name] = _constant(argument, resolve)
        self.outputs = [slots[name] for name in node.outputs]
        self.single = len(node.outputs) == 1 and not _returns_list(self.operator)
        self.operator = operator or self.operator
        self.frees: list[int] = []

    def run(self, values: list[Any]) -> None:
        args = self.args.copy()
        for index, slot in self.slots:
            args[index] = values[slot]
        for index, build in self.lists:
            args[index] = build(values)
        kwargs = self.kwargs
        if self.keywords:
            kwargs = {**kwargs, **{name: build(values) for name, build in self.keywords}}
        result = self.operator(*args, **kwargs)
        if self.single:
            values[self.outputs[0]] = result
        elif self.outputs:
            for slot, item in zip(self.outputs, result, strict=True):
                values[slot] = item
        for slot in self.frees:
            values[slot] = None


class Prepared:
    """Nodes ready to run. ``inputs`` are the names read from outside, ``outputs`` what ``run`` returns. Not thread-safe."""

    def __init__(
        self, graph: Graph, nodes: Sequence[Node], outputs: Sequence[str], device: str | torch.device,
        dtype_override: torch.dtype | None, bodies: Bodies | None = None, memory: Memory | None = None,
    ) -> None:
        operators: dict[str, Callable[..., Any]] = {}
        self.written: frozenset[str] = frozenset()
        gated: dict[str, Callable[..., Any]] = {}
        if memory is not None and memory.joins and bodies is not None:
            nodes, gated = with_gated_products(graph, nodes, outputs, bodies, memory, operator_of)
        if memory is not None and memory.joins:
            product = bodies(LINEAR) if bodies is not None else None
            nodes, operators, self.written = with_joint_products(graph, nodes, outputs, memory, product)
        if bodies is not None:
            nodes, advanced, placed = with_states_in_place(graph, nodes, outputs, bodies, memory.results if memory else {}, operator_of)
            nodes, others = with_bodies(graph, nodes, outputs, bodies, operator_of, {**gated, **advanced})
            operators = {**others, **operators, **gated, **advanced}
            self.written |= placed
        inside = {name for node in nodes for name in node.outputs}
        reads = dict.fromkeys(name for node in nodes for name in (*node.inputs, *node.mutates) if name not in inside)
        passed = [name for name in outputs if name not in inside]
        self.inputs: tuple[str, ...] = tuple(dict.fromkeys((*reads, *passed)))
        self.outputs: tuple[str, ...] = tuple(outputs)
        self.mutates: tuple[str, ...] = tuple(dict.fromkeys(n for node in nodes for n in node.mutates if n not in inside))
        slots = {name: i for i, name in enumerate((*self.inputs, *(o for node in nodes for o in node.outputs)))}
        resolve = partial(resolve_symbol, device=device, dtype_override=dtype_override)
        self._calls = [_Call(node, slots, resolve, operators.get(node.name)) for node in nodes]
        self._slots = slots
        self._results = [slots[name] for name in outputs]
        self._override = dtype_override
        # What every run needs, prepared once: calls of a module wait for Python.
        self._runs = tuple(call.run for call in self._calls)
        self._empty = (None,) * (len(slots) - len(self.inputs))
        self._named_results = tuple(zip(self.outputs, self._results, strict=True))
        self._free_after_last_use(nodes)

    def _free_after_last_use(self, nodes: Sequence[Node]) -> None:
        kept = {*self.inputs, *self.outputs}
        last: dict[str, int] = {}
        for index, node in enumerate(nodes):
            for name in (*node.inputs, *node.outputs):
                last[name] = index
        for name, index in last.items():
            if name not in kept:
                self._calls[index].frees.append(self._slots[name])

    def bind(self, env: Mapping[str, Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        """Fix the tensors read from outside; the result runs all nodes and returns ``outputs`` in order.

        Raises:
            UsageError: ``env`` lacks a value that the nodes read.
        """
        missing = [name for name in self.inputs if name not in env]
        if missing:
            raise UsageError(f"the environment lacks {', '.join(missing[:5])}, which the graph reads")
        template: list[Any] = [self._promoted(env[name]) for name in self.inputs]
        template += [None] * (len(self._slots) - len(template))
        calls, results = [call.run for call in self._calls], self._results

        def run() -> tuple[Tensor, ...]:
            values = template.copy()
            with torch.no_grad():
                for call in calls:
                    call(values)
            return tuple(values[slot] for slot in results)

        return run

    def run(self, env: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run once over ``env``; return ``outputs`` by name.

        With a type override, states that had to be promoted are changed in a copy; the copy is returned beside the outputs.
        """
        if self._override is None:
            try:
                values: list[Any] = [env[name] for name in self.inputs]
            except KeyError:
                self.bind(env)  # says what is missing
                raise
            values += self._empty
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self._run_calls(values)
            else:
                self._run_calls(values)
            return {name: values[slot] for name, slot in self._named_results}
        env = {**env, **{name: self._promoted(env[name]) for name in self.mutates if name in env}}
        found = dict(zip(self.outputs, self.bind(env)(), strict=True))
        return {**found, **{name: env[name] for name in self.mutates}}

    def _run_calls(self, values: list[Any]) -> None:
        for run in self._runs:
            run(values)

    def _promoted(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._override) if self._override is not None and tensor.is_floating_point() else tensor


def compile_nodes(
    graph: Graph,
    nodes: Iterable[str | Node] | None = None,
    *,
    device: str | torch.device,
    outputs: Sequence[str] | None = None,
    dtype_override: torch.dtype | None = None,
    bodies: Bodies | None = None,
    memory: Memory | None = None,
) -> Prepared:
    """Resolve ``nodes`` of ``graph`` (default: all) for repeated runs on ``device``.

    ``outputs`` defaults to the graph's outputs for all nodes, else to every value that is read outside the nodes or
    is an output of the graph. ``dtype_override`` computes every floating point tensor in that type. ``bodies``: what computes some
    operators in their place, see ``with_bodies``. ``memory``: where weights lie, so that products with some that lie behind each other
    are one, and where the caller puts outputs: ``written`` of what is returned says which of them are there, the others may be slices.

    Raises:
        UsageError: an operator or argument is unknown.
    """
    chosen = _nodes_of(graph, nodes)
    if outputs is None:
        outputs = graph.outputs if nodes is None else _visible_outputs(graph, chosen)
    return Prepared(graph, chosen, outputs, device, dtype_override, bodies, memory)


def _nodes_of(graph: Graph, nodes: Iterable[str | Node] | None) -> list[Node]:
    if nodes is None:
        return list(graph.nodes)
    return [graph.node_by_name[node] if isinstance(node, str) else node for node in nodes]


def _visible_outputs(graph: Graph, nodes: Sequence[Node]) -> list[str]:
    names = {node.name for node in nodes}
    return [
        out for node in nodes for out in node.outputs
        if out in graph.outputs or any(user.name not in names for user in graph.users.get(out, ()))
    ]


def _has_ref(argument: Argument) -> bool:
    if isinstance(argument, tuple):
        return any(_has_ref(item) for item in argument)
    return isinstance(argument, Ref)


def _constant(argument: Argument, resolve: Callable[[Symbol], Any]) -> Any:
    if isinstance(argument, Symbol):
        return resolve(argument)
    if isinstance(argument, tuple):
        return [_constant(item, resolve) for item in argument]
    return argument


def _builder(argument: Argument, slots: Mapping[str, int], resolve: Callable[[Symbol], Any]) -> Callable[[list[Any]], Any]:
    """A function from the slots' values to the argument, for lists that hold values."""
    if isinstance(argument, Ref):
        slot = slots[argument.value]
        return lambda values: values[slot]
    if isinstance(argument, tuple):
        parts = [_builder(item, slots, resolve) for item in argument]
        return lambda values: [part(values) for part in parts]
    constant = _constant(argument, resolve)
    return lambda _: constant


@cache
def _returns_list(operator: Any) -> bool:
    returns = operator._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)
