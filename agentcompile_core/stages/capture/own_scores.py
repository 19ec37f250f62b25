"""What a model that writes out its attention does to its scores: scales them, hides positions, adds a bias that falls with distance.

Such a model is traced as for the last tokens of a full cache: K and V have all S positions, and row t of the queries is at position
S - T + t. Masks and biases that depend on nothing but positions are computed here, in float64, and read: a mask must be causal or a
window, a bias a straight line per head (ALiBi). Whatever else happens to the scores is not understood.
"""

from collections.abc import Callable

import torch
from attrs import evolve, frozen
from torch import Tensor

from ...errors import UsageError
from ...ir.graph import Argument, Graph, Node, Ref, ValueKind
from ...ops.interpreter import compile_nodes
from ...ops.operator_names import MASKED
from ...ops.schema import argument as argument_of
from .attention import LOWEST
from .rewrite import View

_PRODUCTS = ("aten.matmul.default", "aten.bmm.default")
_SCALES = ("aten.mul.Tensor", "aten.div.Tensor")
_LIMITS = ("aten.max.other", "aten.maximum.default")
_CHOICES = ("aten.where.self", "aten.where.ScalarOther")
_HIDDEN = -1000.0  # a score below which nothing is left of a weight, whatever the others are
_STRAIGHT = 1e-9  # relative to the largest step of a bias, in float64


@frozen(kw_only=True)
class Scores:
    """``queries @ keys * scale``, causal, ``window`` positions back (0: all), plus ``slope * (j - i)`` of each head (none: empty)."""

    queries: Argument
    keys: Argument
    scale: float = 1.0
    window: int = 0
    slopes: tuple[float, ...] = ()
    is_causal: bool = False


class Constants:
    """The values of a graph that depend on no input: on numbers and on the buffers of the model."""

    def __init__(self, graph: Graph, buffers: Callable[[str], Tensor | None]) -> None:
        self.graph, self.buffers = graph, buffers
        self._made: dict[str, Tensor | None] = {}

    def value(self, argument: Argument) -> Tensor | None:
        """The value on the CPU, floats as float64; None where it depends on more, or a buffer has no data."""
        if not isinstance(argument, Ref):
            return None
        if argument.value not in self._made:
            self._made[argument.value] = self._compute(argument.value)
        return self._made[argument.value]

    def _compute(self, name: str) -> Tensor | None:
        nodes: dict[str, Node] = {}
        leaves: set[str] = set()
        waiting = [name]
        while waiting:
            one = waiting.pop()
            node = self.graph.producer.get(one)
            if node is None:
                leaves.add(one)
            elif node.mutates:
                return None
            elif node.name not in nodes:
                nodes[node.name] = node
                waiting += node.inputs
        if any(self.graph.kind_of(leaf) is not ValueKind.CONSTANT for leaf in leaves):
            return None
        env = {leaf: data for leaf in leaves if (data := self.buffers(leaf)) is not None}
        if len(env) != len(leaves):
            return None
        ordered = [node for node in self.graph.nodes if node.name in nodes]
        try:
            return compile_nodes(self.graph, ordered, device="cpu", outputs=[name], dtype_override=torch.float64).run(env)[name]
        except (UsageError, RuntimeError):  # a call that a graph may not hold
            return None


def scores_of(view: View, argument: Argument, constants: Constants) -> Scores | None:
    """How ``argument``, the operand of a softmax, is made of queries and keys; None where that is not understood."""
    found = _walked(view, argument, constants)
    return found if found is not None and found.is_causal else None


def _walked(view: View, argument: Argument, constants: Constants) -> Scores | None:
    node = view.node(argument)
    if node is None:
        return None
    if node.op in _PRODUCTS:
        return Scores(queries=node.args[0], keys=node.args[1])
    if node.op == "aten.baddbmm.default":
        return _product_and_bias(view, node, constants)
    if reshapes(view, node) or (node.op in _LIMITS and _is_low(constants, node.args[1])):
        return _walked(view, node.args[0], constants)
    if node.op in _SCALES:
        return _scaled(view, node, constants)
    if node.op == MASKED:
        return _within(_walked(view, node.args[0], constants), argument_of(node, "window"), causal=True)
    if node.op in (*_CHOICES, "aten.masked_fill.Scalar", "aten.masked_fill.Tensor"):
        return _hidden(view, node, constants)
    return _added(view, node, constants) if node.op == "aten.add.Tensor" else None


def _scaled(view: View, node: Node, constants: Constants) -> Scores | None:
    number, inner = node.args[1], _walked(view, node.args[0], constants)
    if inner is None or len(node.args) != 2 or not isinstance(number, int | float) or number == 0:
        return None
    factor = float(number) if node.op == "aten.mul.Tensor" else 1.0 / number
    if (inner.is_causal or inner.window) and LOWEST * factor > _HIDDEN:
        return None  # what was hidden would no longer be
    return evolve(inner, scale=inner.scale * factor, slopes=tuple(slope * factor for slope in inner.slopes))


