"""What each pointwise operator is in the closed grammar of expressions: overload by overload, argument by argument."""

from collections.abc import Callable

from attrs import define, field

from ..ir.expression import PointwiseKind
from ..ir.graph import Argument, DType, Node, Ref
from .losses import LOSSES, plus_softly, write_loss
from .region_view import RegionView
from .schema import argument

K = PointwiseKind
Parts = tuple[tuple[PointwiseKind, tuple[Argument, ...]], ...]

CASTS = (
    "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten._to_copy.default", "aten.type_as.default",
)
COPIES = ("aten.contiguous.default", "aten.clone.default")
_BINARY = {"add": K.ADD, "sub": K.SUB, "mul": K.MUL, "multiply": K.MUL, "div": K.DIV, "divide": K.DIV}
_BINARY_OPS = {f"aten.{name}.{overload}": kind for name, kind in _BINARY.items() for overload in ("Tensor", "Scalar")}
_BINARY_OPS |= {"aten.minimum.default": K.MIN, "aten.maximum.default": K.MAX, "aten.min.other": K.MIN, "aten.max.other": K.MAX}
_SCALED = ("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar")  # their ``alpha`` multiplies ``other``
_REVERSED = ("aten.rsub.Tensor", "aten.rsub.Scalar")  # other - alpha * self
_ROUNDING = {f"aten.{name}.{overload}" for name in ("div", "divide") for overload in ("Tensor_mode", "Scalar_mode")}
_COMPARISONS = {f"aten.{name}.{overload}": what for overload in ("Tensor", "Scalar") for name, what in {
    "gt": (K.GREATER, False), "ge": (K.AT_LEAST, False), "lt": (K.GREATER, True), "le": (K.AT_LEAST, True), "eq": (K.EQUAL, False),
}.items()}  # kind, and whether the operands change places
_SAME_NAME = (K.NEG, K.SILU, K.RELU, K.SIGMOID, K.TANH, K.EXP, K.RSQRT, K.ABS, K.SQRT, K.LOG, K.LOG1P, K.EXPM1, K.ERF, K.SIN, K.COS,
              K.FLOOR)
_UNARY = {f"aten.{kind.value}.default": kind for kind in _SAME_NAME}
_GELU = {"none": K.GELU, "tanh": K.GELU_TANH}
SMOOTH_FROM = 17.0  # softplus is its operand from here on in float32: a threshold below would be a step


@define
class _Steps:
    """Operations one after the other; each result is named for those behind it."""

    made: list[tuple[PointwiseKind, tuple[Argument, ...]]] = field(factory=list)

    def add(self, kind: PointwiseKind, *operands: Argument) -> Ref:
        self.made.append((kind, operands))
        return Ref(f"#{len(self.made) - 1}")

    @property
    def parts(self) -> Parts:
        return tuple(self.made)


def translate(view: RegionView, node: Node) -> Parts | None:
    """The scalar operations of a node over its own arguments; None if it is outside the grammar.

    Only overloads that are listed here by name, and of those only calls whose every argument the operations account for.
    A ``Ref("#2")`` argument means the result of the third of these operations; no operations at all mean the identity.
    """
    if node.op in CASTS:
        return _cast(view, node)
    if node.op in COPIES:
        return () if view.graph.spec(node.outputs[0]).strides == () else None
    if node.op in _UNARY:
        return ((_UNARY[node.op], (argument(node, "self"),)),)
    if node.op in _WRITTEN_OUT:
        steps = _Steps()
        return steps.parts if _WRITTEN_OUT[node.op](steps, node) else None
    return _binary(node)


def is_identity(view: RegionView, node: Node) -> bool:
    """Whether a node of the grammar makes the numbers of its operand anew."""
    return translate(view, node) == ()


def rounds(view: RegionView, node: Node) -> bool:
    """Whether a node is a cast that rounds."""
    return node.op in CASTS and bool(_cast(view, node))


def _binary(node: Node) -> Parts | None:
    kind = _BINARY_OPS.get(node.op)
    if node.op in _SCALED or node.op in _REVERSED:
        return _scaled(node)
    if node.op in _ROUNDING:
        kind = K.DIV if argument(node, "rounding_mode") is None else None
    if kind is not None:
        return ((kind, (argument(node, "self"), argument(node, "other"))),)
    if node.op in _COMPARISONS:
        compared, swapped = _COMPARISONS[node.op]
        pair = argument(node, "self"), argument(node, "other")
        return ((compared, pair[::-1] if swapped else pair),)
    return None


