"""Operators that are others in a row, written out as those: what a rule knows of the parts then serves the whole."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from attrs import evolve

from ...ir.graph import Argument, DType, Graph, Node, Ref, TensorSpec, Value
from ...ops.dtypes import torch_dtype
from ...ops.losses import LOSSES, MEAN, SUM
from ...ops.overloads import operator_of
from ...ops.schema import argument as argument_of
from ...ops.schema import canonical, with_argument
from .importer import spec_of
from .kinds import kind_of
from .laid_out import made_by, without_memory
from .rewrite import View, beside, rebuild, resolve_chain

_FUNCTIONS = {MEAN: "aten.mean.default", SUM: "aten.sum.default"}
_WIDE = ("float32", "float64")  # where squares of what a model holds stay in range


class Writer:
    """The nodes that take the place of one, in order."""

    def __init__(self, graph: Graph, anchor: Node) -> None:
        self.graph, self.anchor = graph, anchor
        self.nodes: list[Node] = []
        self.values: dict[str, Value] = {}

    def spec(self, given: Argument) -> TensorSpec:
        """What a value is, one of the graph or one made here."""
        assert isinstance(given, Ref)
        return self.values[given.value].spec if given.value in self.values else self.graph.spec(given.value)

    def add(self, op: str, *args: Argument, kwargs: tuple[tuple[str, Argument], ...] = ()) -> Ref:
        """Append a call of ``op`` that has one result."""
        name = f"{self.anchor.outputs[0]}.part{len(self.nodes)}"
        result = operator_of(op)(*(self._meta(given) for given in args), **{key: self._meta(given) for key, given in kwargs})
        operand = self.spec(args[0]) if isinstance(args[0], Ref) else None
        self.nodes.append(canonical(evolve(beside(self.anchor, name, op, kind_of(op, operand), args), kwargs=kwargs)))
        self.values[name] = Value(name=name, spec=spec_of(result))
        return Ref(name)

    def _meta(self, given: Argument) -> object:
        if not isinstance(given, Ref):
            return list(given) if isinstance(given, tuple) else given
        return without_memory(self.spec(given))


_Write = Callable[[Writer, Node], Ref | None]


def write_out(graph: Graph) -> Graph:
    """Losses as their elements and a mean, pools of everything as means, and operators that torch itself makes of others; norms
    with the eps that they have.

    Before: ``mse_loss(x, y)``; ``adaptive_avg_pool2d(x, 1)``. After: ``mean(mse_loss(x, y, none))``; ``mean(x, (2, 3), keepdim)``.
    """
    nodes: list[Node] = []
    values: list[Value] = []
    for node in graph.nodes:
        found = _written(graph, node)
        if found is None:
            nodes.append(node)
            continue
        last = found.nodes[-1].outputs[0]
        nodes += [*found.nodes[:-1], evolve(found.nodes[-1], outputs=node.outputs)]
        values += [value for name, value in found.values.items() if name != last]
    return rebuild(evolve(graph, values=(*graph.values, *values)), nodes)


def _written(graph: Graph, node: Node) -> Writer | None:
    """What stands for a node; None where nothing does, or what does is laid out in another way."""
    write = _loss if node.op in LOSSES else _WRITTEN.get(node.op)
    if write is None or node.mutates or len(node.outputs) != 1:
        return None
    writer = Writer(graph, node)
    last = write(writer, node)
    return writer if last is not None and writer.spec(last) == graph.spec(node.outputs[0]) else None


def _loss(writer: Writer, node: Node) -> Ref | None:
    function = _FUNCTIONS.get(argument_of(node, "reduction"))  # type: ignore[arg-type]
    if function is None:
        return None
    single = with_argument(node, "reduction", 0)
    return writer.add(function, writer.add(node.op, *single.args, kwargs=single.kwargs))


def _reduced(writer: Writer, node: Node, elements: Ref) -> Ref:
    function = _FUNCTIONS.get(argument_of(node, "reduction"))  # type: ignore[arg-type]
    return writer.add(function, elements) if function is not None else elements


def _apart(writer: Writer, node: Node, names: Sequence[str]) -> Ref | None:
    """The distance of two tensors along the last axis, as a pairwise distance has it."""
    x, y = (argument_of(node, name) for name in names)
    order, eps = argument_of(node, "p"), argument_of(node, "eps")
    if order not in (1.0, 2.0) or writer.spec(x).shape != writer.spec(y).shape or not writer.spec(x).shape:
        return None
    difference = writer.add("aten.add.Scalar", writer.add("aten.sub.Tensor", x, y), eps)
    keep = argument_of(node, "keepdim") if "triplet" not in node.op else False
    return writer.add("aten.linalg_vector_norm.default", difference, order, (len(writer.spec(x).shape) - 1,), keep)


def _distance(writer: Writer, node: Node) -> Ref | None:
    return _apart(writer, node, ("x1", "x2"))


def _triplet(writer: Writer, node: Node) -> Ref | None:
    if argument_of(node, "swap"):
        return None
    near = _apart(writer, node, ("anchor", "positive"))
    far = _apart(writer, node, ("anchor", "negative"))
    if near is None or far is None:
        return None
    further = writer.add("aten.sub.Tensor", writer.add("aten.add.Scalar", near, argument_of(node, "margin")), far)
    return _reduced(writer, node, writer.add("aten.clamp_min.default", further, 0.0))


def _cosine(writer: Writer, node: Node) -> Ref | None:
    """The product over both lengths, each at least eps; in float32, where neither leaves its range before the other."""
    x, y, dim, eps = (argument_of(node, name) for name in ("x1", "x2", "dim", "eps"))
    if writer.spec(x).shape != writer.spec(y).shape or writer.spec(x).dtype.value not in _WIDE:
        return None
    product = writer.add("aten.sum.dim_IntList", writer.add("aten.mul.Tensor", x, y), (dim,))
    lengths = [writer.add("aten.clamp_min.default", writer.add("aten.linalg_vector_norm.default", z, 2.0, (dim,)), eps) for z in (x, y)]
    return writer.add("aten.div.Tensor", product, writer.add("aten.mul.Tensor", *lengths))


def _pool(axes: int) -> _Write:
    """A pool of everything is a mean; one whose results share nothing has windows of one size."""
    def write(writer: Writer, node: Node) -> Ref | None:
        x, sizes = argument_of(node, "self"), argument_of(node, "output_size")
        shape = writer.spec(x).shape
        given = shape[len(shape) - axes:]
        wanted = tuple(sizes) if isinstance(sizes, tuple) else (sizes,) * axes
        if wanted == (1,) * axes:
            return writer.add("aten.mean.dim", x, tuple(range(len(shape) - axes, len(shape))), True)
        if any(not isinstance(n, int) or not n or size % n for n, size in zip(wanted, given, strict=True)):
            return None
        windows = tuple(size // n for n, size in zip(wanted, given, strict=True))  # type: ignore[operator]
        return writer.add(f"aten.avg_pool{axes}d.default", x, windows, windows)

    return write


def _dot(writer: Writer, node: Node) -> Ref | None:
    """In float32: in half precision the products would be rounded."""
    if writer.spec(argument_of(node, "self")).dtype.value not in _WIDE:
        return None
    return writer.add("aten.sum.default", writer.add("aten.mul.Tensor", argument_of(node, "self"), argument_of(node, "tensor")))


def _outer(writer: Writer, node: Node) -> Ref | None:
    column = writer.add("aten.unsqueeze.default", argument_of(node, "self"), 1)
    return writer.add("aten.mul.Tensor", column, argument_of(node, "vec2"))


def _rms(writer: Writer, node: Node) -> Ref | None:
    """With the eps that torch takes where none is given."""
    if argument_of(node, "eps") is not None:
        return None
    eps = {_eps(writer.spec(argument_of(node, "input")).dtype, device) for device in _devices()}
    if len(eps) > 1:
        return None
    found = with_argument(node, "eps", eps.pop())
    return writer.add(node.op, *found.args, kwargs=found.kwargs)


def _devices() -> tuple[str, ...]:
    """The host, and the accelerator where it is in use already: their kernels may differ."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu", device.type) if device is not None and torch.get_device_module(device).is_initialized() else ("cpu",)


