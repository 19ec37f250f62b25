"""A graph that somebody else may have written, checked before anything of it runs: operators, arguments, writes, shapes and sizes.

Every different call is run once on tensors without data, so that what a node claims about its results is what it computes, and
nothing is allocated that the check has not seen.
"""

from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from ..errors import UsageError, VerificationError
from ..ir.extents import span
from ..ir.graph import Graph, GraphSet, Node, TensorSpec, ValueKind, map_refs
from .allowed import unfit
from .interpreter import compile_nodes
from .overloads import operator_of
from .schema import argument, parameters, verify_canonical

MAX_VALUE_BYTES = 1 << 37  # of one tensor: 128 GiB, the memory of one GPU
_KEPT = (ValueKind.WEIGHT, ValueKind.CONSTANT)
_SOURCED = (*_KEPT, ValueKind.STATE)


def check_graphs(graphs: GraphSet) -> GraphSet:
    """Check every graph; return ``graphs``.

    Raises:
        UsageError: a node calls what no graph may call, or a tensor is larger than 128 GiB.
        VerificationError: a node's arguments, writes, shapes or types are not those of its operator.
    """
    for graph in graphs.graphs:
        for value in graph.values:
            _check_spec(graph, value.name, value.spec)
            if value.kind in _SOURCED and value.source != value.name:
                raise VerificationError(f"graph {graph.name}: {value.name} is read from {value.source!r}; what a graph reads of its model "
                                        "or session is called as it is there")
    verify_canonical(graphs)
    _check_cache(graphs)
    known: dict[Any, tuple[_Made, ...]] = {}
    for graph in graphs.graphs:
        _check_nodes(graph, known)
    return graphs


def _check_spec(graph: Graph, name: str, spec: TensorSpec) -> None:
    if any(extent < 0 for extent in (*spec.shape, *spec.strides)) or (spec.strides and len(spec.strides) != len(spec.shape)):
        raise VerificationError(f"graph {graph.name}: {name} has the shape {spec.shape} and strides {spec.strides}, which no tensor has")
    strided = span(spec.shape, spec.strides) if spec.strides else 0
    if max(spec.nbytes, strided * spec.dtype.bytes) > MAX_VALUE_BYTES:
        raise UsageError(f"graph {graph.name}: {name} has the shape {list(spec.shape)}, {spec.nbytes:.3g} bytes; "
                         f"at most {MAX_VALUE_BYTES} are run")


def _check_cache(graphs: GraphSet) -> None:
    """What is said of the cache is what graphs read and write of it, layer by layer."""
    caches = {v.source: v.spec.shape for graph in graphs.graphs for v in graph.values
              if v.kind is ValueKind.STATE and v.source.startswith("kv.")}
    kv = graphs.kv
    if kv is None or (kv.layers != len({source.rpartition(".")[2] for source in caches})):
        if caches:
            raise VerificationError(f"{len(caches)} caches are read, of {kv.layers if kv else 'no'} layers as the graphs say themselves")
        return
    for part, shapes in (("key", kv.key_shapes), ("value", kv.value_shapes)):
        for layer, shape in enumerate(shapes):
            if caches.get(f"kv.{part}.{layer}", shape) != shape:
                raise VerificationError(f"kv.{part}.{layer} is read as {list(caches[f'kv.{part}.{layer}'])}, and is {list(shape)} "
                                        "as the graphs say themselves")


def _check_nodes(graph: Graph, known: dict[Any, "tuple[_Made, ...]"]) -> None:
    outside = [v for v in graph.values if v.kind is not ValueKind.INTERMEDIATE]
    at = {v.name: _Made(v.spec.shape, getattr(torch, v.spec.dtype.value), v.spec.strides or None, 0, "") for v in outside}
    owner = {v.name: v.name for v in outside}  # whose memory a value is
    kept = {v.name for v in outside if v.kind in _KEPT}
    for node in graph.nodes:
        where = f"graph {graph.name}: node {node.name} ({node.op})"
        _check_call(where, node)
        if any(owner[name] in kept for name in node.mutates):
            raise UsageError(f"{where} writes to a weight of the model; a graph may only compute on its own tensors")
        places = {name: str(place) for place, name in enumerate(node.inputs)}
        key = (node.op, repr([map_refs(a, places) for a in (*node.args, *(v for _, v in node.kwargs))]), tuple(k for k, _ in node.kwargs),
               tuple(at[name].form for name in node.inputs), len(node.outputs))
        if key not in known:
            known[key] = _run(graph, where, node, at)
        for name, made in zip(node.outputs, known[key], strict=True):
            _check_result(graph, where, name, made)
            made = _as_laid_out(graph.spec(name), made)
            at[name], owner[name] = made, owner[node.inputs[int(made.source)]] if made.source else name


def _check_call(where: str, node: Node) -> None:
    why = unfit(node.op, {p.name: argument(node, p.name) for p in parameters(node.op)})
    if why:
        raise UsageError(f"{where} {why}; a graph may only compute on its own tensors")
    if _written(node) != node.mutates:
        raise VerificationError(f"{where} writes {list(_written(node))} and declares {list(node.mutates)}")


@frozen
class _Made:
    """A tensor without data: its form, the bytes behind it, and the place of the input whose memory it is (empty: its own)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None
    nbytes: int
    source: str

    @property
    def form(self) -> tuple[Any, ...]:
        return self.shape, self.dtype, self.strides

    def tensor(self) -> Tensor:
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def _as_laid_out(spec: TensorSpec, made: _Made) -> _Made:
    """Memory of its own lies as the graph says: attention and convolutions lay out their results otherwise on each device.

    A graph that says so falsely raises where it is run: torch checks every call again.
    """
    return evolve(made, strides=spec.strides or None) if not made.source else made


def _run(graph: Graph, where: str, node: Node, at: dict[str, "_Made"]) -> "tuple[_Made, ...]":
    given = {name: at[name].tensor() for name in node.inputs}
    storages = {tensor.untyped_storage()._cdata: str(place) for place, tensor in enumerate(given.values())}
    try:
        found = compile_nodes(graph, [node], device="meta", outputs=node.outputs).run(given)
    except Exception as exc:  # whatever torch raises about arguments that do not fit
        raise VerificationError(f"{where} cannot be called so: {' '.join(str(exc).split())[:200]}") from None
    tensors = [found[name] for name in node.outputs]
    return tuple(_Made(tuple(t.shape), t.dtype, None if t.is_contiguous() else tuple(t.stride()), t.untyped_storage().nbytes(),
                       storages.get(t.untyped_storage()._cdata, "")) for t in tensors)


def _written(node: Node) -> tuple[str, ...]:
    """The values that the operator's schema says are written, in its order."""
    schema = operator_of(node.op)._schema  # type: ignore[attr-defined]
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    found = [getattr(argument(node, name), "value", None) for name in names]
    return tuple(name for name in found if name is not None)


def _check_result(graph: Graph, where: str, name: str, made: "_Made") -> None:
    spec = graph.spec(name)
    if made.nbytes > MAX_VALUE_BYTES:
        raise UsageError(f"{where} needs {made.nbytes:.3g} bytes; at most {MAX_VALUE_BYTES} are run")
    if made.shape != spec.shape or str(made.dtype) != f"torch.{spec.dtype.value}":
        raise VerificationError(f"{where} makes {list(made.shape)} {made.dtype}, and the graph says {list(spec.shape)} {spec.dtype.value}")
