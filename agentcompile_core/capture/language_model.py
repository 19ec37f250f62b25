"""A HuggingFace causal language model -> GraphSet, or the one sentence that says why it runs on the framework alone."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve
from torch import nn

from .. import serial
from ..graph import DType, Graph, GraphKind, GraphSet, KVSpec, ModelInfo, Node, Workload
from .attention import DifferentHeads, Unsupported
from .export import export_decode, export_prefill
from .importer import import_program, spec_of
from .normalize import normalize

DEFAULT_CONTEXT = 8192
# Keys of a configuration that say where it came from, not what it computes.
_INCIDENTAL = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache", "auto_map")


def describe(model: nn.Module, name: str) -> ModelInfo:
    """What identifies ``model``: its configuration and the names, shapes and types of its parameters."""
    config = getattr(model, "config", None)
    facts: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    facts = {key: value for key, value in facts.items() if key not in _INCIDENTAL}
    text = json.dumps(facts, sort_keys=True, default=str)
    specs = [[key, serial.unstructure(spec_of(p))] for key, p in model.named_parameters()]
    inner = _text_config(model)
    return ModelInfo(
        name=name,
        model_type=str(getattr(config, "model_type", "module")),
        config_json=text,
        digest=serial.digest(text, specs),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        vocab_size=int(getattr(inner, "vocab_size", 0) or 0),
        limit=int(getattr(inner, "max_position_embeddings", 0) or 0),
    )


def default_workload(model: nn.Module) -> Workload:
    """Batch 1, the element type of the model, a context of min(the model's limit, 8192)."""
    limit = int(getattr(_text_config(model), "max_position_embeddings", 0) or DEFAULT_CONTEXT)
    return Workload(dtype=dtype_of(model), max_context=min(limit, DEFAULT_CONTEXT))


def dtype_of(model: nn.Module) -> DType:
    """Element type of the model's floating point parameters (the first one's)."""
    found = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return DType(str(found).removeprefix("torch."))


def capture_language_model(model: nn.Module, name: str, workload: Workload) -> GraphSet:
    """Export the decode step and the prompt chunks of ``model``; nothing is computed, meta parameters are enough.

    Graphs: ``decode``; for each chunk of T tokens ``prefill_<T>`` (continues at any position) and
    ``prefill_<T>_fresh`` (starts at position 0). A model that cannot be expressed gets no graphs and an ``eager_reason``.
    """
    info = describe(model, name)
    try:
        kv, decode = _capture_decode(model, workload)
        graphs = [decode, *_capture_prefill(model, workload, kv)]
    except Unsupported as exc:
        return GraphSet(model=info, workload=workload, graphs=(), eager_reason=f"{info.model_type} runs on the framework: {exc}")
    except Exception as exc:  # noqa: BLE001  whatever transformers or torch.export raise, the model still runs
        what = " ".join(str(exc).split())[:160]
        return GraphSet(
            model=info, workload=workload, graphs=(),
            eager_reason=f"{info.model_type} runs on the framework: it cannot be exported ({type(exc).__name__}: {what})",
        )
    return GraphSet(model=info, workload=workload, graphs=tuple(graphs), kv=kv)


def _capture_decode(model: nn.Module, workload: Workload) -> tuple[KVSpec, Graph]:
    kv = kv_spec(model, workload)
    try:
        exported = export_decode(model, kv)
    except DifferentHeads as exc:  # the configuration names them otherwise; the trace knows
        kv = evolve(kv, kv_heads=exc.kv_heads, head_dim=exc.head_dim)
        exported = export_decode(model, kv)
    return kv, normalize(import_program(exported, "decode", GraphKind.DECODE))


def _capture_prefill(model: nn.Module, workload: Workload, kv: KVSpec) -> list[Graph]:
    graphs = []
    for tokens in sorted({min(chunk, kv.capacity) for chunk in workload.prefill_chunks}):
        exported = export_prefill(model, kv, tokens)
        graph = normalize(import_program(exported, f"prefill_{tokens}", GraphKind.PREFILL, tokens))
        graphs += [graph, fresh_variant(graph)]
    return graphs


def fresh_variant(graph: Graph) -> Graph:
    """The same chunk under the promise that it starts at position 0: attention looks at the new K and V only."""
    def promised(node: Node) -> Node:
        if node.kind != "attention":
            return node
        return evolve(node, args=node.args[:10], kwargs=(*((k, v) for k, v in node.kwargs if k != "fresh"), ("fresh", True)))

    return evolve(graph, name=f"{graph.name}_fresh", nodes=tuple(promised(node) for node in graph.nodes))


def kv_spec(model: nn.Module, workload: Workload) -> KVSpec:
    """The KV cache that the configuration of ``model`` describes.

    Raises:
        Unsupported: it has no attention heads.
    """
    config = _text_config(model)
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(heads, int) or not isinstance(layers, int) or not heads:
        raise Unsupported("its configuration has no attention heads")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVSpec(layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity=workload.max_context, dtype=dtype_of(model))


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
