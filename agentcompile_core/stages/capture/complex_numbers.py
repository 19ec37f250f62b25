"""Complex numbers of a traced program become pairs of real ones, before it is imported: graphs hold real tensors alone.

Models rotate so (``polar``, ``view_as_complex``, a product, ``view_as_real``); what they do is the same written out.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.export
from torch import Tensor
from torch.fx import Node as FxNode

from .attention import Unsupported
from .fx_liveness import live_nodes

aten = torch.ops.aten
Part = Any  # an fx node, a number, or None where the part is zero
Pair = tuple[Part, Part]

# Operators that move elements and compute nothing: of a complex tensor they move the elements of either part.
_MOVING = frozenset("""
    alias cat chunk clone contiguous detach expand expand_as flatten index index_select lift_fresh movedim narrow permute repeat reshape
    select slice squeeze stack swapaxes t transpose unflatten unsqueeze view
""".split())  # noqa: SIM905
_CASTS = frozenset({"to", "to_copy", "type_as", "resolve_conj", "resolve_neg"})


def in_real_numbers(program: torch.export.ExportedProgram) -> None:
    """Rewrite the graph of ``program`` so that nothing that a result is made from is a complex tensor, in place.

    Complex inputs, weights and results stay as they are, and the import refuses them.

    Raises:
        Unsupported: an operator on complex numbers that is not known here.
    """
    graph = program.graph
    live = live_nodes(list(graph.nodes))
    if not any(_is_complex(node) for node in graph.nodes if node.name in live):
        return
    pairs: dict[FxNode, Pair] = {}
    for node in list(graph.nodes):
        complex_operands = [one for one in node.all_input_nodes if _is_complex(one)]
        concerned = node.op == "call_function" and node.name in live and (complex_operands or _is_complex(node))
        if not concerned or not pairs.keys() >= set(complex_operands):
            continue
        with graph.inserting_before(node):
            made = _Writer(node, pairs).replace()
        if _is_complex(node):
            pairs[node] = made


def _is_complex(node: FxNode) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _is_ones(node: Any) -> bool:
    return isinstance(node, FxNode) and node.target in (aten.ones_like.default, aten.ones.default)


class _Writer:
    """Writes one operator on complex numbers out in real ones, before its node."""

    def __init__(self, node: FxNode, pairs: dict[FxNode, Pair]) -> None:
        self.node, self.pairs = node, pairs
        schema: Any = getattr(node.target, "_schema", None)
        self.name = schema.name.split("::")[-1].strip("_") if schema is not None else ""

    def replace(self) -> Pair:
        """The parts of the node's result; of a real result the first is it, and stands in its place, by its name where it is returned."""
        pair = self._written()
        if _is_complex(self.node):
            return pair
        made, returned = pair[0], any(user.op == "output" for user in self.node.users)
        if returned:
            made = self._call(aten.alias.default, made)
        self.node.replace_all_uses_with(made)
        if returned:
            made.name, self.node.name = self.node.name, f"{self.node.name}_complex"
        return pair

    def _written(self) -> Pair:
        """The parts of what the node makes; of a real result the first is it."""
        known: dict[str, Callable[..., Pair]] = {
            "polar": self._polar, "complex": lambda real, imaginary: (real, imaginary), "view_as_complex": self._viewed,
            "view_as_real": self._stacked, "real": lambda value: (self._there(self.node.args[0], value[0]), None),
            "imag": lambda value: (self._there(self.node.args[0], value[1]), None),
            "mul": self._product, "add": self._sum, "sub": lambda a, b: self._sum(a, self._negative(b)), "neg": self._negative,
            "conj": lambda value: (value[0], self._scaled(value[1], -1)),
            "conj_physical": lambda value: (value[0], self._scaled(value[1], -1)),
        }
        plain = not self.node.kwargs and len(self.node.args) <= 2
        if self.name in known and plain:
            makes = self.name in ("polar", "complex", "view_as_complex")
            return known[self.name](*(one if makes else self._pair_of(one) for one in self.node.args))
        if self.name in _MOVING:
            return self._moved(0), self._moved(1)
        source: Any = self.node.args[0]
        if self.name in _CASTS and source in self.pairs and _same_type(source, self.node):
            return self.pairs[source]
        dtype = self.node.meta["val"].dtype if _is_complex(self.node) else "complex numbers"
        raise Unsupported(f"it computes in {dtype}, of which {self.node.target} is not understood")

    def _call(self, target: Any, *args: Any, **keywords: Any) -> FxNode:
        """A node of ``target``, with what it makes; it belongs to the module where the original stood."""
        node: FxNode = self.node.graph.call_function(target, args, keywords)
        node.meta = {key: value for key, value in self.node.meta.items() if key != "val"}
        shown: Any = torch.fx.node.map_arg((args, keywords), lambda one: one.meta["val"])
        node.meta["val"] = target(*shown[0], **shown[1])
        return node

    def _pair_of(self, value: Any) -> Pair:
        if isinstance(value, FxNode):
            return self.pairs.get(value, (value, None))
        return (value.real, value.imag or None) if isinstance(value, complex) else (value, None)

    def _there(self, of: Any, part: Part) -> FxNode:
        """A part of the complex ``of`` as a tensor."""
        if isinstance(part, FxNode):
            return part
        like = next(one for one in self.pairs[of] if isinstance(one, FxNode))
        return self._call(aten.full_like.default, like, 0.0 if part is None else part)

    def _polar(self, size: FxNode, angle: FxNode) -> Pair:
        cosine, sine = self._call(aten.cos.default, angle), self._call(aten.sin.default, angle)
        return (cosine, sine) if _is_ones(size) else (self._times(size, cosine), self._times(size, sine))

    def _viewed(self, value: FxNode) -> Pair:
        return self._call(aten.select.int, value, -1, 0), self._call(aten.select.int, value, -1, 1)

    def _stacked(self, value: Pair) -> Pair:
        return self._call(aten.stack.default, [self._there(self.node.args[0], part) for part in value], -1), None

    def _product(self, a: Pair, b: Pair) -> Pair:
        (x, y), (u, v) = a, b
        return self._less(self._times(x, u), self._times(y, v)), self._plus(self._times(x, v), self._times(y, u))

    def _sum(self, a: Pair, b: Pair) -> Pair:
        return self._plus(a[0], b[0]), self._plus(a[1], b[1])

    def _negative(self, value: Pair) -> Pair:
        return self._scaled(value[0], -1), self._scaled(value[1], -1)

    def _scaled(self, part: Part, factor: int) -> Part:
        if part is None or not isinstance(part, FxNode):
            return None if part is None else factor * part
        return self._call(aten.neg.default, part) if factor == -1 else part

    def _times(self, a: Part, b: Part) -> Part:
        if a is None or b is None:
            return None
        if not isinstance(a, FxNode):
            a, b = b, a
        if not isinstance(a, FxNode):
            return a * b
        return a if isinstance(b, int | float) and b == 1 else self._call(aten.mul.Tensor, a, b)

    def _plus(self, a: Part, b: Part) -> Part:
        if a is None or b is None:
            return b if a is None else a
        if not isinstance(a, FxNode):
            a, b = b, a
        return self._call(aten.add.Tensor, a, b) if isinstance(a, FxNode) else a + b

    def _less(self, a: Part, b: Part) -> Part:
        if isinstance(a, FxNode) and b is not None:
            return self._call(aten.sub.Tensor, a, b)
        return self._plus(a, self._scaled(b, -1))

    def _moved(self, part: int) -> Part:
        args, keywords = torch.fx.node.map_arg(
            (self.node.args, self.node.kwargs), lambda one: self._there(one, self.pairs[one][part]) if one in self.pairs else one)
        return self._call(self.node.target, *args, **keywords)


def _same_type(source: Any, node: FxNode) -> bool:
    return bool(source.meta["val"].dtype is node.meta["val"].dtype)
