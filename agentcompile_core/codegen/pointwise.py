"""Pointwise expressions as C++ functors: the only code of a match that the compiler writes into a template.

An argument is an accumulator (``acc0``), an auxiliary operand (``aux0``) or an elementwise input (``in0``); its number is
the index into the array of the same name that the template hands to the functor. Everything is computed in fp32; ROUND
goes through ``Plan::T`` and back, where a contract rounds.
"""

import math
import re

import attrs

from ..errors import ContractError
from ..ir.expression import Expression, Operation, PointwiseKind

_BINARY = {PointwiseKind.ADD: "+", PointwiseKind.SUB: "-", PointwiseKind.MUL: "*", PointwiseKind.DIV: "/"}
_CALLS = {
    PointwiseKind.SILU: "ac::silu",
    PointwiseKind.GELU: "ac::gelu",
    PointwiseKind.GELU_TANH: "ac::gelu_tanh",
    PointwiseKind.RELU: "ac::relu",
    PointwiseKind.SIGMOID: "ac::sigmoid",
    PointwiseKind.TANH: "ac::tanh",
    PointwiseKind.EXP: "expf",
    PointwiseKind.RSQRT: "rsqrtf",
    PointwiseKind.ROUND: "ac::round_to<Plan::T>",
}
_ARGUMENT = re.compile(r"(acc|aux|in)(\d+)")
INCLUDES = "#include <agentcompile/activation.cuh>\n#include <agentcompile/dtype.cuh>\n"


def epilogue_struct(expression: Expression | None, pair: int, aux_count: int) -> str:
    """``struct Epilogue`` with ``static float apply(const float* acc, const float* aux)``.

    ``acc`` has ``pair`` elements and ``aux`` has ``aux_count``; no expression means ``acc[0]``.

    Raises:
        ContractError: the expression reads an argument that the template does not give, or is malformed.
    """
    return _struct(expression or Expression(arguments=("acc0",)), {"acc": pair, "aux": aux_count}, ("acc", "aux"))


def elementwise_struct(expression: Expression | None, input_count: int) -> str:
    """``struct Epilogue`` with ``static float apply(const float* in)`` over ``input_count`` inputs; none means ``in[0]``.

    Raises:
        ContractError: as ``epilogue_struct``.
    """
    return _struct(expression or Expression(arguments=("in0",)), {"in": input_count}, ("in",))


def prologue_struct(expression: Expression | None, input_count: int) -> str:
    """As ``elementwise_struct``, called ``Prologue``: applied to elements of the input before the main operation."""
    return elementwise_struct(expression, input_count).replace("struct Epilogue", "struct Prologue", 1)


def simplify(expression: Expression) -> Expression:
    """The same expression without operations that its result does not need, and without arguments that nothing reads.

    Arguments keep their order and their names.
    """
    if not expression.operations:
        return attrs.evolve(expression, arguments=expression.arguments[:1])
    needed = {len(expression.operations) - 1}
    for index in reversed(range(len(expression.operations))):
        if index in needed:
            needed.update(o for o in expression.operations[index].operands if type(o) is int)
    position = {old: new for new, old in enumerate(sorted(needed))}
    operations = tuple(
        Operation(op.kind, tuple(position[o] if type(o) is int else o for o in op.operands))
        for index, op in enumerate(expression.operations) if index in needed
    )
    read = {o for op in operations for o in op.operands if isinstance(o, str)}
    return Expression(arguments=tuple(a for a in expression.arguments if a in read), operations=operations)


def literal(value: float) -> str:
    """A C++ float literal with exactly the fp32 value of ``value``."""
    if math.isnan(value):
        return "__int_as_float(0x7fc00000)"
    if math.isinf(value):
        return "__int_as_float(0x7f800000)" if value > 0 else "__int_as_float(0xff800000)"
    text = repr(float(value))
    return f"{text}f" if any(c in text for c in ".e") else f"{text}.0f"


def _struct(expression: Expression, counts: dict[str, int], arrays: tuple[str, ...]) -> str:
    names = {name: _array_element(name, counts) for name in expression.arguments}
    lines = [f"    const float v{i} = {_operation(i, op, names)};" for i, op in enumerate(expression.operations)]
    if expression.operations:
        result = f"v{len(expression.operations) - 1}"
    elif expression.arguments:
        result = names[expression.arguments[0]]
    else:
        raise ContractError("an expression without arguments and operations has no result; give it one argument")
    signature = ", ".join(f"const float* {array}" for array in arrays)
    # A functor that ignores an array must not warn.
    unused = [f"    (void){array};" for array in arrays if not any(f"{array}[" in line for line in (*lines, result))]
    body = "\n".join([*unused, *lines, f"    return {result};"])
    return f"struct Epilogue {{\n  static __device__ __forceinline__ float apply({signature}) {{\n{body}\n  }}\n}};\n"


def _array_element(name: str, counts: dict[str, int]) -> str:
    found = _ARGUMENT.fullmatch(name)
    if not found or found[1] not in counts:
        raise ContractError(f"expression argument {name!r}: allowed are {', '.join(f'{a}<n>' for a in counts)}")
    array, index = found[1], int(found[2])
    if index >= counts[array]:
        raise ContractError(f"expression argument {name!r}: the template gives {counts[array]} of {array}")
    return f"{array}[{index}]"


def _operation(index: int, operation: Operation, names: dict[str, str]) -> str:
    if len(operation.operands) != operation.kind.arity:
        raise ContractError(f"{operation.kind.value} takes {operation.kind.arity} operands, got {len(operation.operands)}")
    operands = [_operand(index, operand, names) for operand in operation.operands]
    if operation.kind in _BINARY:
        return f"{operands[0]} {_BINARY[operation.kind]} {operands[1]}"
    if operation.kind is PointwiseKind.NEG:
        return f"-({operands[0]})"
    return f"{_CALLS[operation.kind]}({operands[0]})"


def _operand(index: int, operand: str | int | float, names: dict[str, str]) -> str:
    if isinstance(operand, str):
        if operand not in names:
            raise ContractError(f"operation {index} reads {operand!r}, which is not an argument of the expression")
        return names[operand]
    if isinstance(operand, int) and not isinstance(operand, bool):
        if not 0 <= operand < index:
            raise ContractError(f"operation {index} reads operation {operand}, which is not before it")
        return f"v{operand}"
    return literal(float(operand))