@cache
def _eps(dtype: DType, device: str) -> float:
    """The resolution of the element type, or of what it is computed in: torch has taken either. So it is asked."""
    own, wide = (torch.finfo(kind).eps for kind in (torch_dtype(dtype), torch.float32))
    x = torch.full((4,), wide**0.5, dtype=torch_dtype(dtype), device=device)
    found = float(torch.rms_norm(x, (4,))[0])
    tried = {eps: abs(float(x[0]) * (float(x[0]) ** 2 + eps) ** -0.5 - found) for eps in (own, wide)}
    return min(tried, key=lambda eps: tried[eps])


_WRITTEN: dict[str, _Write] = {
    "aten.rms_norm.default": _rms,
    "aten.pairwise_distance.default": _distance, "aten.triplet_margin_loss.default": _triplet, "aten.cosine_similarity.default": _cosine,
    **{f"aten.adaptive_avg_pool{axes}d.default": _pool(axes) for axes in (1, 2, 3)},
    "aten.dot.default": _dot, "aten.outer.default": _outer,
}


def _expands(graph: Graph, node: Node) -> bool:
    """Whether a node gives its operand along axes of one element several times, and no other."""
    if node.op == "aten.repeat.default":
        shape, repeated = graph.spec(node.inputs[0]).shape, graph.spec(node.outputs[0]).shape
        return all(one in (1, many) for one, many in zip(shape, repeated[len(repeated) - len(shape):], strict=True))
    return node.op in ("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default")


