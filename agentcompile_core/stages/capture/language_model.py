"""A HuggingFace causal language model -> GraphSet, or the one sentence that says why it runs on the framework alone."""

from attrs import evolve
from torch import nn

from ...errors import one_line
from ...ir.graph import Graph, GraphKind, GraphSet, KVSpec, Node, Workload
from ...ops.schema import with_argument
from ...plugin.interfaces import LoadedModel
from .attention import DifferentHeads, OwnAttention, Unsupported
from .describe import describe, dtype_of, text_config
from .export import export_decode, export_prefill
from .functional import check_writes, without_writes
from .importer import import_program
from .lookups import look_up_positions, within_tables
from .normalize import drop_noise, normalize
from .own_attention import collapse_attention

ATTENTION = "agentcompile.attention.default"


def capture_language_model(model: nn.Module, name: str, workload: Workload) -> GraphSet:
    """Export the decode step and the prompt chunks of ``model``; nothing is computed, meta parameters are enough.

    Graphs: ``decode``; for each chunk of T tokens ``prefill_<T>`` (continues at any position) and
    ``prefill_<T>_fresh`` (starts at position 0). A model that cannot be expressed gets no graphs and an ``eager_reason``.
    """
    info = describe(LoadedModel(module=model, name=name))
    try:
        kv, graphs = _captured(model, workload)
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


def _captured(model: nn.Module, workload: Workload) -> tuple[KVSpec, list[Graph]]:
    """Traced as it is; where it computes attention itself, or fails because its cache says less than it wants, with marks."""
    try:
        return _capture(model, workload, marked=False)
    except OwnAttention:
        return _capture(model, workload, marked=True)
    except Unsupported:
        raise
    except Exception as first:  # shapes that do not fit, of a bias for keys that are not there
        try:
            return _capture(model, workload, marked=True)
        except Exception:
            raise first from None


def _capture(model: nn.Module, workload: Workload, marked: bool) -> tuple[KVSpec, list[Graph]]:
    kv, decode = _capture_decode(model, workload, marked)
    return kv, [decode, *_capture_prefill(model, workload, kv, marked)]


def _capture_decode(model: nn.Module, workload: Workload, marked: bool = False) -> tuple[KVSpec, Graph]:
    kv = kv_spec(model, workload)
    try:
        exported = export_decode(model, kv, marked)
    except DifferentHeads as exc:  # the configuration names them otherwise; the trace knows
        kv = evolve(kv, kv_heads=exc.kv_heads, head_dim=exc.head_dim)
        exported = export_decode(model, kv, marked)
    return kv, _normal(import_program(exported, "decode", GraphKind.DECODE), model, kv if marked else None)


def _capture_prefill(model: nn.Module, workload: Workload, kv: KVSpec, marked: bool = False) -> list[Graph]:
    graphs = []
    for tokens in sorted({min(chunk, kv.capacity) for chunk in workload.prefill_chunks}):
        graph = import_program(export_prefill(model, kv, tokens, marked), f"prefill_{tokens}", GraphKind.PREFILL, tokens)
        graph = _normal(within_tables(look_up_positions(graph)), model, kv if marked else None)
        graphs += [graph, fresh_variant(graph)]
    return graphs


def _normal(graph: Graph, model: nn.Module, marked: KVSpec | None) -> Graph:
    if marked is not None:
        graph = collapse_attention(drop_noise(without_writes(graph)), marked, dict(model.named_buffers()))
    return check_writes(normalize(graph))


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
    # The decoder of a pair counts its own layers; the other name may be the encoder's.
    layers = getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", None)
    if not isinstance(heads, int) or not isinstance(layers, int) or not heads:
        raise Unsupported("its configuration has no attention heads")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVSpec(layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity=workload.max_context, dtype=dtype_of(model))
