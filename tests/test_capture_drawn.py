"""Drawn models whose layers differ in what they see and cache: logits and tokens at any length are HuggingFace's."""

from typing import Any

import torch
from capture_models import TOKENS, tiny
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from agentcompile_core.ir.graph import DType, GraphSet, Workload
from agentcompile_core.runtime.built_in import PlainKVCache, PythonLoop
from agentcompile_core.runtime.executables import Executables
from agentcompile_core.runtime.program import framework_program
from agentcompile_core.runtime.session import Session
from agentcompile_core.runtime.weights import WeightStore
from agentcompile_core.stages.capture.language_model import capture_language_model

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
                         "max_position_embeddings": 64, **TOKENS}
CONTEXT = 26
KINDS = ("sliding_attention", "full_attention")


@st.composite
def in_chunks(draw: st.DrawFn) -> dict[str, Any]:
    """Layers that see their own chunk and rotate, and layers that see everything and do not; norms of heads, temperatures, experts."""
    layers = draw(st.integers(1, 4))
    return {**SIZES, "num_hidden_layers": layers, "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
            "head_dim": draw(st.sampled_from([4, 8])), "attention_chunk_size": draw(st.integers(2, CONTEXT + 2)),
            "no_rope_layers": draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers)),
            "use_qk_norm": draw(st.booleans()), "attn_temperature_tuning": draw(st.booleans()), "floor_scale": draw(st.integers(1, 9)),
            "num_local_experts": 3, "num_experts_per_tok": draw(st.integers(1, 2)), "intermediate_size_mlp": 24,
            "interleave_moe_layer_step": draw(st.integers(1, 2))}


@st.composite
def of_own_heads(draw: st.DrawFn) -> dict[str, Any]:
    """Layers in windows beside layers that see everything by wider heads, fewer ones, or K as V; the last may read K and V of others."""
    first = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    shared = draw(st.lists(st.sampled_from(sorted({*first, KINDS[1]})), max_size=2)) if KINDS[1] in first else []
    types = [*first, *shared]
    count = 0 if types[-1] == KINDS[0] else len(shared)  # transformers makes the last layer one that sees everything
    kinds = set(types[: len(types) - count])
    return {**SIZES, "num_hidden_layers": len(types), "layer_types": types, "num_kv_shared_layers": count if set(types) == kinds else 0,
            "num_key_value_heads": draw(st.sampled_from([1, 2, 4])), "head_dim": 4, "global_head_dim": draw(st.sampled_from([4, 8, 16])),
            "num_global_key_value_heads": draw(st.sampled_from([None, 1, 2])), "attention_k_eq_v": draw(st.booleans()),
            "sliding_window": draw(st.integers(2, CONTEXT + 2)),  # of 1 transformers' own cache keeps everything
            "hidden_size_per_layer_input": 4 if count else draw(st.sampled_from([0, 4])),  # transformers' own needs it where layers share
            "vocab_size_per_layer_input": 61, "final_logit_softcapping": draw(st.sampled_from([None, 5.0])),
            "enable_moe_block": draw(st.booleans()), "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 8}


def captured(model: nn.Module, chunks: tuple[int, ...]) -> GraphSet:
    graphs = capture_language_model(model, "drawn", Workload(dtype=DType.F32, max_context=CONTEXT, prefill_chunks=chunks))
    assert graphs.graphs, graphs.eager_reason
    return graphs.verify()


def compare(model: nn.Module, chunks: tuple[int, ...], lengths: list[int]) -> None:
    """Logits behind prompts, and of every token behind them that is fed one by one; then greedy tokens to the end of the context."""
    check(model, captured(model, chunks), lengths, off=2e-4)


def check(model: nn.Module, graphs: GraphSet, lengths: list[int], off: float) -> None:
    """The same of graphs that are there."""
    assert graphs.kv is not None
    session = Session(graphs, {g.name: framework_program(g) for g in graphs.graphs}, WeightStore(model, "cpu"), Executables(device="cpu"),
                      kv_state=PlainKVCache().allocate(graphs.kv, "cpu"), decode=PythonLoop())
    for length in lengths:
        tokens = torch.randint(3, 61, (1, CONTEXT - 1), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            wanted = model(tokens, use_cache=False).logits[0, length - 1 :]
        found = [session.read(tokens[:, :length], CONTEXT - length)]
        found += [session.read_next(int(token), length + at) for at, token in enumerate(tokens[0, length:])]
        torch.testing.assert_close(torch.stack(found), wanted, rtol=off, atol=off * float(wanted.std()))
        options = {"max_new_tokens": CONTEXT - length, "do_sample": False, "eos_token_id": None}
        theirs = model.generate(tokens[:, :length], attention_mask=torch.ones(1, length), pad_token_id=0, **options)
        assert torch.equal(session.generate(tokens[:, :length], CONTEXT - length), theirs)


LENGTHS = st.lists(st.integers(1, CONTEXT - 1), min_size=1, max_size=2, unique=True)
CHUNKS = st.sampled_from([(4,), (3, 8), (16,)])
DRAWN = settings(max_examples=5, phases=(Phase.generate,), derandomize=True, database=None, deadline=None,
                 suppress_health_check=list(HealthCheck))


@DRAWN
@given(options=in_chunks(), chunks=CHUNKS, lengths=LENGTHS)
def test_attention_in_chunks_of_any_size(options: dict[str, Any], chunks: tuple[int, ...], lengths: list[int]) -> None:
    size = options["attention_chunk_size"]
    edges = [edge for edge in (size - 1, size, size + 1) if 0 < edge < CONTEXT]
    compare(tiny("llama4_text", options), chunks, [*lengths, *edges])


@DRAWN
@given(options=of_own_heads(), chunks=CHUNKS, lengths=LENGTHS)
def test_layers_with_heads_of_their_own(options: dict[str, Any], chunks: tuple[int, ...], lengths: list[int]) -> None:
    compare(tiny("gemma4_text", options), chunks, lengths)


def test_of_a_deep_model_the_layers_that_differ_are_found() -> None:
    """Its first layers are traced and the rest is made of them: heads of their own are those of every second layer."""
    model = tiny("gemma4_text", {**SIZES, "num_hidden_layers": 10, "layer_types": [*KINDS] * 5, "num_key_value_heads": 2,
                                 "head_dim": 4, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "sliding_window": 7})
    graphs = captured(model, (8,))
    kv = graphs.kv
    assert kv is not None and [one.layer for one in kv.others] == [1, 3, 5, 7, 9] and {one.head_dim for one in kv.others} == {8}
    check(model, graphs, [9], off=1e-3)  # many layers with weights scaled up
