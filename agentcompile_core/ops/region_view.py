"""What rules need to look around in a region's graph: users, producers, and values seen through views that move nothing."""

from functools import cached_property

from attrs import evolve, frozen

from ..ir.graph import Argument, DType, Graph, Node, Ref, TensorSpec, ValueKind
from ..ir.region import Access, Operand, Role
from .aliasing import is_alias
from .dependency import Dependencies, dependencies
from .operator_names import operator

_FULL_EXTENT = ("slice", "narrow", "select", "split", "split_with_sizes", "chunk", "expand", "view_as", "expand_as")
KERNEL_TYPES = (DType.F16, DType.BF16, DType.F32)


@frozen(kw_only=True, slots=False)
class RegionView:
    """A region's graph with its dependencies."""

    graph: Graph

    @cached_property
    def deps(self) -> Dependencies:
        """Order between its nodes."""
        return dependencies(self.graph)

    def is_free(self, node: Node) -> bool:
        """Whether a node only gives its operand another shape: same elements, same order, contiguous."""
        if len(node.outputs) != 1 or len(node.inputs) != 1:
            return False
        if is_alias(self.graph, node):
            return True
        source, result = self.graph.spec(node.inputs[0]), self.graph.spec(node.outputs[0])
        whole = source.numel == result.numel and source.dtype is result.dtype and is_contiguous(source)
        return node.kind == "view" and operator(node)[0] in _FULL_EXTENT and whole

    def producer(self, value: str) -> Node | None:
        """The node of the region that makes ``value``."""
        return self.graph.producer.get(value)

    def users(self, value: str) -> tuple[Node, ...]:
        """The nodes of the region that read ``value``."""
        return self.graph.users.get(value, ())

    def leaves(self, value: str) -> bool:
        """Whether ``value`` is read outside the region."""
        return value in self.graph.outputs

    def only_used_by(self, value: str, nodes: frozenset[str] | set[str]) -> bool:
        """Whether nothing but ``nodes`` reads ``value``."""
        return not self.leaves(value) and all(user.name in nodes for user in self.users(value))

    def back(self, value: str, inside: set[str]) -> tuple[str, tuple[str, ...]]:
        """Go back through free views that only ``inside`` (and each other) read: the value before them, and the views."""
        views: list[str] = []
        while True:
            node = self.producer(value)
            if node is None or not self.is_free(node) or not self.only_used_by(value, inside | set(views)):
                return value, tuple(views)
            views.append(node.name)
            value = node.inputs[0]

    def forward(self, value: str) -> tuple[str, tuple[str, ...]]:
        """Go on through free views as long as each is the only reader: the value after them, and the views."""
        views: list[str] = []
        while not self.leaves(value):
            users = self.users(value)
            if len(users) != 1 or not self.is_free(users[0]):
                break
            views.append(users[0].name)
            value = users[0].outputs[0]
        return value, tuple(views)

    def is_weight(self, argument: Argument, numel: int | None = None) -> bool:
        """Whether an argument is a weight (or constant) of ``numel`` elements."""
        if not isinstance(argument, Ref) or self.graph.kind_of(argument.value) not in (ValueKind.WEIGHT, ValueKind.CONSTANT):
            return False
        spec = self.graph.spec(argument.value)
        return is_contiguous(spec) and (numel is None or spec.numel == numel)

    def role(self, value: str) -> Role:
        """The role a value has as a read operand; a state that is only read is an input."""
        return {ValueKind.WEIGHT: Role.WEIGHT, ValueKind.CONSTANT: Role.CONSTANT}.get(self.graph.kind_of(value), Role.INPUT)

    def read(self, name: str, *values: str, role: Role | None = None) -> Operand:
        """A read operand called ``name``; several values lie behind each other."""
        kind = role or self.role(values[0])
        return Operand(name=name, role=kind, access=Access.READ, values=values, spec=self._joined(values))

    def write(self, name: str, *values: str) -> Operand:
        """A written operand called ``name``; several values lie side by side."""
        return Operand(name=name, role=Role.OUTPUT, access=Access.WRITE, values=values, spec=self._joined(values))

    def state(self, name: str, value: str) -> Operand:
        """A state operand that is read and written."""
        return Operand(name=name, role=Role.STATE, access=Access.READ_WRITE, values=(value,), spec=packed(self.graph.spec(value)))

    def _joined(self, values: tuple[str, ...]) -> TensorSpec:
        specs = [self.graph.spec(value) for value in values]
        if len(specs) == 1:
            return packed(specs[0])
        # Weights [n, k] join along their rows, vectors [.., n] along their only long axis.
        if self.role(values[0]) is not Role.WEIGHT and any(spec.numel != spec.shape[-1] for spec in specs):
            return TensorSpec(shape=(sum(spec.numel for spec in specs),), dtype=specs[0].dtype)
        axis = 0 if self.role(values[0]) is Role.WEIGHT else len(specs[0].shape) - 1
        shape = list(specs[0].shape)
        shape[axis] = sum(spec.shape[axis] for spec in specs)
        return TensorSpec(shape=tuple(shape), dtype=specs[0].dtype)


def is_contiguous(spec: TensorSpec) -> bool:
    """Whether the elements lie in order without gaps (axes of extent 1 may have any stride)."""
    if not spec.strides:
        return True
    expected = 1
    for extent, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def packed(spec: TensorSpec) -> TensorSpec:
    """The spec without strides, for a tensor known to be contiguous."""
    return evolve(spec, strides=())


def ref(argument: Argument) -> str | None:
    """The value an argument names, or None."""
    return argument.value if isinstance(argument, Ref) else None
