"""What identifies a model, and the workload it gets when none is asked for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve
from torch import nn

from ...ir import serial
from ...ir.graph import DType, GraphSet, ModelInfo, Workload
from ...ops.aliasing import alias_roots
from ...plugin.interfaces import LoadedModel
from .identity import Identity, config_text, identity

DEFAULT_CONTEXT = 8192
_KNOWN: ContextVar[Mapping[int, Identity]] = ContextVar("identities by module", default=MappingProxyType({}))
_LOOKUP, _IDS = "aten.embedding.default", "session.ids"


def describe(loaded: LoadedModel, known: Identity | None = None) -> ModelInfo:
    """What identifies ``loaded``: its identity, equal for the same model with, without and with random weights, on any device.

    ``known`` is its ``identity`` where the caller has it already; within ``known_to_be`` it is known, too.
    """
    model = loaded.module
    known = known or _KNOWN.get().get(id(model))
    config: Any = getattr(model, "config", None)
    inner = text_config(model)
    return ModelInfo(
        name=loaded.name,
        model_type=str(getattr(config, "model_type", "module")),
        config_json=config_text(config),
        digest=serial.digest((known or identity(loaded)).model),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        vocab_size=int(getattr(inner, "vocab_size", 0) or 0),
        limit=limit_of(inner),
    )


@contextmanager
def known_to_be(loaded: LoadedModel, known: Identity) -> Iterator[None]:
    """A block in which ``describe`` is given ``loaded`` as it was when its identity was found."""
    token = _KNOWN.set({id(loaded.module): known})
    try:
        yield
    finally:
        _KNOWN.reset(token)


def of_graphs(graphs: GraphSet, info: ModelInfo) -> GraphSet:
    """``graphs`` of the model that ``info`` describes, with as many token ids as every table has rows in which they are looked up.

    A configuration may name more: of Gemma 3n's some stand for images and sounds, and one of its tables has no rows for them.
    """
    rows = [graph.spec(node.inputs[0]).shape[0] for graph in graphs.graphs for node in graph.nodes if node.op == _LOOKUP
            and graph.by_name[alias_roots(graph)[node.inputs[1]]].source == _IDS]
    return evolve(graphs, model=evolve(info, vocab_size=min((info.vocab_size, *rows)) if info.vocab_size else 0))


def default_workload(model: nn.Module) -> Workload:
    """Batch 1, the element type of the model, a context of min(the model's limit, 8192)."""
    limit = limit_of(text_config(model)) or DEFAULT_CONTEXT
    return Workload(dtype=dtype_of(model), max_context=min(limit, DEFAULT_CONTEXT))


def limit_of(config: Any) -> int:
    """The longest context that a configuration allows; 0 where it names none (XLNet says -1)."""
    return max(0, int(getattr(config, "max_position_embeddings", 0) or 0))


def dtype_of(model: nn.Module) -> DType:
    """Element type of most of the model's floating point numbers; a few (a router, a decay) may be kept in a wider one beside it."""
    counts = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16, torch.float64), 0)
    for parameter in model.parameters():
        if parameter.dtype in counts:
            counts[parameter.dtype] += parameter.numel()
    return DType(str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch."))


def text_config(model: nn.Module) -> Any:
    """The configuration of the language part of ``model``; None where it has none."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