def _scaled(node: Node) -> Parts | None:
    """A sum or difference whose second operand ``alpha`` multiplies."""
    steps, alpha = _Steps(), argument(node, "alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        return None
    first, second = argument(node, "self"), argument(node, "other")
    if node.op in _REVERSED:
        first, second = second, first
    scaled = second if alpha == 1 else steps.add(K.MUL, second, float(alpha))
    steps.add(K.ADD if ".add." in node.op else K.SUB, first, scaled)
    return steps.parts


def _cast(view: RegionView, node: Node) -> Parts | None:
    """A cast to float32 keeps every number, one from float32 rounds; between float16 and bfloat16 the ranges differ."""
    if len(node.outputs) != 1:
        return None
    given, made = (view.graph.spec(name).dtype for name in (node.inputs[0], node.outputs[0]))
    if given is made or made is DType.F32:
        return ()
    return ((K.ROUND, (argument(node, "self"),)),) if given is DType.F32 else None


_WriteOut = Callable[[_Steps, Node], bool]


def _number(node: Node, name: str) -> float | None:
    given = argument(node, name)
    return float(given) if isinstance(given, int | float) and not isinstance(given, bool) else None


def _gelu(steps: _Steps, node: Node) -> bool:
    kind = _GELU.get(str(argument(node, "approximate")))
    if kind is not None:
        steps.add(kind, argument(node, "self"))
    return kind is not None


def _power(steps: _Steps, node: Node) -> bool:
    base = argument(node, "self")
    exponent = 2.0 if node.op == "aten.square.default" else _number(node, "exponent")
    if exponent in (2.0, 3.0, -2.0):
        square = steps.add(K.MUL, base, base)
        if exponent != 2.0:
            steps.add(K.MUL, square, base) if exponent == 3.0 else steps.add(K.DIV, 1.0, square)
    elif exponent == -1.0:
        steps.add(K.DIV, 1.0, base)
    else:
        return False
    return True


def _reciprocal(steps: _Steps, node: Node) -> bool:
    steps.add(K.DIV, 1.0, argument(node, "self"))
    return True


def _clamp(steps: _Steps, node: Node) -> bool:
    """A bound that is a tensor, or no bound at all, is left to the framework."""
    x: Argument = argument(node, "self")
    low, high = (_bound(node, name) for name in ("min", "max"))
    if low is None and high is None:
        return False
    if low is not None:
        x = steps.add(K.MAX, x, low)
    if high is not None:
        steps.add(K.MIN, x, high)
    return True


def _bound(node: Node, name: str) -> float | None:
    if node.op == "aten.relu6.default":
        return {"min": 0.0, "max": 6.0}[name]
    names = {"aten.hardtanh.default": f"{name}_val", "aten.clamp.default": name, f"aten.clamp_{name}.default": name}
    return _number(node, names[node.op]) if node.op in names else None


def _hard(steps: _Steps, node: Node) -> bool:
    """hardsigmoid: clamp(x + 3, 0, 6) / 6; hardswish: that times x."""
    x = argument(node, "self")
    gate = steps.add(K.MIN, steps.add(K.MAX, steps.add(K.ADD, x, 3.0), 0.0), 6.0)
    steps.add(K.DIV, gate if node.op == "aten.hardsigmoid.default" else steps.add(K.MUL, x, gate), 6.0)
    return True


def _leaky_relu(steps: _Steps, node: Node) -> bool:
    x, slope = argument(node, "self"), _number(node, "negative_slope")
    if slope is None:
        return False
    steps.add(K.WHERE, steps.add(K.GREATER, x, 0.0), x, steps.add(K.MUL, x, slope))
    return True


def elu_parameters(node: Node) -> tuple[float, float, float]:
    """alpha, scale and the scale of the operand of an elu, selu or celu; a scale of 0: not numbers."""
    if node.op == "aten.selu.default":
        return 1.6732632423543772, 1.0507009873554805, 1.0
    alpha = _number(node, "alpha")
    if node.op == "aten.celu.default":
        return (alpha, 1.0, 1.0 / alpha) if alpha else (0.0, 0.0, 0.0)
    scale, inner = _number(node, "scale"), _number(node, "input_scale")
    return (alpha, scale, inner) if alpha is not None and scale and inner else (0.0, 0.0, 0.0)


def _elu(steps: _Steps, node: Node) -> bool:
    x, (alpha, scale, inner) = argument(node, "self"), elu_parameters(node)
    below = steps.add(K.MUL, steps.add(K.EXPM1, x if inner == 1.0 else steps.add(K.MUL, x, inner)), alpha * scale)
    steps.add(K.WHERE, steps.add(K.GREATER, x, 0.0), x if scale == 1.0 else steps.add(K.MUL, x, scale), below)
    return scale != 0.0


def _softplus(steps: _Steps, node: Node) -> bool:
    beta, threshold = _number(node, "beta"), _number(node, "threshold")
    if beta is None or threshold is None or beta <= 0.0 or threshold < SMOOTH_FROM:
        return False
    x = argument(node, "self")
    plus = plus_softly(steps, x if beta == 1.0 else steps.add(K.MUL, x, beta))
    if beta != 1.0:
        steps.add(K.DIV, plus, beta)
    return True


def _mish(steps: _Steps, node: Node) -> bool:
    x = argument(node, "self")
    steps.add(K.MUL, x, steps.add(K.TANH, plus_softly(steps, x)))
    return True


def _log_sigmoid(steps: _Steps, node: Node) -> bool:
    steps.add(K.NEG, plus_softly(steps, steps.add(K.NEG, argument(node, "self"))))
    return True


def _where(steps: _Steps, node: Node) -> bool:
    steps.add(K.WHERE, *(argument(node, name) for name in ("condition", "self", "other")))
    return True


def _masked_fill(steps: _Steps, node: Node) -> bool:
    steps.add(K.WHERE, *(argument(node, name) for name in ("mask", "value", "self")))
    return True


def _shrink(steps: _Steps, node: Node) -> bool:
    """hardshrink: x beyond lambda; softshrink: x less lambda there, towards zero; a NaN stays one."""
    x, bound = argument(node, "self"), _number(node, "lambd")
    if bound is None or bound < 0.0:
        return False
    if node.op == "aten.hardshrink.default":
        steps.add(K.WHERE, steps.add(K.AT_LEAST, x, -bound), steps.add(K.WHERE, steps.add(K.AT_LEAST, bound, x), 0.0, x), x)
    else:
        inside = steps.add(K.MIN, steps.add(K.MAX, x, -bound), bound)
        steps.add(K.SUB, x, inside)
    return True


def _threshold(steps: _Steps, node: Node) -> bool:
    x, bound, value = argument(node, "self"), _number(node, "threshold"), _number(node, "value")
    if bound is None or value is None:
        return False
    steps.add(K.WHERE, steps.add(K.AT_LEAST, bound, x), value, x)
    return True


_WRITTEN_OUT: dict[str, _WriteOut] = {
    **dict.fromkeys(LOSSES, write_loss), "aten.masked_fill.Scalar": _masked_fill, "aten.threshold.default": _threshold,
    **dict.fromkeys(("aten.hardshrink.default", "aten.softshrink.default"), _shrink),
    "aten.gelu.default": _gelu, "aten.reciprocal.default": _reciprocal, "aten.leaky_relu.default": _leaky_relu,
    **dict.fromkeys(("aten.elu.default", "aten.selu.default", "aten.celu.default"), _elu),
    "aten.softplus.default": _softplus, "aten.mish.default": _mish, "aten.log_sigmoid.default": _log_sigmoid,
    **dict.fromkeys(("aten.square.default", "aten.pow.Tensor_Scalar"), _power),
    **dict.fromkeys(("aten.clamp.default", "aten.clamp_min.default", "aten.clamp_max.default", "aten.hardtanh.default",
                     "aten.relu6.default"), _clamp),
    **dict.fromkeys(("aten.hardswish.default", "aten.hardsigmoid.default"), _hard),
    **dict.fromkeys(("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf"), _where),
}
