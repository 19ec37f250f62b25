"""A HuggingFace causal language model -> GraphSet, or the one sentence that says why it runs on the framework alone."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve
from torch import nn

from ...errors import one_line
from ...garbage import uncollected
from ...ir.graph import DType, Graph, GraphKind, GraphSet, KVSpec, LayerHeads, Workload
from ...ops.operator_names import ATTENTION, EXPERT_LINEAR
from ...ops.schema import named
from ...plugin.interfaces import LoadedModel
from ...runtime.as_captured import as_captured
from .attention import DerivedStates, DifferentCalls, DifferentHeads, OwnAttention, Tracing, Unsupported
from .buffers import buffers_of
from .chunk_sizes import ChunkSizes, chunk_name, fresh_variant
from .collapse_linear import rows_where_read
from .continued import continue_states, takes_padding
from .deep import Deep
from .derived import cache_what_is_read
from .describe import describe, dtype_of, text_config
from .evaluating import evaluating
from .export import NOTHING, export_decode, export_prefill, quiet
from .filled import join_parts, write_once
from .functional import check_writes, without_writes
from .importer import import_program
from .left_behind import as_it_was
from .lookups import look_up_positions, within_tables
from .normalize import drop_noise, normalize
from .one_row import keep_row_read
from .own_attention import collapse_attention
from .own_states import with_own_states
from .rotary import frequencies_of
from .states import Held, check_kept, check_states, held_by

# Rows of a chunk where there are experts: each row has the results of all that it chose in memory, of both of their layers.
MOST_WITH_EXPERTS = 4096
# Where no library computes attention all scores of a chunk may lie in memory, as where graphs are compared with their module.
MOST_WITH_SCORES = 2048
MOST_WITH_RECURRENCES = 1024  # one token follows another there: more rows at a time gain little
# Chunks that take no padding: the model's own forward, with which they are compared, takes gigabytes that grow with them.
MOST_WITH_STATES, SMALL = 512, (16, 64)
UNROLLED = (8, 32)  # tokens of chunks that hold their recurrence once for each: their graphs grow, and all weights are read for each chunk


def capture_language_model(model: nn.Module, name: str, workload: Workload) -> GraphSet:
    """Export the decode step and the prompt chunks of ``model``; nothing is computed, meta parameters are enough.

    Graphs: ``decode``; for each chunk of T tokens ``prefill_<T>`` (continues at any position) and
    ``prefill_<T>_fresh`` (starts at position 0). A model that cannot be expressed gets no graphs and an ``eager_reason``.
    """
    info = describe(LoadedModel(module=model, name=name))
    notes: tuple[str, ...] = ()
    left: list[str] = []
    try:
        with as_captured(), uncollected(), as_it_was(model) as left:
            kv, graphs, held = _held_and_captured(model, workload)
        graphs = rows_where_read(graphs)
        frequencies = frequencies_of(model, graphs)
        if held.whole_chunks:
            notes = _notes_on_prompts(info.model_type, graphs, workload)
    except Exception as exc:  # whatever transformers or torch.export raise, the model still runs
        keeps = f"; its modules keep tensors of their own between calls ({left[0]})" if left else ""
        reason = f"{info.model_type} runs on the framework: {why_not(exc)}{keeps}"
        return GraphSet(model=info, workload=workload, graphs=(), eager_reason=reason)
    return GraphSet(model=info, workload=workload, graphs=tuple(graphs), kv=kv, whole_chunks=held.whole_chunks, notes=notes,
                    frequencies=frequencies)


def _notes_on_prompts(model_type: str, graphs: list[Graph], workload: Workload) -> tuple[str, ...]:
    size, asked = max((graph.tokens for graph in graphs[1:]), default=1), min(MOST_WITH_STATES, *workload.prefill_chunks)
    if size >= asked or asked >= workload.max_context:
        return ()
    return (f"prompts of {model_type} run {size} token{'s' * (size > 1)} at a time: a chunk of its graph grows with every token",)


def why_not(exc: Exception) -> str:
    """One clause that says why a capture failed."""
    if isinstance(exc, Unsupported):
        return str(exc)
    if "DataDependent" in type(exc).__name__:
        return "its Python code branches on the values of tensors"
    return f"it cannot be exported ({type(exc).__name__}: {one_line(str(exc))})"


def _held_and_captured(model: nn.Module, workload: Workload) -> tuple[KVSpec, list[Graph], Held]:
    """Traced with what transformers' cache holds, and where that fails once more with what the model keeps for itself besides."""
    held = Held()
    try:
        with quiet(), evaluating(model):
            held = held_by(model)
        return _captured(model, workload, held)
    except Exception as first:
        try:
            with quiet(), evaluating(model):
                own = with_own_states(model, held)
        except Exception:  # nothing is known of it
            raise first from None
        if own is held:
            raise
        return _captured(model, workload, own)


