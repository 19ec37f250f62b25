"""Rotations with what is around them: the part of a head that is rotated, and the whole head that it is put into again."""

from collections.abc import Iterable

from attrs import evolve, frozen

from agentcompile_core.plugin_api import (
    KERNEL_TYPES,
    ROPE,
    DType,
    Graph,
    Match,
    Node,
    Ref,
    RegionRule,
    RegionView,
    SemanticLabel,
    Target,
    argument,
    is_contiguous,
    operator_names,
    ref,
)

from . import kinds
from .parts import COPIES, strides_of, whole_of
from .router import CASTS

JOIN = "aten.cat.default"


@frozen(kw_only=True)
class Heads:
    """Rows of equal length in a contiguous value: head h begins at ``first + h * step``; ``apart``: every second channel first."""

    value: str
    first: int
    step: int
    apart: bool = False


@frozen(kw_only=True)
class Placed:
    """Where a rotation goes: ``out`` [1, heads, 1, width] with its channels from ``first`` on, beside those of ``rest`` (None: alone)."""

    out: str
    nodes: tuple[str, ...]
    heads: int
    first: int = 0
    rest: str | None = None


class RopeHeadsRule(RegionRule):
    """``rope`` matches of more than the rotation: of a part of each head, cast, for all heads alike, put together with the rest."""

    name = "rope_heads"
    version = 1
    kinds = (kinds.ROPE,)

    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Every rotation of one token with as much around it as there is, widest last."""
        view = RegionView(graph=graph)
        for node in graph.nodes:
            if node.op == operator_names.ROPE and _is_served(view, node):
                found = [match for place in _places(view, node) if (match := _match(view, node, place)) is not None]
                yield from (match for match in found if _takes_more(view, match))


def _takes_more(view: RegionView, match: Match) -> bool:
    """Whether it replaces more than the rotation, which has a rule of its own, and views that move nothing."""
    return sum(node.name in match.nodes and not view.is_free(node) for node in view.graph.nodes) > 1


def _is_served(view: RegionView, node: Node) -> bool:
    """One token, a whole rotation, tables of one type: that of x or float32."""
    x, cos, sin = (view.graph.spec(str(ref(argument(node, name)))) for name in ("x", "cos", "sin"))
    shaped = len(x.shape) == 4 and x.shape[0] == x.shape[2] == 1 and cos.numel == sin.numel == cos.shape[-1] == x.shape[3]
    typed = x.dtype in KERNEL_TYPES and cos.dtype is sin.dtype and cos.dtype in (x.dtype, DType.F32)
    return shaped and typed and is_contiguous(cos) and is_contiguous(sin)


def _places(view: RegionView, node: Node) -> Iterable[Placed]:
    """The result itself, then behind a cast, then for more heads, then in the whole heads."""
    heads = view.graph.spec(node.outputs[0]).shape[1]
    place = Placed(out=node.outputs[0], nodes=(node.name,), heads=heads)
    yield place
    user = _only_user(view, place.out)
    if user is not None and user.op in CASTS:
        place = evolve(place, out=user.outputs[0], nodes=(*place.nodes, user.name))
        yield place
        user = _only_user(view, place.out)
    expanded = user is not None and user.op == "aten.expand.default" and heads == 1
    if user is not None and expanded:
        shape = view.graph.spec(user.outputs[0]).shape
        if len(shape) != 4 or shape[0] != 1 or shape[2:] != view.graph.spec(place.out).shape[2:]:
            return
        place = evolve(place, out=user.outputs[0], nodes=(*place.nodes, user.name), heads=shape[1])
        user = _only_user(view, place.out)
    joined = _joined(view, place, user) if user is not None and user.op == JOIN else None
    if joined is not None:
        yield joined


def _only_user(view: RegionView, value: str) -> Node | None:
    users = view.users(value)
    return users[0] if len(users) == 1 and not view.leaves(value) else None


def _joined(view: RegionView, place: Placed, join: Node) -> Placed | None:
    """``place`` beside the channels that it is concatenated with along the last axis."""
    parts, axis, out = join.args[0], argument(join, "dim"), view.graph.spec(join.outputs[0])
    last = isinstance(axis, int) and axis % len(out.shape) == len(out.shape) - 1
    if not isinstance(parts, tuple) or len(parts) != 2 or not last or not is_contiguous(out) or parts[0] == parts[1]:
        return None
    behind = parts[1] == Ref(place.out)
    rest = ref(parts[0] if behind else parts[1])
    if rest is None or view.graph.spec(rest).dtype is not view.graph.spec(place.out).dtype:
        return None
    first = view.graph.spec(rest).shape[-1] if behind else 0
    return evolve(place, out=join.outputs[0], nodes=(*place.nodes, join.name), first=first, rest=rest)


def _match(view: RegionView, node: Node, place: Placed) -> Match | None:
    taken = list(place.nodes)
    x = _heads_of(view, str(ref(argument(node, "x"))), taken)
    rest = _heads_of(view, place.rest, taken, copied=False) if place.rest is not None else None
    out = view.graph.spec(place.out)
    if x is None or (rest is None and place.rest is not None) or not is_contiguous(out) or out.dtype not in KERNEL_TYPES:
        return None
    source = view.graph.spec(x.value)
    if source.dtype is not view.graph.spec(str(ref(argument(node, "x")))).dtype:
        return None
    own = rest is None or rest.value == x.value
    names = [("x", x.value), *([] if own or rest is None else [("rest", rest.value)]),
             *((name, str(ref(argument(node, name)))) for name in ("cos", "sin"))]
    given = view.graph.spec(str(ref(argument(node, "x")))).shape
    attributes = (
        ("heads", place.heads), ("head_dim", out.shape[3]), ("rotary_dim", given[3]),
        ("style", "interleaved" if argument(node, "interleaved") else "half"), ("apart", x.apart), ("first", place.first),
        ("x_first", x.first), ("x_step", x.step if given[1] == place.heads else 0),
        ("rest_first", rest.first if rest else 0), ("rest_step", rest.step if rest else 0),
    )
    operands = (*(view.read(name, value) for name, value in names), view.write("out", place.out))
    return Match(kind=ROPE, label=SemanticLabel.ROPE, nodes=view.deps.members(view.deps.mask(taken)), operands=operands,
                 attributes=attributes)


def _heads_of(view: RegionView, value: str, taken: list[str], copied: bool = True) -> Heads | None:
    """The heads that ``value`` [1, H, 1, D] holds, where they lie in a contiguous value; ``copied``: seen through a copy of them.

    The views and the copy on the way go into ``taken``.
    """
    shape = view.graph.spec(value).shape
    if len(shape) != 4 or shape[0] != 1 or shape[2] != 1:
        return None
    if is_contiguous(view.graph.spec(value)) and copied:
        value, views = view.back(value, set(taken))
        taken += views
        node = view.producer(value)
        if node is not None and node.op in COPIES and view.only_used_by(value, set(taken)):
            taken.append(node.name)
            value = node.inputs[0]
        else:
            return Heads(value=value, first=0, step=shape[3])
    spec = view.graph.spec(value)
    if is_contiguous(spec) and spec.numel == shape[1] * shape[3]:
        return Heads(value=value, first=0, step=shape[3])
    rows = _rows(list(zip(spec.shape, strides_of(spec), strict=True)), shape[1], shape[3])
    whole = whole_of(view, value, taken)
    return Heads(value=whole[0], first=whole[1], step=rows[0], apart=rows[1]) if rows is not None and whole is not None else None


def _rows(axes: list[tuple[int, int]], heads: int, width: int) -> tuple[int, bool] | None:
    """How far the heads lie apart, and whether every second channel comes first; None where they are no rows."""
    left = [axis for axis in axes if axis[0] != 1]
    step = left.pop(0)[1] if heads > 1 and left and left[0][0] == heads else 0
    if left == [(width, 1)]:
        return step, False
    paired = [axis for axis in ((2, 1), (width // 2, 2)) if axis[0] != 1]
    return (step, True) if left == paired and width % 2 == 0 else None
