"""Graphs of a deep model by a trace of its first layers: extended to all of them, and kept where the whole model calls the same.

decisions/0031 says why such a graph is the one that would have been exported.
"""

from functools import partial

import torch
from attrs import define, field
from torch import Tensor, nn

from ...ir.graph import STATE_PREFIX, Graph, GraphKind, KVSpec, Value, ValueKind
from .attention import DerivedStates, DifferentCalls, DifferentHeads, OwnAttention, Tracing
from .between import Unlike
from .chunk_sizes import chunk_name
from .deepened import deepened
from .export import calls_of_decode, calls_of_graph, calls_of_prefill, export_decode, export_prefill, given_to
from .importer import import_program, spec_of
from .layers import Depth, depth_of, first_layers, of_first_layers
from .left_behind import undisturbed
from .performed import perform, said_alike
from .reached import Call
from .states import Held

_TRACED_OTHERWISE = (OwnAttention, DerivedStates, DifferentHeads, DifferentCalls)


@define
class Deep:
    """The graphs of ``model`` as ``export.py`` traces it, and what it calls, each once."""

    model: nn.Module
    tracing: Tracing
    held: Held
    _hopeless: bool = False  # a graph was not what the model calls: others are not tried
    _depths: dict[KVSpec, Depth | None] = field(factory=dict)
    _called: dict[tuple[KVSpec, int], tuple[Call, ...]] = field(factory=dict)

    def calls(self, kv: KVSpec, tokens: int) -> tuple[Call, ...]:
        """What a chunk of ``tokens`` calls, or the decode step."""
        if (kv, tokens) not in self._called:
            if tokens:
                self._called[kv, tokens] = calls_of_prefill(self.model, kv, tokens, self.tracing, self.held)
            else:
                self._called[kv, tokens] = calls_of_decode(self.model, kv, self.tracing, self.held)
        return self._called[kv, tokens]

    def first(self, kv: KVSpec) -> tuple[nn.Module, KVSpec, Held]:
        """A model of the first layers, of every kind at least one, with what its cache holds; the whole model where that cannot be."""
        try:
            depth = self._depth(kv)
            return (self.model, kv, self.held) if depth is None else (
                first_layers(self.model, depth), *of_first_layers(kv, self.held, depth.shallow))
        except Exception:  # what the model raises is said where it is traced
            return self.model, kv, self.held

    def graph(self, kv: KVSpec, tokens: int) -> Graph | None:
        """The imported graph of a chunk of ``tokens``, or of the decode step; None where the whole model must be traced for it."""
        if self._hopeless:
            return None
        try:
            depth = self._depth(kv)
            return None if depth is None else self._checked(kv, tokens, depth)
        except _TRACED_OTHERWISE:  # so would be the whole model
            return None
        except Exception:  # what the model raises is said where the whole of it is traced
            self._hopeless = True
            return None

    def _checked(self, kv: KVSpec, tokens: int, depth: Depth) -> Graph:
        with undisturbed(self.model):  # a trace leaves tensors of its own in attributes, which one of the whole model would find
            graph = self._extended(kv, tokens, depth)
        calls = calls_of_graph(partial(perform, graph), self.model, kv, tokens, self.held)
        if not said_alike(calls, self.calls(kv, tokens)):
            raise Unlike("the model calls something else")
        return graph

    def _depth(self, kv: KVSpec) -> Depth | None:
        if kv not in self._depths:
            self._depths[kv] = depth_of(self.model, kv, self.held)
        return self._depths[kv]

    def _extended(self, kv: KVSpec, tokens: int, depth: Depth) -> Graph:
        model, (few, held) = first_layers(self.model, depth), of_first_layers(kv, self.held, depth.shallow)
        if tokens:
            exported = export_prefill(model, few, tokens, self.tracing, held)
            graph = import_program(exported, chunk_name(tokens), GraphKind.PREFILL, tokens)
        else:
            exported = export_decode(model, few, self.tracing, held)
            graph = import_program(exported, "decode", GraphKind.DECODE)
        given, made = _given(model, few, tokens, held), [value for value in graph.values if value.kind is ValueKind.INTERMEDIATE]
        if graph.values != (*given, *made):
            raise Unlike("its weights, buffers and inputs are not in their order")
        return deepened(graph, depth, _given(self.model, kv, tokens, self.held))


def _given(model: nn.Module, kv: KVSpec, tokens: int, held: Held) -> tuple[Value, ...]:
    """What a graph of ``model`` is given, as the importer names it: weights, buffers, inputs and states."""
    arguments, names = given_to(kv, tokens, torch.device("meta"), held)
    kinds = [ValueKind.STATE if name.startswith(("session.", "kv.", STATE_PREFIX)) else ValueKind.INPUT for name in names]
    tensors: list[tuple[str, Tensor, ValueKind]] = [(name, tensor, ValueKind.WEIGHT) for name, tensor in model.named_parameters()]
    tensors += [(name, tensor, ValueKind.CONSTANT) for name, tensor in model.named_buffers()]
    return tuple(
        Value(name=name, spec=spec_of(tensor), kind=kind, source="" if kind is ValueKind.INPUT else name)
        for name, tensor, kind in (*tensors, *zip(names, arguments, kinds, strict=True))
    )