def _captured(model: nn.Module, workload: Workload, held: Held) -> tuple[KVSpec, list[Graph], Held]:
    """Traced as it is; where it computes attention itself, or K and V from what it caches, with marks.

    A trace may also fail because its cache says less than the model wants: shapes of a bias for keys that are not there.
    """
    try:
        return _capture(model, workload, Tracing.PLAIN, held)
    except OwnAttention:
        return _capture(model, workload, Tracing.OWN, held)
    except DerivedStates:
        return _capture(model, workload, Tracing.DERIVED, held)
    except Unsupported:
        raise
    except Exception as first:
        try:
            return _capture(model, workload, Tracing.OWN, held)
        except Exception:
            raise first from None


def _capture(model: nn.Module, workload: Workload, tracing: Tracing, held: Held) -> tuple[KVSpec, list[Graph], Held]:
    deep = Deep(model, tracing, held)
    kv, decode = _capture_decode(deep, workload)
    if held.whole_chunks and _takes_padding(deep, kv):
        held = evolve(held, padded=True)
        deep = Deep(model, tracing, held)
    if not held.whole_chunks:
        return kv, [decode, *_capture_prefill(deep, kv, workload.prefill_chunks)], held
    try:
        return kv, [decode, *_capture_prefill(deep, kv, _whole_chunks(deep, kv, workload.prefill_chunks))], held
    except (OwnAttention, DerivedStates):
        raise
    except Unsupported:  # the steps alone serve prompts too
        return kv, [decode], held


def _takes_padding(deep: Deep, kv: KVSpec) -> bool:
    """Whether the first layers of a chunk, whose recurrences are told which rows are tokens, leave all states alone behind these."""
    model, few, held = deep.first(kv)
    padded = evolve(held, padded=True)
    try:
        chunk = import_program(export_prefill(model, few, 3, deep.tracing, padded), "chunk", GraphKind.PREFILL, 3)
    except Exception:  # what is wrong with chunks is said where they are captured
        return False
    return takes_padding(_normal(chunk, model, few, deep.tracing, padded), padded)


def _whole_chunks(deep: Deep, kv: KVSpec, asked: Sequence[int]) -> Sequence[int]:
    """Sizes of chunks that take no padding: small ones too, since what no chunk holds goes through the decode step token by token."""
    largest = max(asked, default=0)
    model, few, held = deep.first(kv)
    if _grows(model, few, deep.tracing, held):
        sizes = [min(size, largest) for size in UNROLLED]
    else:
        sizes = [size for size in asked if size <= MOST_WITH_STATES] + [size for size in SMALL if size < largest]
    return [size for size in sizes if 1 < size < kv.capacity]


def _capture_decode(deep: Deep, workload: Workload) -> tuple[KVSpec, Graph]:
    kv, decode = _imported(deep, kv_spec(deep.model, workload, deep.held))
    return kv, _normal(decode, deep.model, kv, deep.tracing, deep.held)


def _imported(deep: Deep, kv: KVSpec) -> tuple[KVSpec, Graph]:
    """The decode step, and the cache that it showed: a configuration may name its heads otherwise, or not how often it attends."""
    for _ in range(3):
        try:
            return kv, _decode(deep, kv)
        except DifferentHeads as exc:
            kv = _with_heads(kv, exc.found)
        except DifferentCalls as exc:
            kv = evolve(kv, layers=exc.calls)
    return kv, _decode(deep, kv)


def _with_heads(kv: KVSpec, found: Iterable[LayerHeads]) -> KVSpec:
    """``kv`` with other heads in some layers; the usual ones are those that most layers have."""
    heads = {one.layer: one for one in (*kv.heads, *found)}
    sizes = Counter((one.kv_heads, one.head_dim, one.value_dim) for one in heads.values())
    kv_heads, head_dim, value_dim = sizes.most_common(1)[0][0]
    usual = evolve(kv, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, others=())
    return evolve(usual, others=tuple(heads[one.layer] for one in usual.heads if heads[one.layer] != one))


