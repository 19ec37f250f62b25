"""Arguments of nodes by the schema of their operator: one canonical form, one way to read an argument.

The canonical form of a call: every argument before the schema's keyword-only marker is positional, trailing ones that equal
their defaults are left out, defaults in between are written out; keyword-only ones follow by name in schema order, without
those that equal their defaults. A number for a float parameter is a float, one for a list of integers is a list.
``add.Scalar(x, 3, 1)`` and ``add.Scalar(x, other=3)`` are ``add.Scalar(x, 3)``.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from attrs import evolve, frozen

from ..errors import VerificationError
from ..ir.graph import Argument, Graph, GraphSet, Node


@frozen
class Missing:
    """The default of a parameter that has none."""


MISSING = Missing()
_PLAIN = (type(None), bool, int, float, str)


@frozen(kw_only=True)
class Parameter:
    """One parameter of an operator; ``length`` is what one number for a list of integers stands for (0: no such list)."""

    name: str
    keyword_only: bool
    default: Argument | Missing
    is_float: bool
    length: int

    def canonical(self, given: Argument) -> Argument:
        """``given`` in the type that the schema asks for."""
        if type(given) is int and self.is_float:
            return float(given)
        return (given,) * self.length if type(given) is int and self.length else given

    def is_default(self, given: Argument) -> bool:
        """Whether ``given`` is the default, in type and value."""
        return type(given) is type(self.default) and given == self.default


@cache
def parameters(op: str) -> tuple[Parameter, ...]:
    """The parameters of the overload ``op`` (``aten.add.Tensor``), in schema order.

    Raises:
        UsageError: the operator is unknown.
    """
    from .overloads import operator_of  # here: what plugins see needs no torch until an operator is read

    schema: Any = operator_of(op)._schema  # type: ignore[attr-defined]
    return tuple(_parameter(argument) for argument in schema.arguments)


def _parameter(argument: Any) -> Parameter:
    kind = str(argument.type).removeprefix("Optional[").rstrip("]")
    default = _plain(argument.default_value) if argument.has_default_value() else MISSING
    length = (argument.N or 0) if kind == "List[int" else 0
    return Parameter(name=argument.name, keyword_only=argument.kwarg_only, default=default, is_float=kind == "float", length=length)


def _plain(default: Any) -> Argument | Missing:
    if isinstance(default, (list, tuple)):
        items = tuple(_plain(item) for item in default)
        return MISSING if any(isinstance(item, Missing) for item in items) else items  # type: ignore[return-value]
    return default if isinstance(default, _PLAIN) else MISSING


def named(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a call of ``op`` is given, by parameter name in schema order; parameters that are not given are absent.

    Raises:
        VerificationError: the call has arguments that the operator does not have, one twice, or lacks one.
    """
    known = parameters(op)
    positional = [p.name for p in known if not p.keyword_only]
    if len(args) > len(positional):
        raise VerificationError(f"{op} is given {len(args)} positional arguments; it takes {len(positional)}")
    given = dict(zip(positional, args, strict=False))
    for name, value in kwargs.items():
        if name in given or all(name != p.name for p in known):
            raise VerificationError(f"{op} is given {name!r} {'twice' if name in given else 'and has no such parameter'}")
        given[name] = value
    lacking = [p.name for p in known if p.name not in given and isinstance(p.default, Missing)]
    if lacking:
        raise VerificationError(f"a call of {op} lacks {', '.join(lacking)}")
    return {p.name: given[p.name] for p in known if p.name in given}


Call = tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]


def canonical_call(op: str, args: Sequence[Argument], kwargs: Mapping[str, Argument]) -> Call:
    """Positional and keyword arguments of a call of ``op`` in canonical form.

    Raises:
        UsageError: the operator is unknown.
        VerificationError: the call does not fit its schema.
    """
    given = named(op, args, kwargs)
    positional: list[Argument] = []
    keywords: list[tuple[str, Argument]] = []
    kept = 0
    for parameter in parameters(op):
        value = parameter.canonical(given[parameter.name]) if parameter.name in given else _default(parameter)
        is_default = parameter.is_default(value)
        if not parameter.keyword_only:
            positional.append(value)
            kept = kept if is_default else len(positional)
        elif not is_default:
            keywords.append((parameter.name, value))
    return tuple(positional[:kept]), tuple(keywords)


