"""Sums over products of two tensors that are larger than both, as the contractions that they write out in full."""

import string
from math import prod

import torch
from attrs import evolve

from ...ir.graph import Argument, Graph, GraphKind, Node, Ref, Value
from ...ops.schema import argument as argument_of
from .importer import spec_of
from .laid_out import without_memory
from .rewrite import View, beside, eliminate_dead_code, rebuild

WIDE = ("float32", "float64")  # in half precision a product is rounded before it is added
LARGER = 4  # times what is read and what is left: less is not worth the sums in another order


def collapse_products(graph: Graph) -> Graph:
    """In prompt chunks one contraction for a sum over a product that is spread out in memory, as scans and expanded heads are written.

    Elsewhere a generated kernel adds what it multiplies, and nothing is spread out.

    Before: ``sum(mul(unsqueeze(C, 3), unsqueeze(B, 2)), [-1])``, of C and B [b, c, l, h, n].
    After: ``contiguous(einsum("abcdef,abcdef->abcde", [unsqueeze(C, 3), unsqueeze(B, 2)]))``, which multiplies matrices.
    """
    if graph.kind is not GraphKind.PREFILL:
        return graph
    view, nodes, values = View(graph), list[Node](), list[Value]()
    for node in graph.nodes:
        made = _contracted(view, node)
        if made is None:
            nodes.append(node)
        else:
            contraction, value = made
            nodes += [contraction, beside(node, node.name, "aten.contiguous.default", "copy", (Ref(value.name),), node.outputs)]
            values.append(value)
    return eliminate_dead_code(rebuild(evolve(graph, values=(*graph.values, *values)), nodes)) if values else graph


def _contracted(view: View, node: Node) -> tuple[Node, Value] | None:
    """The contraction for a sum, and its result; None for anything else."""
    if node.op != "aten.sum.dim_IntList" or argument_of(node, "keepdim") or argument_of(node, "dtype") is not None:
        return None
    product, axes = view.node(node.args[0], "aten.mul.Tensor"), argument_of(node, "dim")
    if product is None or len(product.args) != 2 or not isinstance(axes, tuple) or not axes or not view.private([product], node):
        return None
    operands, shape = product.args, view.shape(Ref(product.outputs[0]))
    if any(view.dtype(one) not in WIDE or view.dtype(one) != view.dtype(operands[0]) for one in operands) or len(shape) > 26:
        return None
    if any(len(view.shape(one)) != len(shape) for one in operands) or not _spread(view, operands, shape, node):
        return None
    labels = string.ascii_lowercase[: len(shape)]
    gone = {int(axis) % len(shape) for axis in axes if isinstance(axis, int)}
    equation = f"{labels},{labels}->{''.join(label for at, label in enumerate(labels) if at not in gone)}"
    name = f"{node.name}.contracted"
    result = torch.einsum(equation, *(without_memory(view.graph.spec(one.value)) for one in operands if isinstance(one, Ref)))
    return beside(node, name, "aten.einsum.default", "einsum", (equation, operands)), Value(name=name, spec=spec_of(result))


def _spread(view: View, operands: tuple[Argument, ...], shape: tuple[int, ...], node: Node) -> bool:
    kept = sum(prod(view.shape(one)) for one in (*operands, Ref(node.outputs[0])))
    return prod(shape) >= LARGER * kept