def _product_and_bias(view: View, node: Node, constants: Constants) -> Scores | None:
    beta, alpha = argument_of(node, "beta"), argument_of(node, "alpha")
    slopes = _slopes(constants.value(node.args[0]), view.shape(Ref(node.outputs[0])))
    if slopes is None or not isinstance(beta, int | float) or not isinstance(alpha, int | float):
        return None
    return Scores(queries=node.args[1], keys=node.args[2], scale=float(alpha), slopes=tuple(slope * beta for slope in slopes))


def _added(view: View, node: Node, constants: Constants) -> Scores | None:
    """Scores plus a bias, in either order."""
    if argument_of(node, "alpha") != 1:
        return None
    for inner, bias in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        value = constants.value(bias)
        if value is None:
            continue
        slopes, scores = _slopes(value, view.shape(Ref(node.outputs[0]))), _walked(view, inner, constants)
        if slopes is None or scores is None:
            return None
        both = sorted((slopes, scores.slopes or (0.0,)), key=len)
        width = len(both[1]) // len(both[0])
        return evolve(scores, slopes=tuple(a + b for a, b in zip(both[0] * width, both[1], strict=True)))
    return None


def _slopes(bias: Tensor | None, shape: tuple[int, ...]) -> tuple[float, ...] | None:
    """The step of a bias [.., H, T, S] or [H, T, S] from position to position, per head or one for all; None where it is no line."""
    if bias is None or bias.dim() > len(shape) or not bias.dim() or bias.shape[-1] != shape[-1] or shape[-1] < 2:
        return None
    bias = bias.to(torch.float64)[(None,) * (3 - bias.dim())] if bias.dim() < 3 else bias.to(torch.float64)
    if any(extent != 1 for extent in bias.shape[:-3]):
        return None
    lines = bias.reshape(*bias.shape[-3:])
    steps = lines.diff(dim=-1)
    first = steps[:, :1, :1]
    if not bool(steps.isfinite().all()) or bool(((steps - first).abs() > _STRAIGHT * lines.abs().max()).any()):
        return None
    return tuple(float(torch.tensor(step, dtype=torch.float32)) for step in first.flatten().tolist())


def _hidden(view: View, node: Node, constants: Constants) -> Scores | None:
    """Scores of which a mask hides some: ``where(seen, scores, lowest)`` or ``masked_fill(scores, hidden, lowest)``."""
    fills = node.op not in _CHOICES
    scores, mask, low = (node.args[0], node.args[1], node.args[2]) if fills else (node.args[1], node.args[0], node.args[2])
    value, inner = constants.value(mask), _walked(view, scores, constants)
    if value is None or inner is None or value.dtype is not torch.bool or not _is_low(constants, low):
        return None
    window = _window(~value if fills else value)
    return None if window is None else _within(inner, window[0], causal=window[1])


def _is_low(constants: Constants, argument: Argument) -> bool:
    """Whether an argument is one number so low that no score lies below it."""
    value = constants.value(argument)
    number = float(value) if value is not None and value.numel() == 1 else argument
    return isinstance(number, int | float) and number <= LOWEST


def _window(seen: Tensor) -> tuple[int, bool] | None:
    """(window, whether it is causal as well) of a mask [.., T, S] whose row t is at position S - T + t; None where it is neither."""
    if seen.dim() < 2 or any(extent != 1 for extent in seen.shape[:-2]):
        return None
    seen = seen.reshape(seen.shape[-2:])
    count, length = seen.shape
    rows, columns = torch.arange(length - count, length)[:, None], torch.arange(length)[None, :]
    width = int(seen[-1].sum())
    window = 0 if width == length else width
    past = (columns > rows - window) if window else torch.ones_like(seen)
    if torch.equal(seen, past & (columns <= rows)):
        return window, True
    return (window, False) if torch.equal(seen | (columns > rows), past | (columns > rows)) else None


def _within(scores: Scores | None, window: Argument, causal: bool) -> Scores | None:
    if scores is None or not isinstance(window, int):
        return None
    windows = [one for one in (scores.window, window) if one]
    return evolve(scores, window=min(windows, default=0), is_causal=scores.is_causal or causal)


def reshapes(view: View, node: Node) -> bool:
    """Whether a node gives the same elements in the same order, in whatever type; an axis of one may move."""
    if node.kind == "cast" or node.op in ("aten.clone.default", "aten.contiguous.default"):
        return True
    return node.kind in ("view", "copy") and node.op.split(".")[1] in ("view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze")