def _decode(deep: Deep, kv: KVSpec) -> Graph:
    found = deep.graph(kv, 0)
    return found or import_program(export_decode(deep.model, kv, deep.tracing, deep.held), "decode", GraphKind.DECODE)


def _grows(model: nn.Module, kv: KVSpec, tracing: Tracing, held: Held) -> bool:
    """Whether a prompt chunk is a loop over its tokens, which a graph holds once for each."""
    sizes = {len(export_prefill(model, kv, tokens, tracing, held).program.graph.nodes) for tokens in (2, 3)}
    return len(sizes) > 1


def _capture_prefill(deep: Deep, kv: KVSpec, chunks: Sequence[int]) -> list[Graph]:
    model, tracing, held = deep.model, deep.tracing, deep.held

    def exported(tokens: int) -> Graph:
        program = export_prefill(model, kv, tokens, tracing, held)
        return import_program(program, chunk_name(tokens), GraphKind.PREFILL, tokens)

    sizes = sorted({min(chunk, kv.capacity) for chunk in chunks})
    found = ChunkSizes(lambda tokens: deep.graph(kv, tokens) or exported(tokens), lambda tokens: deep.calls(kv, tokens))
    graphs: list[Graph] = []
    for tokens in sizes:
        most = _most_rows(graphs[-1], held) if graphs else sizes[0]
        if tokens > most:
            break
        graph = found.derived(tokens, sizes[0], [size for size in sizes if size <= most])
        graph = keep_row_read(continue_states(_normal(within_tables(look_up_positions(graph)), model, kv, tracing, held), held))
        graphs += [graph, fresh_variant(graph)]
    return graphs


def _most_rows(graph: Graph, held: Held) -> int:
    """The largest chunk of a model of which ``graph`` is a smaller one."""
    experts = any(node.op == EXPERT_LINEAR for node in graph.nodes)
    calls = [(node, named(node.op, node.args, dict(node.kwargs))) for node in graph.nodes if node.op == ATTENTION]
    plain = all(not any(call.get(name) for name in ("window", "chunk", "softcap", "sinks", "slopes")) for _, call in calls)
    halves = all(graph.spec(node.inputs[0]).dtype in (DType.F16, DType.BF16) for node, _ in calls)
    alike = all(graph.spec(node.inputs[0]).shape[-1] == graph.spec(node.outputs[0]).shape[-1] for node, _ in calls)
    by_library = calls and plain and halves and alike and not held.states
    recurrences = MOST_WITH_RECURRENCES if held.is_recurrent else sys.maxsize
    return min(MOST_WITH_EXPERTS if experts else sys.maxsize, sys.maxsize if by_library else MOST_WITH_SCORES, recurrences)


def _normal(graph: Graph, model: nn.Module, kv: KVSpec, tracing: Tracing, held: Held = NOTHING) -> Graph:
    if tracing is not Tracing.PLAIN:
        graph = drop_noise(join_parts(without_writes(graph)))
    if tracing is Tracing.OWN:
        graph = collapse_attention(graph, kv, buffers_of(model))
    elif tracing is Tracing.DERIVED:
        graph = cache_what_is_read(graph)
    return check_kept(check_states(check_writes(normalize(write_once(graph))), held), held, kv)


def kv_spec(model: nn.Module, workload: Workload, held: Held = NOTHING) -> KVSpec:
    """The KV cache that the configuration of ``model`` describes; of no layers where it has states instead.

    Raises:
        Unsupported: it has neither attention heads nor states.
    """
    config = text_config(model)
    if held.states and not held.attending:
        return KVSpec(layers=0, kv_heads=1, head_dim=1, capacity=workload.max_context, dtype=dtype_of(model))
    heads = _said(config, "num_attention_heads")
    # The decoder of a pair counts its own layers; the other name may be the encoder's.
    layers = getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", None)
    if not isinstance(heads, int) or not isinstance(layers, int) or not heads:
        raise Unsupported("its configuration has no attention heads")
    layers = layers if held.attending is None else len(held.attending)
    kv_heads = _said(config, "num_key_value_heads") or heads
    head_dim = _said(config, "head_dim") or config.hidden_size // heads
    return KVSpec(layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity=workload.max_context, dtype=dtype_of(model))


def _said(config: Any, name: str) -> Any:
    """What a configuration says of all layers; None where it says nothing, or refuses since layers differ: the trace shows which do."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None
