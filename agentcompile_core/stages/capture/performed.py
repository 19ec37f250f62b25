"""What a graph calls when it is run, on the same tensors as its model: where both call the same, both compute the same.

Neither how the graph was made nor what it looks like has a part in it. Its nodes are run one by one on tensors of no memory,
everything that reaches torch's dispatcher is written down, and so it is with the model (``reached.py``). Calls of which nothing is
made are left out on both sides, as they are where a trace is imported.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...ir.graph import Argument, Graph, Node, Ref, Symbol, TensorSpec, refs_of
from ...ops.interpreter import resolve_symbol
from ...ops.overloads import operator_of
from ...ops.schema import shared_arguments
from .between import Unlike
from .importer import spec_of
from .reached import TENSOR, Call
from .storages import storage_of

_HANDING_ON = ("aten.detach.default", "aten.alias.default")  # the same memory in the same layout


def perform(graph: Graph, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Run every node of ``graph`` over ``tensors``, given by name; what it returns.

    Raises:
        Unlike: a value is not what the graph says of it, or a node writes or hands on another tensor than it says.
    """
    values = dict(tensors)
    for node in graph.nodes:
        _run(graph, node, values)
    return tuple(values[name] for name in graph.outputs)


def called(node: Node, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """What one node makes of ``values``, given by name, which have no memory; whatever torch raises is raised."""
    operator: Any = operator_of(node.op)
    result = operator(*(_given(a, values) for a in node.args), **{name: _given(a, values) for name, a in node.kwargs})
    return () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)


def _run(graph: Graph, node: Node, values: dict[str, Tensor]) -> None:
    made = called(node, values)
    if len(made) != len(node.outputs) or node.mutates != _written(operator_of(node.op), node):
        raise Unlike(f"{node.name} returns {len(made)} values or writes other ones")
    for name, tensor in zip(node.outputs, made, strict=True):
        if _layout(spec_of(tensor)) != _layout(graph.spec(name)):
            raise Unlike(f"{name} is {spec_of(tensor)}")
        values[name] = tensor
    _check_memory(node, made, values)


def _layout(spec: TensorSpec) -> tuple[Any, ...]:
    """Shape, type and where each element lies: what is one long has a stride that says nothing, and traces choose another one."""
    strides = spec.strides or [math.prod(spec.shape[i + 1 :]) for i in range(len(spec.shape))]
    return spec.shape, spec.dtype, [stride for extent, stride in zip(spec.shape, strides, strict=True) if extent > 1 and spec.numel]


def _written(operator: Any, node: Node) -> tuple[str, ...]:
    named, found = dict(node.kwargs), []
    for index, argument in enumerate(operator._schema.arguments):
        given = node.args[index] if index < len(node.args) else named.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, Ref):
            found.append(given.value)
    return tuple(found)


def _check_memory(node: Node, made: tuple[Tensor, ...], values: Mapping[str, Tensor]) -> None:
    """As where a trace is imported: no result lies in the memory of an operand unless the operator is known for it."""
    if node.mutates:
        return
    lying = {storage_of(tensor) for tensor in made if tensor.numel()}
    found = {name for name in node.inputs if values[name].numel() and storage_of(values[name]) in lying}
    if found and not found <= {name for given in shared_arguments(node) for name in refs_of(given)}:
        raise Unlike(f"{node.name} returns the memory of an operand")


def _given(argument: Argument, values: Mapping[str, Tensor]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.value]
    if isinstance(argument, tuple):
        return [_given(item, values) for item in argument]
    return resolve_symbol(argument, "meta") if isinstance(argument, Symbol) else argument


def said_alike(one: tuple[Call, ...], other: tuple[Call, ...]) -> bool:
    """Whether two runs over the same tensors computed, wrote and returned the same."""
    return repr(_needed(one)) == repr(_needed(other))


def _needed(calls: tuple[Call, ...]) -> list[Any]:
    """Calls that a result or a write is made from, in their order, with tensors numbered as they come up in these.

    What was given keeps its number. What hands a tensor on is left out: shape, strides and offset are told wherever it is used.
    """
    handed: dict[int, int] = {}
    needed: set[int] = set()
    kept = []
    for op, args, _, made, _ in calls:
        if op in _HANDING_ON:
            if args[0][-1] is not None:
                raise Unlike("a literal is handed on, and what it holds is not told where it is used")
            handed[made[1]] = handed.get(args[0][1], args[0][1])
    for call in reversed(calls):
        op, args, kwargs, made, effect = call
        if op not in _HANDING_ON and (effect or any(handed.get(one, one) in needed for one in _numbers(made))):
            needed.update(handed.get(one, one) for one in _numbers((args, kwargs)))
            kept.append(call)
    known: dict[int, int] = {}
    return [_renumbered(call, handed, known) for call in reversed(kept)]


def _numbers(said: Any) -> list[int]:
    if not isinstance(said, tuple):
        return []
    if said and said[0] == TENSOR:
        return [said[1]]
    return [number for item in said for number in _numbers(item)]


def _renumbered(said: Any, handed: dict[int, int], known: dict[int, int]) -> Any:
    if not isinstance(said, tuple):
        return said
    if said and said[0] == TENSOR:
        number: int = said[1]
        number = handed.get(number, number)
        return (TENSOR, number if number < 0 else known.setdefault(number, len(known)), *said[2:])
    return tuple([_renumbered(item, handed, known) for item in said])
