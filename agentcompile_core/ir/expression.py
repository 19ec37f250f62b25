"""The closed grammar of fused pointwise code: a straight-line list of named scalar operations in fp32."""

import enum

from attrs import frozen


class PointwiseKind(enum.Enum):
    """Scalar operations that a prologue, an epilogue or an elementwise kernel may hold."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    NEG = "neg"
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    EXP = "exp"
    RSQRT = "rsqrt"
    ROUND = "round"  # round to the element type of the match, where the contract rounds
    ABS = "abs"
    SQRT = "sqrt"
    LOG = "log"
    LOG1P = "log1p"
    EXPM1 = "expm1"
    ERF = "erf"
    SIN = "sin"
    COS = "cos"
    FLOOR = "floor"
    MIN = "min"  # the smaller of two; NaN where either is
    MAX = "max"
    GREATER = "greater"  # 1 where the first is greater than the second, else 0; NaN is neither greater nor equal
    AT_LEAST = "at_least"
    EQUAL = "equal"
    WHERE = "where"  # the second where the first is not 0, else the third

    @property
    def arity(self) -> int:
        """Number of operands."""
        return _ARITY.get(self.value, 1)


_ARITY = {**dict.fromkeys(("add", "sub", "mul", "div", "min", "max", "greater", "at_least", "equal"), 2), "where": 3}


@frozen
class Operation:
    """One operation. An operand is an argument name, the index of an earlier operation, or a literal number."""

    kind: PointwiseKind
    operands: tuple[str | int | float, ...]  # names of arguments, indices of earlier operations, or constants


@frozen(kw_only=True)
class Expression:
    """``arguments`` by name (``acc0``, ``aux0``, ...), then operations in order; the last one is the result (none: argument 0)."""

    arguments: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
