"""One call of a node in the reference: its arguments by name, resolved."""

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen

from ...errors import AgentCompileError
from ...ir.graph import Argument, DType, Graph, Node, Ref, Symbol
from ..interpreter import resolve_symbol
from ..overloads import operator_of
from ..schema import Missing, named, parameters
from .bounded import Bounded, consumed


@frozen(kw_only=True)
class Call:
    """One node with every parameter of its operator's schema by name, defaults included.

    Values are Bounded, symbols torch objects (floating point types as float64), tuples lists. ``depth`` is the reduction
    depth of the kernel on trial, 0 for the framework's.
    """

    graph: Graph
    node: Node
    arguments: dict[str, Any]
    depth: int
    env: dict[str, Bounded]

    def __getitem__(self, name: str) -> Any:
        """The argument called ``name`` in the operator's schema."""
        return self.arguments[name]

    def bounded(self, name: str) -> Bounded:
        """An argument that must be a value.

        Raises:
            AgentCompileError: it is a number.
        """
        found = self.arguments[name]
        if not isinstance(found, Bounded):
            raise AgentCompileError(f"the reference of {self.node.op} needs a tensor for {name}, not {found!r}")
        return found

    @property
    def values(self) -> list[Bounded]:
        """Every value among the arguments, lists included."""
        return [x for given in self.arguments.values() for x in (given if isinstance(given, list) else [given]) if isinstance(x, Bounded)]

    @property
    def dtype(self) -> DType:
        """Element type of the first output."""
        return self.graph.spec(self.node.outputs[0]).dtype

    def length(self, depth: int) -> int:
        """The reduction depth to charge for a reduction of ``depth`` elements."""
        return min(depth, self.depth) if self.depth > 0 else depth

    def run(self, given: Mapping[str, Any]) -> Any:
        """The result of the operator itself on arguments ``given`` by name."""
        known = parameters(self.node.op)
        args = [given[p.name] for p in known if not p.keyword_only]
        return operator_of(self.node.op)(*args, **{p.name: given[p.name] for p in known if p.keyword_only})


def resolved(graph: Graph, node: Node, depth: int, env: dict[str, Bounded], *, as_stored: bool = False) -> Call:
    """The call of ``node`` over the values in ``env``; symbols stand for the device that these are on.

    Arithmetic does not know what it reads where that may have left its type's range (``consumed``); what only moves values
    reads them ``as_stored``.
    """
    device = next((bound.value.device for bound in env.values()), torch.device("cpu"))
    read = env if as_stored else {name: consumed(env[name], graph.spec(name).dtype) for name in node.inputs if name in env}
    given = named(node.op, node.args, dict(node.kwargs))
    arguments: dict[str, Any] = {}
    for parameter in parameters(node.op):
        if parameter.name in given:
            arguments[parameter.name] = _resolve(given[parameter.name], read, device)
        elif not isinstance(parameter.default, Missing):
            arguments[parameter.name] = _resolve(parameter.default, read, device)
    return Call(graph=graph, node=node, arguments=arguments, depth=depth, env=env)


def _resolve(argument: Argument, env: Mapping[str, Bounded], device: torch.device) -> Any:
    if isinstance(argument, Ref):
        return env[argument.value]
    if isinstance(argument, Symbol):
        return resolve_symbol(argument, device, torch.float64)
    if isinstance(argument, tuple):
        return [_resolve(item, env, device) for item in argument]
    return argument


def values_in(x: Any) -> Any:
    """An argument with the value of every Bounded in it."""
    if isinstance(x, Bounded):
        return x.value
    return [values_in(item) for item in x] if isinstance(x, list) else x
