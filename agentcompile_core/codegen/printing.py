"""Pointwise expressions as text of any language: the only code of a match that is written into a template.

The core knows what an expression means; a Dialect knows how one language spells it. Every result is a local of its own,
so operands are names or literals and no dialect needs rules of precedence.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from attrs import field, frozen

from ..errors import ContractError
from ..ir.expression import Expression, Operation, PointwiseKind


def _read_only(operations: Mapping[PointwiseKind, str]) -> Mapping[PointwiseKind, str]:
    return MappingProxyType(dict(operations))


@frozen(kw_only=True)
class Dialect:
    """How a language spells expressions.

    ``operations`` maps a kind to its text with ``{0}`` and ``{1}`` for the operands, such as ``{0} + {1}`` or ``expf({0})``;
    a kind that is absent cannot be printed. ``literal`` returns a number of the expression's fp32 type with exactly the
    given value. ``local`` is one statement that names a result, with ``{name}`` and ``{value}``. Results are called v0, v1, ...
    """

    name: str
    operations: Mapping[PointwiseKind, str] = field(converter=_read_only)
    literal: Callable[[float], str]
    local: str


@frozen
class Printed:
    """Statements in order, one per operation, and the text that names the result behind them."""

    lines: tuple[str, ...]
    result: str


def print_expression(expression: Expression, dialect: Dialect, names: Mapping[str, str] | None = None) -> Printed:
    """The expression as text of ``dialect``.

    ``names`` spells each argument that the template gives, such as ``{"acc0": "acc[0]"}``; none: arguments as they are called.

    Raises:
        ContractError: the expression reads an argument that is not given, is malformed, or holds what the dialect cannot say.
    """
    arguments = {name: _spelled(name, names) for name in expression.arguments}
    lines = tuple(
        dialect.local.format(name=f"v{i}", value=_operation(i, op, dialect, arguments)) for i, op in enumerate(expression.operations)
    )
    if lines:
        return Printed(lines, f"v{len(lines) - 1}")
    if not expression.arguments:
        raise ContractError("an expression without arguments and operations has no result; give it one argument")
    return Printed((), arguments[expression.arguments[0]])


def _spelled(name: str, names: Mapping[str, str] | None) -> str:
    if names is None:
        return name
    if name not in names:
        raise ContractError(f"the expression reads {name!r}, which the template does not give; it gives {', '.join(names) or 'nothing'}")
    return names[name]


def _operation(index: int, operation: Operation, dialect: Dialect, arguments: Mapping[str, str]) -> str:
    kind = operation.kind
    if len(operation.operands) != kind.arity:
        raise ContractError(f"{kind.value} takes {kind.arity} operands, got {len(operation.operands)}")
    if kind not in dialect.operations:
        known = ", ".join(sorted(k.value for k in dialect.operations))
        raise ContractError(f"the dialect {dialect.name!r} cannot say {kind.value}; it says {known}")
    return dialect.operations[kind].format(*(_operand(index, operand, dialect, arguments) for operand in operation.operands))


def _operand(index: int, operand: str | int | float, dialect: Dialect, arguments: Mapping[str, str]) -> str:
    if isinstance(operand, str):
        if operand not in arguments:
            raise ContractError(f"operation {index} reads {operand!r}, which is not an argument of the expression")
        return arguments[operand]
    if isinstance(operand, int) and not isinstance(operand, bool):
        if not 0 <= operand < index:
            raise ContractError(f"operation {index} reads operation {operand}, which is not before it")
        return f"v{operand}"
    return dialect.literal(float(operand))
