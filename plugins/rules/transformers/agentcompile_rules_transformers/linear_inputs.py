"""What a linear layer of one token may read instead of its operand: what a norm, a rounding or both make it of."""

from collections.abc import Iterator

from attrs import evolve, frozen

from agentcompile_core.plugin_api import DType, Node, Operand, Ref, RegionView, Scalar, argument, is_contiguous

from .norm import NormNode, norm_of

LARGEST = (2.0 - 2.0**-23) * 2.0**127  # of float32, in which results are scaled


@frozen(kw_only=True)
class Input:
    """``x``, the norm of it, and the nodes that make the operand of it; a float32 ``x`` is rounded on the way to narrower weights.

    ``normed``: the value that the norm makes, where others read it as well. ``before``: what makes the operand of the norm, or ``x``
    itself, by a norm of its own and the addition of a residual. ``scale``: the number that the operand is that made times, which the
    results of the layer may be multiplied with as well.
    """

    x: str
    nodes: tuple[str, ...] = ()
    norm: NormNode | None = None
    normed: str = ""
    before: "Sum | None" = None
    scale: float = 1.0

    def read(self, view: RegionView) -> list[Operand]:
        """What a layer over it reads beside ``x`` and its own weights."""
        weights = [] if self.norm is None else [("norm_weight", self.norm.weight), ("norm_bias", self.norm.bias)]
        added = [] if self.before is None else [("post_weight", self.before.norm.weight), ("residual", self.before.residual)]
        return [view.read(name, value) for name, value in (*weights, *added) if value]

    def written(self, view: RegionView) -> list[Operand]:
        """What it writes for others on the way."""
        made = (("norm_out", self.normed), ("residual_out", self.before.out if self.before is not None else ""))
        return [view.write(name, value) for name, value in made if value]

    @property
    def attributes(self) -> tuple[tuple[str, Scalar], ...]:
        """What of it is no operand."""
        own: tuple[tuple[str, Scalar], ...] = (("norm", self.norm.kind if self.norm else "none"),
                                               ("norm_eps", self.norm.eps if self.norm else 0.0))
        if self.before is None:
            return own
        return (*own, ("post_norm", self.before.norm.kind), ("post_eps", self.before.norm.eps))


@frozen(kw_only=True)
class Sum:
    """``residual`` + the ``norm`` of another value; ``out`` is the sum, where others read it as well."""

    norm: NormNode
    residual: str
    out: str


def inputs_of(view: RegionView, x: str, inside: frozenset[str], dtype: DType) -> Iterator[Input]:
    """``x`` as it is, then what it is made of by nodes that nothing but those of ``inside`` and each other read, or by a norm alone that
    others read as well."""
    yield Input(x=x)
    yield from _summed(view, Input(x=x), inside, dtype)
    before = _rounding(view, x, inside, dtype)
    if before is not None:
        yield Input(x=before[0], nodes=before[1])
    source, views = view.back(x, set(inside))
    node = view.producer(source)
    if node is None or not view.only_used_by(source, {*inside, *views}):
        yield from _shared_norm(view, x, inside, dtype)
        return
    scale = _scale_of(view, node, dtype)
    if scale is not None:
        taken = (node.name, *views)
        for given in inputs_of(view, node.inputs[0], inside | set(taken), dtype):
            if abs(given.scale * scale) <= LARGEST:
                yield evolve(given, nodes=(*given.nodes, *taken), scale=given.scale * scale)
        return
    norm = norm_of(view, node)
    if norm is None:
        weighted = _weighted(view, node, inside | set(views), dtype)
        if weighted is not None:
            yield evolve(weighted, nodes=(*weighted.nodes, *views))
    elif norm.rows == 1 and view.graph.spec(norm.weight or norm.x).dtype is dtype and view.graph.spec(norm.x).dtype is dtype:
        nodes = (node.name, *views)
        yield Input(x=norm.x, nodes=nodes, norm=norm)
        yield from _summed(view, Input(x=norm.x, nodes=nodes, norm=norm), inside, dtype)
        before = _rounding(view, norm.x, inside | set(nodes), dtype)
        if before is not None:
            yield Input(x=before[0], nodes=(*before[1], *nodes), norm=norm)


def _scale_of(view: RegionView, node: Node, dtype: DType) -> float | None:
    """The number, finite in float32, that a node multiplies its one operand with (Falcon-H1 scales what its branches read), a row
    of ``dtype`` that lies in one piece: nothing else can be read in the place of the product."""
    if node.op not in ("aten.mul.Tensor", "aten.mul.Scalar") or len(node.inputs) != 1:
        return None
    given = view.graph.spec(node.inputs[0])
    if given.dtype is not dtype or not is_contiguous(given):
        return None
    numbers = [given for given in (argument(node, "self"), argument(node, "other")) if type(given) in (int, float)]
    return float(numbers[0]) if len(numbers) == 1 and abs(numbers[0]) <= LARGEST else None  # type: ignore[arg-type]


