"""Losses element by element, as scalar operations: what each is over its own arguments, where nothing is summed yet."""

from collections.abc import Callable
from typing import Protocol

from ..ir.expression import PointwiseKind
from ..ir.graph import Argument, Node, Ref
from .schema import argument

K = PointwiseKind
ELEMENTS, MEAN, SUM = range(3)  # of ``reduction``
LEAST_LOGARITHM = -100.0  # of a probability in a binary cross entropy


class Steps(Protocol):
    """Operations one after the other."""

    def add(self, kind: PointwiseKind, *operands: Argument) -> Ref:
        """Append one; what it makes."""
        ...


def plus_softly(steps: Steps, x: Argument) -> Ref:
    """max(x, 0) + log1p(exp(-|x|)), which neither overflows nor cancels."""
    tail = steps.add(K.LOG1P, steps.add(K.EXP, steps.add(K.NEG, steps.add(K.ABS, x))))
    return steps.add(K.ADD, steps.add(K.MAX, x, 0.0), tail)


def _number(node: Node, name: str) -> float:
    given = argument(node, name)
    return float(given) if isinstance(given, int | float) and not isinstance(given, bool) else -1.0


def _apart(steps: Steps, node: Node) -> Ref:
    return steps.add(K.SUB, argument(node, "self"), argument(node, "target"))


def _squares(steps: Steps, node: Node) -> bool:
    apart = _apart(steps, node)
    steps.add(K.MUL, apart, apart)
    return True


def _magnitudes(steps: Steps, node: Node) -> bool:
    steps.add(K.ABS, _apart(steps, node))
    return True


def _smooth(steps: Steps, node: Node) -> bool:
    """|d|^2 / 2 beta below beta, |d| - beta / 2 beyond; beta 0: |d|."""
    beta = _number(node, "beta")
    size = steps.add(K.ABS, _apart(steps, node))
    if beta > 0.0:
        inside = steps.add(K.DIV, steps.add(K.MUL, steps.add(K.MUL, size, 0.5), size), beta)
        steps.add(K.WHERE, steps.add(K.GREATER, beta, size), inside, steps.add(K.SUB, size, 0.5 * beta))
    return beta >= 0.0


def _huber(steps: Steps, node: Node) -> bool:
    """|d|^2 / 2 below delta, delta (|d| - delta / 2) beyond."""
    delta = _number(node, "delta")
    size = steps.add(K.ABS, _apart(steps, node))
    inside = steps.add(K.MUL, steps.add(K.MUL, size, 0.5), size)
    beyond = steps.add(K.MUL, steps.add(K.SUB, size, 0.5 * delta), delta)
    steps.add(K.WHERE, steps.add(K.GREATER, size, delta), beyond, inside)
    return delta > 0.0


def _divergence(steps: Steps, node: Node) -> bool:
    """target (log target - x), 0 log 0 being 0; or exp(target) (target - x)."""
    x, target = argument(node, "self"), argument(node, "target")
    if argument(node, "log_target"):
        steps.add(K.MUL, steps.add(K.EXP, target), steps.add(K.SUB, target, x))
        return True
    entropy = steps.add(K.MUL, target, steps.add(K.LOG, target))
    entropy = steps.add(K.WHERE, steps.add(K.EQUAL, target, 0.0), 0.0, entropy)
    steps.add(K.SUB, entropy, steps.add(K.MUL, target, x))
    return True


def _binary(steps: Steps, node: Node) -> bool:
    """(target - 1) max(log(1 - x), -100) - target max(log x, -100)."""
    x, target = argument(node, "self"), argument(node, "target")
    right = steps.add(K.MAX, steps.add(K.LOG, x), LEAST_LOGARITHM)
    wrong = steps.add(K.MAX, steps.add(K.LOG1P, steps.add(K.NEG, x)), LEAST_LOGARITHM)
    steps.add(K.SUB, steps.add(K.MUL, steps.add(K.SUB, target, 1.0), wrong), steps.add(K.MUL, target, right))
    return argument(node, "weight") is None


def _binary_of_scores(steps: Steps, node: Node) -> bool:
    """(1 - target) x + log(1 + exp(-x))."""
    x, target = argument(node, "self"), argument(node, "target")
    wrong = steps.add(K.MUL, steps.add(K.SUB, 1.0, target), x)
    steps.add(K.ADD, wrong, plus_softly(steps, steps.add(K.NEG, x)))
    return argument(node, "weight") is None and argument(node, "pos_weight") is None


def _margin(steps: Steps, node: Node) -> bool:
    """log(1 + exp(-x target))."""
    product = steps.add(K.MUL, steps.add(K.NEG, argument(node, "self")), argument(node, "target"))
    steps.add(K.LOG1P, steps.add(K.EXP, product))
    return True


_WRITTEN: dict[str, Callable[[Steps, Node], bool]] = {
    "aten.mse_loss.default": _squares, "aten.l1_loss.default": _magnitudes, "aten.smooth_l1_loss.default": _smooth,
    "aten.huber_loss.default": _huber, "aten.kl_div.default": _divergence, "aten.binary_cross_entropy.default": _binary,
    "aten.binary_cross_entropy_with_logits.default": _binary_of_scores, "aten.soft_margin_loss.default": _margin,
}
LOSSES = frozenset(_WRITTEN)


def write_loss(steps: Steps, node: Node) -> bool:
    """Append what a loss of ``LOSSES`` is element by element; False where it sums them up or has arguments that nothing here says."""
    return argument(node, "reduction") == ELEMENTS and _WRITTEN[node.op](steps, node)
