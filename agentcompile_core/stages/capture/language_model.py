"""A HuggingFace causal language model -> GraphSet, or the one sentence that says why it runs on the framework alone."""

from attrs import evolve
from torch import nn

from ...errors import one_line
from ...ir.graph import Graph, GraphKind, GraphSet, KVSpec, Node, Workload
from ...ops.schema import with_argument
from ...plugin.interfaces import LoadedModel
from .attention import DifferentHeads, Unsupported
from .describe import describe, dtype_of, text_config
from .export import export_decode, export_prefill
from .functional import check_writes
from .importer import import_program
from .normalize import normalize

ATTENTION = "agentcompile.attention.default"


def capture_language_model(model: nn.Module, name: str, workload: Workload) -> GraphSet:
    """Export the decode step and the prompt chunks of ``model``; nothing is computed, meta parameters are enough.

    Graphs: ``decode``; for each chunk of T tokens ``prefill_<T>`` (continues at any position) and
    ``prefill_<T>_fresh`` (starts at position 0). A model that cannot be expressed gets no graphs and an ``eager_reason``.
    """
    info = describe(LoadedModel(module=model, name=name))
    try:
        kv, decode = _capture_decode(model, workload)
        graphs = [decode, *_capture_prefill(model, workload, kv)]
    except Exception as exc:  # whatever transformers or torch.export raise, the model still runs
        reason = f"{info.model_type} runs on the framework: {why_not(exc)}"
        return GraphSet(model=info, workload=workload, graphs=(), eager_reason=reason)
    return GraphSet(model=info, workload=workload, graphs=tuple(graphs), kv=kv)


def why_not(exc: Exception) -> str:
    """One clause that says why a capture failed."""
    if isinstance(exc, Unsupported):
        return str(exc)
    if "DataDependent" in type(exc).__name__:
        return "its Python code branches on the values of tensors"
    return f"it cannot be exported ({type(exc).__name__}: {one_line(str(exc))})"


def _capture_decode(model: nn.Module, workload: Workload) -> tuple[KVSpec, Graph]:
    kv = kv_spec(model, workload)
    try:
        exported = export_decode(model, kv)
    except DifferentHeads as exc:  # the configuration names them otherwise; the trace knows
        kv = evolve(kv, kv_heads=exc.kv_heads, head_dim=exc.head_dim)
        exported = export_decode(model, kv)
    return kv, check_writes(normalize(import_program(exported, "decode", GraphKind.DECODE)))


def _capture_prefill(model: nn.Module, workload: Workload, kv: KVSpec) -> list[Graph]:
    graphs = []
    for tokens in sorted({min(chunk, kv.capacity) for chunk in workload.prefill_chunks}):
        exported = export_prefill(model, kv, tokens)
        graph = check_writes(normalize(import_program(exported, f"prefill_{tokens}", GraphKind.PREFILL, tokens)))
        graphs += [graph, fresh_variant(graph)]
    return graphs


def fresh_variant(graph: Graph) -> Graph:
    """The same chunk under the promise that it starts at position 0: attention looks at the new K and V only."""
    def promised(node: Node) -> Node:
        return with_argument(node, "fresh", True) if node.op == ATTENTION else node

    return evolve(graph, name=f"{graph.name}_fresh", nodes=tuple(promised(node) for node in graph.nodes))


def kv_spec(model: nn.Module, workload: Workload) -> KVSpec:
    """The KV cache that the configuration of ``model`` describes.

    Raises:
        Unsupported: it has no attention heads.
    """
    config = text_config(model)
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(heads, int) or not isinstance(layers, int) or not heads:
        raise Unsupported("its configuration has no attention heads")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVSpec(layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity=workload.max_context, dtype=dtype_of(model))
