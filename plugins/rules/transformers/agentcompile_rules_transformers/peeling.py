"""Going back from an operand through the small nodes that make it, as far as nothing else reads them."""

from collections.abc import Iterable

from attrs import field, frozen

from agentcompile_core.plugin_api import DType, Node, Ref, RegionView, argument, is_contiguous

from .parts import offset_of

SMALLEST_EPS = 2.0**-126  # of float32
SOFTPLUS, SOFTPLUS_FROM = "aten.softplus.default", 20  # from where on torch leaves numbers as they are by default


@frozen
class Peel:
    """A value and the nodes between it and the operand that it makes; all that they make is read by ``inside`` and each other alone."""

    view: RegionView
    value: str
    inside: frozenset[str]
    nodes: tuple[str, ...] = field(default=())

    def taking(self, value: str, nodes: Iterable[str]) -> "Peel | None":
        """Further back at ``value``, behind ``nodes``; None where somebody else reads what they make."""
        taken = tuple(dict.fromkeys((*self.nodes, *nodes)))
        allowed = {*self.inside, *taken}
        made = (out for name in taken for out in self.view.graph.node_by_name[name].outputs)
        if not all(self.view.only_used_by(out, allowed) for out in made):
            return None
        return Peel(self.view, value, self.inside, taken)

    @property
    def producer(self) -> Node | None:
        """What makes the value."""
        return self.view.producer(self.value)

    @property
    def numel(self) -> int:
        """Elements of the value."""
        return self.view.graph.spec(self.value).numel

    def viewed(self) -> "Peel":
        """Before views that show the same elements in the same order, repeated on the way or not."""
        found, at, views = self, self.value, list[str]()
        while (node := self.view.producer(at)) is not None and node.kind == "view" and len(node.outputs) == 1:
            if offset_of(self.view, node, at) != 0:
                break
            views.append(node.name)
            at = node.inputs[0]
            spec = self.view.graph.spec(at)
            same = spec.numel == self.numel and is_contiguous(spec) and is_contiguous(self.view.graph.spec(self.value))
            further = self.taking(at, views) if same else None
            found = further if further is not None else found
        return found

    def before(self, *ops: str) -> "Peel | None":
        """Before the node of one of ``ops`` that makes the value; None where there is none."""
        peel = self.viewed()
        node = peel.producer
        return peel.taking(node.inputs[0], [node.name]) if node is not None and node.op in ops and node.inputs else None

    def widened(self) -> "Peel":
        """Before a cast to float32, if there is one; and views around it."""
        peel = self.viewed()
        node = peel.producer
        wide = node is not None and node.kind == "cast" and self.view.graph.spec(peel.value).dtype is DType.F32
        narrow = peel.taking(node.inputs[0], [node.name]) if node is not None and wide else None
        return peel if narrow is None else narrow.viewed()

    def softened(self) -> "Peel | None":
        """Before a softplus with torch's defaults."""
        found = self.before(SOFTPLUS)
        node = self.viewed().producer
        if found is None or node is None or (argument(node, "beta"), argument(node, "threshold")) != (1, SOFTPLUS_FROM):
            return None
        return found

    def scaled(self) -> "tuple[Peel, float] | None":
        """Before a product with a number, and the number."""
        peel = self.viewed()
        node = peel.producer
        if node is None or node.op not in ("aten.mul.Tensor", "aten.mul.Scalar") or len(node.args) != 2:
            return None
        factor, given = node.args[1], node.args[0]
        if not isinstance(given, Ref) or not isinstance(factor, int | float) or isinstance(factor, bool):
            return None
        further = peel.taking(given.value, [node.name])
        return (further, float(factor)) if further is not None else None

    def summed(self) -> "tuple[Peel, str] | None":
        """Before a sum with another value, and that value."""
        peel = self.viewed()
        node = peel.producer
        if node is None or node.op != "aten.add.Tensor" or argument(node, "alpha") != 1 or len(node.inputs) != 2:
            return None
        further = peel.taking(node.inputs[0], [node.name])
        return (further, node.inputs[1]) if further is not None else None

    def normed(self, columns: int) -> "tuple[Peel, float] | None":
        """Before lines of ``columns`` are divided by their lengths, and what is added to their squares, which is positive.

        That is ``x * rsqrt(sum(x * x, -1, True) + eps)``.
        """
        peel = self.viewed()
        product = peel.producer
        if product is None or product.op != "aten.mul.Tensor" or len(product.inputs) != 2:
            return None
        x, root = product.inputs[0], self.view.producer(product.inputs[1])
        added = self.view.producer(root.inputs[0]) if root is not None and root.op == "aten.rsqrt.default" else None
        if root is None or added is None or added.op not in ("aten.add.Tensor", "aten.add.Scalar") or len(added.inputs) != 1:
            return None
        eps, total = added.args[1], self.view.producer(added.inputs[0])
        if total is None or total.op != "aten.sum.dim_IntList" or not isinstance(eps, float) or argument(added, "alpha") != 1:
            return None
        if eps < SMALLEST_EPS or argument(total, "dtype") is not None or self.view.graph.spec(x).shape[-1:] != (columns,):
            return None
        square, rank = self.view.producer(total.inputs[0]), len(self.view.graph.spec(x).shape)
        if square is None or square.op != "aten.mul.Tensor" or square.args != (Ref(x), Ref(x)):
            return None
        if argument(total, "dim") not in ((-1,), (rank - 1,)) or argument(total, "keepdim") is not True:
            return None
        further = peel.taking(x, [node.name for node in (product, root, added, total, square)])
        return (further, eps) if further is not None else None

