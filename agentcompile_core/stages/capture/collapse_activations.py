"""Activations that a model writes out become the one operator that computes the same function.

They are known by their values, not by how they are written: a group of smooth operators of one tensor is evaluated in float64 where an
activation bends, near 0 and as far as float32 reaches, beside those that the framework has.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from ...ir.graph import Argument, DType, Graph, Node, Ref
from ...ops.interpreter import compile_nodes
from ...ops.operator_names import operator
from ...ops.overloads import is_pointwise
from ...ops.schema import canonical
from .rewrite import View, fuse

MOST_NODES = 16  # of an activation
CLOSE = 1e-8  # of |x| + 1: constants that are written with as many digits as float32 has differ by less
_TYPES = (DType.F16, DType.BF16, DType.F32)
_BENDING = frozenset({"tanh", "erf", "sigmoid", "exp"})
_ENDS = frozenset({"mul", "div", "add", "sub"})
# Without a threshold anywhere, so that functions that agree on many points are one.
_SMOOTH = _BENDING | _ENDS | {"neg", "pow", "square", "reciprocal", "to", "_to_copy"}
_FAR = torch.cat((torch.logspace(-30, -1, 60, dtype=torch.float64), torch.logspace(1.1, 38, 80, dtype=torch.float64)))
_POINTS = torch.cat((torch.linspace(-12, 12, 1501, dtype=torch.float64), _FAR, -_FAR))


@frozen
class _Known:
    op: str
    kwargs: tuple[tuple[str, Argument], ...]
    function: Callable[[Tensor], Tensor]


_ACTIVATIONS = (
    _Known("gelu", (("approximate", "tanh"),), lambda x: F.gelu(x, approximate="tanh")),
    _Known("gelu", (), F.gelu),
    _Known("silu", (), F.silu),
)


def collapse_activations(graph: Graph) -> Graph:
    """One operator for a function that the framework has.

    Before: ``mul(mul(x, 0.5), add(tanh(mul(add(x, mul(pow(x, 3), 0.044715)), 0.7978845608)), 1))``. After: ``gelu(x, 'tanh')``.
    It is rounded once, where the original rounds at every operator.
    """
    view, known, found = View(graph), dict[str, _Known | None](), dict[str, Node]()
    for node in graph.nodes:
        activation = _activation(view, node, known) if node.kind in _ENDS else None
        if activation is not None:
            found[node.name] = activation
    return fuse(graph, found) if found else graph


def _activation(view: View, last: Node, known: dict[str, _Known | None]) -> Node | None:
    for nodes, source in _groups(view, last):
        if view.graph.spec(source) != view.graph.spec(last.outputs[0]) or not _BENDING & {node.kind for node in nodes}:
            continue
        if not view.private([node for node in nodes if node is not last], last):
            return None  # nor is a larger one
        form = _form(nodes, source)
        if form not in known:
            known[form] = _function(view.graph, nodes, source, last)
        if (one := known[form]) is not None:
            return canonical(evolve(last, op=f"aten.{one.op}.default", kind=one.op, args=(Ref(source),), kwargs=one.kwargs))
    return None


def _groups(view: View, last: Node) -> Iterator[tuple[list[Node], str]]:
    """Pointwise nodes that end with ``last`` and read one value from outside, in order, and that value; smaller groups first."""
    if view.graph.spec(last.outputs[0]).dtype not in _TYPES or not _is_smooth(last):
        return
    nodes, outside = [last], set(last.inputs)
    while len(nodes) <= MOST_NODES:
        if len(outside) == 1 and len(nodes) > 1:
            yield nodes, next(iter(outside))
        made = [node for value in outside if (node := view.graph.producer.get(value)) is not None]
        latest = max(made, key=lambda node: view.places[node.name], default=None)
        if latest is None or len(latest.outputs) != 1 or latest.mutates or not latest.inputs or not _is_smooth(latest):
            return
        nodes, outside = [latest, *nodes], (outside - {latest.outputs[0]}) | set(latest.inputs)


def _is_smooth(node: Node) -> bool:
    return operator(node)[0] in _SMOOTH and is_pointwise(node.op)


def _form(nodes: list[Node], source: str) -> str:
    """The same for the same operators in another layer."""
    places = {source: "x", **{node.outputs[0]: str(place) for place, node in enumerate(nodes)}}

    def written(argument: Argument) -> str:
        return places[argument.value] if isinstance(argument, Ref) else repr(argument)

    return ";".join(f"{node.op}({','.join(map(written, node.args))};{node.kwargs})" for node in nodes)


def _function(graph: Graph, nodes: list[Node], source: str, last: Node) -> _Known | None:
    try:
        value = compile_nodes(graph, nodes, device="cpu", outputs=[last.outputs[0]], dtype_override=torch.float64).run({source: _POINTS})
    except Exception:  # an operator that wants more than an elementwise argument, say
        return None
    found = value[last.outputs[0]]
    if found.shape != _POINTS.shape or found.dtype is not _POINTS.dtype:
        return None
    far = CLOSE * (_POINTS.abs() + 1)
    return next((one for one in _ACTIVATIONS if bool(((found - one.function(_POINTS)).abs() <= far).all())), None)  # NaN is near nothing
