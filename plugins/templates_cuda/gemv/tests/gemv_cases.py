"""Linear matches for the tests of the gemv family, and their fp64 meaning."""

from __future__ import annotations

from agentcompile_core.plugin_api import (
    LINEAR,
    Access,
    DType,
    Expression,
    Match,
    Operand,
    Operation,
    PointwiseKind,
    Role,
    SemanticLabel,
    TensorSpec,
)

ADD_AUX = Expression(arguments=("acc0", "aux0"), operations=(Operation(PointwiseKind.ADD, ("acc0", "aux0")),))
BIAS_RESIDUAL = Expression(
    arguments=("acc0", "aux0", "aux1"),
    operations=(Operation(PointwiseKind.ADD, ("acc0", "aux0")), Operation(PointwiseKind.ADD, (0, "aux1"))),
)


def gate(kind: PointwiseKind) -> Expression:
    """activation(acc0) * acc1."""
    return Expression(arguments=("acc0", "acc1"), operations=(Operation(kind, ("acc0",)), Operation(PointwiseKind.MUL, (0, "acc1"))))


SILU_GATE = gate(PointwiseKind.SILU)
GELU_GATE = gate(PointwiseKind.GELU_TANH)


def linear_match(n: int, k: int, *, dtype: DType = DType.F16, pair: int = 1, norm: str = "none", norm_bias: bool = False,
                 aux: int = 0, epilogue: Expression | None = None, out_dtype: DType | None = None) -> Match:
    """A ``linear`` match as the core's rules make them; ``aux`` operands of [n]."""
    def operand(name: str, role: Role, shape: tuple[int, ...], access: Access = Access.READ, kind: DType = dtype) -> Operand:
        return Operand(name=name, role=role, access=access, values=(name,), spec=TensorSpec(shape=shape, dtype=kind))

    operands = [operand("x", Role.INPUT, (1, 1, k)), operand("weight", Role.WEIGHT, (pair * n, k))]
    if norm != "none":
        operands.append(operand("norm_weight", Role.WEIGHT, (k,)))
    if norm_bias:
        operands.append(operand("norm_bias", Role.WEIGHT, (k,)))
    operands += [operand(f"aux{i}", Role.INPUT if i else Role.WEIGHT, (n,)) for i in range(aux)]
    operands.append(operand("out", Role.OUTPUT, (1, 1, n), Access.WRITE, out_dtype or dtype))
    return Match(kind=LINEAR, label=SemanticLabel.GEMV, nodes=("linear",), operands=tuple(operands), epilogue=epilogue,
                 attributes=(("n", n), ("k", k), ("pair", pair), ("norm", norm), ("norm_eps", 1e-6)))