def _default(parameter: Parameter) -> Argument:
    assert not isinstance(parameter.default, Missing)  # ``named`` refused the call
    return parameter.default


def canonical(node: Node) -> Node:
    """``node`` with its arguments in canonical form; raises what ``canonical_call`` raises."""
    args, kwargs = canonical_call(node.op, node.args, dict(node.kwargs))
    return evolve(node, args=args, kwargs=kwargs)


def with_argument(node: Node, name: str, value: Argument) -> Node:
    """``node`` with one argument replaced, in canonical form."""
    given = named(node.op, node.args, dict(node.kwargs)) | {name: value}
    args, kwargs = canonical_call(node.op, (), given)
    return evolve(node, args=args, kwargs=kwargs)


def argument(node: Node, name: str) -> Argument:
    """The argument called ``name`` in the schema of the node's operator, or the schema's default.

    Raises:
        VerificationError: the operator has no such parameter, or the node lacks it.
    """
    position = 0
    for parameter in parameters(node.op):
        if parameter.name == name:
            if not parameter.keyword_only and position < len(node.args):
                return node.args[position]
            found = dict(node.kwargs).get(name, parameter.default)
            if isinstance(found, Missing):
                raise VerificationError(f"node {node.name} ({node.op}) lacks its argument {name!r}")
            return found
        position += not parameter.keyword_only
    raise VerificationError(f"{node.op} has no parameter {name!r}")


# Operators that may hand an operand on as it is, or a view of it, without their schema saying so.
_HANDS_ON = frozenset({
    "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout", "type_as", "broadcast_tensors", "meshgrid",
    "atleast_1d", "atleast_2d", "atleast_3d", "numpy_T", "_unsafe_view", "rrelu", "sum_to_size", "conj_physical", "unsafe_chunk",
    "unsafe_split", "unsafe_split_with_sizes", "lift",
})
# The same, where their list of tensors holds one only.
_HANDS_ON_ALONE = {"einsum": "tensors", "cartesian_prod": "tensors", "chain_matmul": "matrices"}


def shared_arguments(node: Node) -> tuple[Argument, ...]:
    """The arguments whose memory the results of a call may share: views, operands that are handed on, writes in place."""
    if not node.outputs:
        return ()
    alone = _HANDS_ON_ALONE.get(node.op.split(".")[1])
    if alone is not None:
        given = argument(node, alone)
        return (given,) if isinstance(given, tuple) and len(given) == 1 else ()
    return tuple(argument(node, name) for name in _shared(node.op))


@cache
def _shared(op: str) -> tuple[str, ...]:
    from .overloads import operator_of

    schema: Any = operator_of(op)._schema  # type: ignore[attr-defined]
    if op.split(".")[1] in _HANDS_ON:
        return tuple(a.name for a in schema.arguments if "Tensor" in str(a.type))
    if all(one.alias_info is None for one in schema.returns):
        return ()
    return tuple(a.name for a in schema.arguments if a.alias_info is not None)


def verify_canonical(graphs: GraphSet) -> GraphSet:
    """Check that every node of every graph is in canonical form; return ``graphs``.

    Raises:
        UsageError: an operator is unknown.
        VerificationError: a node is not canonical; the message names it.
    """
    for graph in graphs.graphs:
        for node in graph.nodes:
            _verify(graph, node)
    return graphs


def _verify(graph: Graph, node: Node) -> None:
    try:
        same = _same((node.args, node.kwargs), canonical_call(node.op, node.args, dict(node.kwargs)))
    except VerificationError as exc:
        raise VerificationError(f"graph {graph.name}: node {node.name}: {exc}") from None
    if not same:
        raise VerificationError(
            f"graph {graph.name}: the arguments of node {node.name} ({node.op}) are not in canonical form; "
            "build nodes with agentcompile_core.ops.schema.canonical"
        )


def _same(one: Any, other: Any) -> bool:
    """Equality that tells 1, 1.0 and True apart."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other