_BROADCASTING = frozenset(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))


def drop_expansions(graph: Graph) -> Graph:
    """Operators that repeat their operands themselves read what an expansion repeats; broadcasts of equal shapes are their operands.

    Before: ``div(x, expand_as(n, x))``; ``a, b = broadcast_tensors(x, y)``; ``mul(repeat(x, [4, 1, 1]), c)`` of a c [4, 1, 1].
    After: ``div(x, n)``; x, y; ``mul(x, c)``.
    """
    renamed: dict[str, str] = {}
    nodes, view = list[Node](), View(graph)
    for node in graph.nodes:
        given = node.args[0] if node.op == "aten.broadcast_tensors.default" else ()
        if isinstance(given, tuple) and given and all(
                isinstance(one, Ref) and graph.spec(one.value) == graph.spec(out) for one, out in zip(given, node.outputs, strict=True)):
            renamed |= {out: one.value for one, out in zip(given, node.outputs, strict=True)}  # type: ignore[union-attr]
        else:
            nodes.append(_unstretched(view, node))
    return rebuild(graph, nodes, resolve_chain(renamed))


def _unstretched(view: View, node: Node) -> Node:
    graph = view.graph
    if node.op not in _BROADCASTING or node.mutates:
        return node
    args = list(node.args)
    for place in (0, 1):
        given = args[place]
        maker = graph.producer.get(given.value) if isinstance(given, Ref) else None
        if maker is None or not _expands(graph, maker) or view.crosses_a_write([maker], node):
            continue  # what was repeated is what it was before a write
        tried = [maker.args[0] if at == place else arg for at, arg in enumerate(args)]
        read = {arg.value: graph.spec(arg.value) for arg in tried[:2] if isinstance(arg, Ref)}
        if len(read) == 2 and made_by(evolve(node, args=tuple(tried)), read) == (graph.spec(node.outputs[0]),):
            args = tried
    return evolve(node, args=tuple(args))
