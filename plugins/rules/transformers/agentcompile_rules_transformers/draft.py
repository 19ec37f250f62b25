"""Graphs made by hand, node by node: what tests of rules and families are tried on."""

from attrs import evolve

from agentcompile_core.plugin_api import (
    Argument,
    DType,
    Graph,
    GraphKind,
    Node,
    Ref,
    Symbol,
    TensorSpec,
    UsageError,
    Value,
    ValueKind,
    canonical,
    operator_names,
)

EPS = 1e-6


class Draft:
    """A graph in the making: values and nodes with shapes that the caller states."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.nodes: list[Node] = []

    def given(self, name: str, shape: tuple[int, ...], dtype: DType, kind: ValueKind = ValueKind.INPUT) -> Ref:
        """A value that the graph is given: an input, weight, constant or state."""
        source = "" if kind is ValueKind.INPUT else name
        self.values.append(Value(name=name, spec=TensorSpec(shape=shape, dtype=dtype), kind=kind, source=source))
        return Ref(name)

    def weight(self, name: str, *shape: int, dtype: DType) -> Ref:
        """A parameter."""
        return self.given(name, shape, dtype, ValueKind.WEIGHT)

    def call(self, op: str, args: tuple[Argument, ...], *shapes: tuple[int, ...], dtype: DType, kind: str = "",
             mutates: tuple[str, ...] = (), **keywords: Argument) -> tuple[Ref, ...]:
        """Append the operator ``op`` (``aten.add.Tensor``) with one result per shape."""
        name = f"{op.split('.')[1]}_{len(self.nodes)}"
        outputs = tuple(f"{name}.{i}" for i in range(len(shapes)))
        self.values += [Value(name=out, spec=TensorSpec(shape=shape, dtype=dtype)) for out, shape in zip(outputs, shapes, strict=True)]
        node = Node(name=name, op=op, kind=kind or op.split(".")[1], args=args, outputs=outputs, mutates=mutates,
                    kwargs=tuple(keywords.items()))
        self.nodes.append(canonical(node))
        return tuple(Ref(out) for out in outputs)

    def one(self, op: str, args: tuple[Argument, ...], shape: tuple[int, ...], dtype: DType, kind: str = "") -> Ref:
        """``call`` of an operator with a single result."""
        return self.call(op, args, shape, dtype=dtype, kind=kind)[0]

    def cast(self, value: Ref, shape: tuple[int, ...], dtype: DType) -> Ref:
        """``value`` as elements of another type."""
        return self.one("aten.to.dtype", (value, Symbol("dtype", dtype.value)), shape, dtype, kind="cast")

    def apart(self, op: str, args: tuple[Argument, ...], shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType,
              count: int = 1, **keywords: Argument) -> tuple[Ref, ...]:
        """``count`` views (or results) of ``shape`` whose elements lie ``strides`` apart."""
        made = self.call(op, args, *((shape,) * count), dtype=dtype, kind="view", **keywords)
        self.values[-count:] = [evolve(value, spec=evolve(value.spec, strides=strides)) for value in self.values[-count:]]
        return made

    def retype(self, value: Ref, dtype: DType) -> None:
        """Give a value another element type: that of indices beside what they index."""
        self.values = [evolve(v, spec=evolve(v.spec, dtype=dtype)) if v.name == value.value else v for v in self.values]

    def norm(self, name: str, x: Ref, norm: str, shape: tuple[int, ...], dtype: DType, weights: DType | None = None) -> Ref:
        """A norm over the last axis: ``rms``, ``rms_one_plus``, ``rms_once``, ``layer`` or ``layer_one_plus``, whose 1 is added by a node.

        ``rms_bare`` has no weight. ``weights``: the type of its weight, if not ``dtype``.
        """
        if norm == "rms_bare":
            return self.one(operator_names.RMS_NORM, (x, None, EPS), shape, dtype)
        weight = self.weight(f"{name}.weight", shape[-1], dtype=weights or dtype)
        if norm in ("layer", "layer_one_plus"):
            bias = self.weight(f"{name}.bias", shape[-1], dtype=dtype)
            if norm == "layer_one_plus":
                weight = self.one("aten.add.Tensor", (weight, 1), (shape[-1],), dtype)
            return self.one("aten.layer_norm.default", (x, (shape[-1],), weight, bias, EPS), shape, dtype)
        if norm == "rms_once" and weights is not None:
            return self.one(operator_names.RMS_NORM, (x, weight, EPS, False, True), shape, dtype)
        if norm == "rms_once":
            return self.one("aten.rms_norm.default", (x, (shape[-1],), weight, EPS), shape, dtype)
        if norm not in ("rms", "rms_one_plus"):
            raise UsageError(f"unknown norm {norm!r}; allowed are rms, rms_bare, rms_once, rms_one_plus, layer and layer_one_plus")
        return self.one(operator_names.RMS_NORM, (x, weight, EPS, norm == "rms_one_plus"), shape, dtype)

    def linear(self, name: str, x: Ref, n: int, k: int, dtype: DType, bias: bool = False) -> Ref:
        """``y[n] = weight[n, k] x[k] (+ bias[n])``."""
        parameters = (self.weight(f"{name}.weight", n, k, dtype=dtype), *((self.weight(f"{name}.bias", n, dtype=dtype),) if bias else ()))
        return self.one("aten.linear.default", (x, *parameters), (1, 1, n), dtype)

    def graph(self, *outputs: Ref) -> Graph:
        """The finished graph."""
        inputs = tuple(value.name for value in self.values if value.kind is ValueKind.INPUT)
        return Graph(name="case", kind=GraphKind.DECODE, values=tuple(self.values), nodes=tuple(self.nodes), inputs=inputs,
                     outputs=tuple(out.value for out in outputs)).verify()
