"""How results of calls are laid out: asked of the operators themselves, on tensors without memory."""

import torch
from attrs import evolve

from ...ir.graph import Argument, Graph, Node, Ref, TensorSpec
from ...ops.aliasing import memory_roots
from ...ops.dtypes import torch_dtype
from ...ops.overloads import operator_of
from .importer import spec_of


def without_memory(spec: TensorSpec) -> torch.Tensor:
    """A tensor that lies as ``spec`` says, on the device that has no memory."""
    strides = spec.strides or torch.empty(spec.shape, device="meta").stride()
    return torch.empty_strided(spec.shape, strides, dtype=torch_dtype(spec.dtype), device="meta")


def made_by(node: Node, specs: dict[str, TensorSpec]) -> tuple[TensorSpec, ...] | None:
    """What the results of a call are, by those of its operands; None where that cannot be said."""
    def shown(given: Argument) -> object:
        if isinstance(given, tuple):
            return [shown(one) for one in given]
        if not isinstance(given, Ref):
            return given
        return without_memory(specs[given.value])

    try:
        made = operator_of(node.op)(*map(shown, node.args), **{key: shown(one) for key, one in node.kwargs})
    except Exception:  # arguments that only the interpreter understands, or an operator that cannot do without numbers
        return None
    results = made if isinstance(made, tuple | list) else (made,)
    return tuple(map(spec_of, results)) if all(isinstance(one, torch.Tensor) for one in results) else None


def laid_out_anew(graph: Graph, changed: dict[str, TensorSpec]) -> Graph | None:
    """``graph`` whose values ``changed`` are laid out otherwise, and so what is made of them; None where that changes more than layouts."""
    specs = {value.name: value.spec for value in graph.values} | changed
    new = dict(changed)
    for node in graph.nodes:
        if new.keys().isdisjoint(node.inputs) or not new.keys().isdisjoint(node.outputs):
            continue
        made = None if node.mutates else made_by(node, specs)
        if made is None or len(made) != len(node.outputs):
            return None
        for name, spec in zip(node.outputs, made, strict=True):
            if (spec.shape, spec.dtype) != (specs[name].shape, specs[name].dtype):
                return None
            if spec != specs[name]:
                new[name] = specs[name] = spec
    if not new.keys().isdisjoint(graph.outputs):
        return None  # its caller sees how they lie
    roots = memory_roots(graph)
    if not {roots[name] for node in graph.nodes for name in node.mutates}.isdisjoint(roots[name] for name in new):
        return None  # what was a copy of one may be a view of it now, or the other way round
    return evolve(graph, values=tuple(evolve(value, spec=new[value.name]) if value.name in new else value for value in graph.values))
