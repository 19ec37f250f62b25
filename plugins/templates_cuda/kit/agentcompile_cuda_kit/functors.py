"""Pointwise expressions as C++ functors.

An argument is an accumulator (``acc0``), an auxiliary operand (``aux0``) or an elementwise input (``in0``); its number is
the index into the array of the same name that the template hands to the functor. Everything is computed in fp32; ROUND
goes through ``Plan::T`` and back, where a contract rounds.
"""

import math

from agentcompile_core.plugin_api import Dialect, Expression, PointwiseKind, print_expression

INCLUDES = "#include <agentcompile/activation.cuh>\n#include <agentcompile/dtype.cuh>\n"
# Where an expression needs it only, so that the text of every other kernel stays as it is.
ORDERING = "#include <agentcompile/ordering.cuh>\n"


def literal(value: float) -> str:
    """A C++ float literal with exactly the fp32 value of ``value``."""
    if math.isnan(value):
        return "__int_as_float(0x7fc00000)"
    if math.isinf(value):
        return "__int_as_float(0x7f800000)" if value > 0 else "__int_as_float(0xff800000)"
    text = repr(float(value))
    return f"{text}f" if any(c in text for c in ".e") else f"{text}.0f"


CUDA = Dialect(
    name="cuda",
    operations={
        PointwiseKind.ADD: "{0} + {1}",
        PointwiseKind.SUB: "{0} - {1}",
        PointwiseKind.MUL: "{0} * {1}",
        PointwiseKind.DIV: "{0} / {1}",
        PointwiseKind.NEG: "-({0})",
        PointwiseKind.SILU: "ac::silu({0})",
        PointwiseKind.GELU: "ac::gelu({0})",
        PointwiseKind.GELU_TANH: "ac::gelu_tanh({0})",
        PointwiseKind.RELU: "ac::relu({0})",
        PointwiseKind.SIGMOID: "ac::sigmoid({0})",
        PointwiseKind.TANH: "ac::tanh({0})",
        PointwiseKind.EXP: "expf({0})",
        PointwiseKind.RSQRT: "rsqrtf({0})",
        PointwiseKind.ROUND: "ac::round_to<Plan::T>({0})",
        PointwiseKind.ABS: "fabsf({0})",
        PointwiseKind.SQRT: "sqrtf({0})",
        PointwiseKind.LOG: "logf({0})",
        PointwiseKind.LOG1P: "log1pf({0})",
        PointwiseKind.EXPM1: "expm1f({0})",
        PointwiseKind.ERF: "erff({0})",
        PointwiseKind.SIN: "sinf({0})",
        PointwiseKind.COS: "cosf({0})",
        PointwiseKind.FLOOR: "floorf({0})",
        PointwiseKind.MIN: "ac::smaller({0}, {1})",
        PointwiseKind.MAX: "ac::greater({0}, {1})",
        PointwiseKind.GREATER: "({0} > {1} ? 1.0f : 0.0f)",
        PointwiseKind.AT_LEAST: "({0} >= {1} ? 1.0f : 0.0f)",
        PointwiseKind.EQUAL: "({0} == {1} ? 1.0f : 0.0f)",
        PointwiseKind.WHERE: "({0} != 0.0f ? {1} : {2})",
    },
    literal=literal,
    local="const float {name} = {value};",
)


def epilogue_struct(expression: Expression | None, pair: int, aux_count: int) -> str:
    """``struct Epilogue`` with ``static float apply(const float* acc, const float* aux)``.

    ``acc`` has ``pair`` elements and ``aux`` has ``aux_count``; no expression means ``acc[0]``.

    Raises:
        ContractError: the expression reads an argument that the template does not give, or is malformed.
    """
    return _struct(expression or Expression(arguments=("acc0",)), {"acc": pair, "aux": aux_count})


def elementwise_struct(expression: Expression | None, input_count: int) -> str:
    """``struct Epilogue`` with ``static float apply(const float* in)`` over ``input_count`` inputs; none means ``in[0]``.

    Raises:
        ContractError: as ``epilogue_struct``.
    """
    return _struct(expression or Expression(arguments=("in0",)), {"in": input_count})


def _struct(expression: Expression, counts: dict[str, int]) -> str:
    names = {f"{array}{i}": f"{array}[{i}]" for array, count in counts.items() for i in range(count)}
    printed = print_expression(expression, CUDA, names)
    signature = ", ".join(f"const float* {array}" for array in counts)
    # A functor that ignores an array must not warn.
    unused = [f"(void){array};" for array in counts if not any(f"{array}[" in line for line in (*printed.lines, printed.result))]
    body = "\n".join(f"    {line}" for line in (*unused, *printed.lines, f"return {printed.result};"))
    ordered = any(op.kind in (PointwiseKind.MIN, PointwiseKind.MAX) for op in expression.operations)
    return ORDERING * ordered + f"struct Epilogue {{\n  static __device__ __forceinline__ float apply({signature}) {{\n{body}\n  }}\n}};\n"