def _summed(view: RegionView, given: Input, inside: frozenset[str], dtype: DType) -> Iterator[Input]:
    """The sum that ``given`` reads, of a residual and an RMS norm that nothing else reads (Gemma 2 and 3, OLMo 2, GLM 4)."""
    source, views = view.back(given.x, {*inside, *given.nodes})
    add = view.producer(source)
    if add is None or add.op != "aten.add.Tensor" or argument(add, "alpha") != 1 or len(add.inputs) != 2:
        return
    total = view.graph.spec(source)
    for normed, residual in (add.inputs, add.inputs[::-1]):
        value, between = view.back(normed, {add.name})
        node = view.producer(value)
        norm = norm_of(view, node) if node is not None and view.only_used_by(value, {add.name, *between}) else None
        if norm is None or not norm.kind.startswith("rms") or norm.rows != 1 or norm.columns != total.numel:
            continue
        specs = [view.graph.spec(name) for name in (norm.x, norm.weight or norm.x, residual, source)]
        nodes = (norm.node.name, *between, add.name, *views, *given.nodes)
        fits = all(spec.dtype is dtype and is_contiguous(spec) for spec in specs) and view.graph.spec(residual).numel == total.numel
        if fits and view.deps.is_convex(view.deps.mask((*inside, *nodes))):
            shared = not view.only_used_by(source, {*inside, *nodes})
            yield evolve(given, x=norm.x, nodes=nodes, before=Sum(norm=norm, residual=residual, out=source if shared else ""))


def _shared_norm(view: RegionView, x: str, inside: frozenset[str], dtype: DType) -> Iterator[Input]:
    """The norm whose result ``x`` is, or a view of it, where others read that too: routers beside experts, attention beside an MLP."""
    source, views = x, list[str]()
    while (node := view.producer(source)) is not None and view.is_free(node):
        views.append(node.name)
        source = node.inputs[0]
    norm = norm_of(view, node) if node is not None else None
    if norm is None or norm.rows != 1 or {view.graph.spec(norm.weight or norm.x).dtype, view.graph.spec(norm.x).dtype} != {dtype}:
        return
    nodes = (norm.node.name, *views)
    if view.deps.is_convex(view.deps.mask((*inside, *nodes))):
        yield Input(x=norm.x, nodes=nodes, norm=norm, normed=source)


def _rounding(view: RegionView, x: str, inside: frozenset[str], dtype: DType) -> tuple[str, tuple[str, ...]] | None:
    """What ``x`` is rounded from, float32, and the nodes that do it; ``Peel.widened`` goes back through casts that round nothing."""
    source, views = view.back(x, set(inside))
    cast = view.producer(source)
    if cast is None or cast.kind != "cast" or dtype is DType.F32 or not view.only_used_by(source, {*inside, *views}):
        return None
    given = view.graph.spec(cast.inputs[0])
    is_wide = given.dtype is DType.F32 and view.graph.spec(source).dtype is dtype and is_contiguous(given)
    return (cast.inputs[0], (cast.name, *views)) if is_wide else None


def _weighted(view: RegionView, product: Node, inside: frozenset[str], dtype: DType) -> Input | None:
    """A float32 row that is normalized, rounded and then multiplied with weights of ``dtype``, as RMS norms of another type are."""
    if product.op != "aten.mul.Tensor" or len(product.inputs) != 2:
        return None
    made = view.graph.spec(product.outputs[0])
    for weight, rounded in (product.inputs, product.inputs[::-1]):
        given = view.graph.spec(weight)
        if given.dtype is not dtype or not view.is_weight(Ref(weight), made.shape[-1]) or made.dtype is not dtype:
            continue
        before = _rounding(view, rounded, inside | {product.name}, dtype)
        if before is None:
            continue
        nodes = (*before[1], product.name)
        source, views = view.back(before[0], {*inside, *nodes})
        node = view.producer(source)
        norm = norm_of(view, node) if node is not None and view.only_used_by(source, {*inside, *nodes, *views}) else None
        is_bare = norm is not None and norm.rows == 1 and norm.columns == made.numel and not norm.weight and norm.kind != "layer"
        if norm is not None and is_bare and view.graph.spec(norm.x).dtype is DType.F32:
            scaled = evolve(norm, weight=weight, kind="rms")
            return Input(x=norm.x, nodes=(norm.node.name, *views, *nodes), norm=scaled)
    return None
