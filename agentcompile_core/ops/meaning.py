"""What an expression computes, on tensors: for whoever needs values that it turns into others, such as the inputs of a trial."""

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ir.expression import Expression, PointwiseKind

K = PointwiseKind
_MEANING: dict[PointwiseKind, Callable[..., Tensor]] = {
    K.ADD: torch.add, K.SUB: torch.sub, K.MUL: torch.mul, K.DIV: torch.div, K.NEG: torch.neg, K.SILU: F.silu, K.GELU: F.gelu,
    K.GELU_TANH: functools.partial(F.gelu, approximate="tanh"), K.RELU: torch.relu, K.SIGMOID: torch.sigmoid, K.TANH: torch.tanh,
    K.EXP: torch.exp, K.RSQRT: torch.rsqrt, K.ROUND: lambda x: x, K.ABS: torch.abs, K.SQRT: torch.sqrt, K.LOG: torch.log,
    K.LOG1P: torch.log1p, K.EXPM1: torch.expm1, K.ERF: torch.erf, K.SIN: torch.sin, K.COS: torch.cos, K.FLOOR: torch.floor,
    K.MIN: torch.minimum, K.MAX: torch.maximum, K.GREATER: lambda a, b: (a > b).to(a.dtype),
    K.AT_LEAST: lambda a, b: (a >= b).to(a.dtype), K.EQUAL: lambda a, b: (a == b).to(a.dtype),
    K.WHERE: lambda c, a, b: torch.where(c != 0, a, b),
}


def evaluate(expression: Expression | None, values: Mapping[str, Tensor]) -> Tensor:
    """The result of ``expression`` (None: its one value as it is) for ``values`` by argument name, floats of one dtype that broadcast.

    Computed in that dtype; what the contract rounds on the way is not rounded.
    """
    if expression is None or not expression.operations:
        return values[expression.arguments[0]] if expression is not None and expression.arguments else next(iter(values.values()))
    like = next(iter(values.values()))
    results: list[Tensor] = []
    for operation in expression.operations:
        results.append(_MEANING[operation.kind](*(_operand(given, values, results, like) for given in operation.operands)))
    return results[-1]


def _operand(given: str | int | float, values: Mapping[str, Tensor], results: list[Tensor], like: Tensor) -> Tensor:
    if isinstance(given, str):
        return values[given]
    return results[given] if type(given) is int else torch.full_like(like, float(given))
