"""Every architecture either is captured and then speaks exactly as HuggingFace does, or says in one sentence why not."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from capture_models import GPT, SIZES, TOKENS, WINDOWED, WORKLOAD, generate, greedy, tiny, without
from torch import nn

from agentcompile_core.ir.graph import DType, GraphKind, GraphSet, ValueKind, Workload
from agentcompile_core.ops.schema import argument
from agentcompile_core.stages.capture.language_model import capture_language_model

PROMPT = torch.tensor([[3, 17, 90, 4, 55, 21, 8, 100, 63, 2, 41]])
CAPTURED = {
    "qwen3": SIZES,
    "llama": SIZES,
    "qwen2": without("head_dim"),
    "mistral": WINDOWED,
    "gemma2": WINDOWED,
    "gemma3_text": WINDOWED,
    "gpt2": GPT,
    "gpt_neox": without("num_key_value_heads", "head_dim"),
    "phi": without("head_dim"),
    "granite": {**without("head_dim"), "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "cohere": without("head_dim"),
    "cohere2": WINDOWED,
    "starcoder2": {**without("head_dim"), "sliding_window": 5},
    "olmo2": without("head_dim"),
    "stablelm": without("head_dim"),
    "glm": SIZES,
    "nanochat": without("head_dim"),
}
IN_CHUNKS: dict[str, dict[str, Any]] = {  # of positions: layers see their own chunk, or everything and rotate nothing
    "llama4_text": {**SIZES, "num_local_experts": 2, "attention_chunk_size": 6, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0],
                    "floor_scale": 4},
}
SLIDING, FULL = "sliding_attention", "full_attention"
OWN_HEADS: dict[str, dict[str, Any]] = {  # in some layers, which may attend to K and V of earlier ones
    "gemma4_text": {**WINDOWED, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "global_head_dim": 16,
                    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
    "gemma4": {  # which reads images, too
        "text_config": {**WINDOWED, "layer_types": [SLIDING, FULL], "global_head_dim": 16, "hidden_size_per_layer_input": 8,
                        "vocab_size_per_layer_input": 128, "pad_token_id": 0},
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "num_key_value_heads": 2, "head_dim": 8},
    },
}
EXPERTS: dict[str, dict[str, Any]] = {  # mixtures of experts
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen2_moe": {**without("head_dim"), "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 24},
    "phimoe": {**without("head_dim"), "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
WITHOUT_ITS_HELP: dict[str, dict[str, Any]] = {  # of the model: it takes no positions, or computes attention itself
    # these take no positions, or count them from a cache that they are handed
    "opt": {"vocab_size": 128, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 20, "word_embed_proj_dim": 32, **TOKENS},
    "bart": {"vocab_size": 128, "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "decoder_attention_heads": 4,
             "decoder_ffn_dim": 48, "max_position_embeddings": 20, **TOKENS, "pad_token_id": 0},
    # or count from there to the end of what they read, some for attention of their own
    "roformer": {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "max_position_embeddings": 64, "is_decoder": True, **TOKENS, "pad_token_id": 0},
    "trocr": {"vocab_size": 128, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
              "max_position_embeddings": 64, **TOKENS, "pad_token_id": 0},
    "mvp": {"vocab_size": 128, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48, "max_position_embeddings": 64, **TOKENS, "pad_token_id": 0},
    # or make a mask of as many ones; or say that their attention is not causal, beside a mask that is
    "rembert": {"vocab_size": 128, "hidden_size": 32, "input_embedding_size": 16, "output_embedding_size": 24, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "is_decoder": True, **TOKENS,
                "pad_token_id": 0},
    "bigbird_pegasus": {"vocab_size": 128, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4,
                        "decoder_ffn_dim": 48, "max_position_embeddings": 64, **TOKENS, "pad_token_id": 0},
    # and these compute attention themselves
    "gptj": {**GPT, "rotary_dim": 8},
    "codegen": {**GPT, "rotary_dim": 4},
    "falcon": {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 48,
               "max_position_embeddings": 64, **TOKENS},
    "xglm": {"vocab_size": 128, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64,
             **TOKENS, "pad_token_id": 0},
    # whose masks are buffers of their own, or whose scores fall with distance
    "gpt_neo": {"vocab_size": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                "window_size": 5, "max_position_embeddings": 64, **TOKENS},
    "bloom": {"vocab_size": 128, "hidden_size": 32, "n_layer": 2, "n_head": 4, **TOKENS},
    # whose K and V are computed from what is cached
    "diffllama": {**without("head_dim"), "num_key_value_heads": 2},
    "deepseek_v3": {**without("num_key_value_heads", "head_dim"), "num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                    "v_head_dim": 12, "kv_lora_rank": 16, "q_lora_rank": 16, "first_k_dense_replace": 2},
    "mpt": {"vocab_size": 128, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, **TOKENS},
}
REFUSED = {
    "xlnet": ({"vocab_size": 128, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, **TOKENS}, "takes no past_key_values"),
    "rwkv": ({"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "intermediate_size": 48, **TOKENS},
             "takes no past_key_values"),
    "doge": ({**SIZES, "keep_window_size": 8}, "makes an attention mask of its own"),
    "moshi": ({**without("intermediate_size"), "ffn_dim": 48, "sliding_window": 16}, "keeps the last 16 positions"),
}


@cache
def captured(model_type: str) -> tuple[nn.Module, GraphSet]:
    """A model and its graphs, of which some are looked at more than once."""
    model = tiny(model_type, {**CAPTURED, **IN_CHUNKS, **OWN_HEADS, **EXPERTS, **WITHOUT_ITS_HELP}[model_type])
    return model, capture_language_model(model, model_type, WORKLOAD).verify()


@pytest.mark.parametrize("model_type", [*CAPTURED, *IN_CHUNKS, *OWN_HEADS, *EXPERTS, *WITHOUT_ITS_HELP])
def test_captured_model_speaks_as_huggingface_does(model_type: str) -> None:
    model, graphs = captured(model_type)
    assert graphs.eager_reason == ""
    want, want_logits = greedy(model, PROMPT, 8)
    found, logits, env = generate(model, graphs, PROMPT, 8)
    assert found == want
    torch.testing.assert_close(logits, want_logits, rtol=1e-4, atol=1e-4 * float(want_logits.std()))
    # The device's own history agrees with what was seen step by step, and nothing else was written.
    assert env["session.history"][11:19].tolist() == want and int(env["session.position"]) == 18
    assert bool((env["session.history"][19:] == -1).all())


def test_layers_that_run_several_times_have_k_and_v_of_each_time() -> None:
    """Dory's inner layers run in loops: its configuration says 4 layers, and its cache gets more of them."""
    model = tiny("dory", {**SIZES, "num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3,
                          "sliding_window": 5})
    graphs = capture_language_model(model, "dory", WORKLOAD).verify()
    assert graphs.kv is not None and graphs.kv.layers == 1 + 3 * 2 + 1
    assert generate(model, graphs, PROMPT, 8)[0] == greedy(model, PROMPT, 8)[0]


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_model_says_why(model_type: str, capfd: pytest.CaptureFixture[str]) -> None:
    options, reason = REFUSED[model_type]
    graphs = capture_language_model(tiny(model_type, options), model_type, WORKLOAD)
    assert graphs.graphs == () and graphs.kv is None
    assert reason in graphs.eager_reason and "\n" not in graphs.eager_reason and len(graphs.eager_reason) < 260
    assert "torch.ops" not in "".join(capfd.readouterr()), "torch.export's own noise reached the terminal"


def test_qwen3_is_made_of_whole_concepts() -> None:
    """One node per norm, rotation and projection: what region rules rely on."""
    graphs = captured("qwen3")[1]
    decode = graphs.of_kind(GraphKind.DECODE)[0]
    kinds = Counter(node.kind for node in decode.nodes)
    assert kinds == {
        "embedding": 1, "rotary_embedding": 1, "rms_norm": 9, "linear": 15, "rope": 4, "attention": 2, "silu": 2, "mul": 2, "add": 4,
        "argmax": 1, "advance": 1, "view": kinds["view"],
    }
    assert [n.layer for n in decode.nodes if n.kind == "attention"] == [0, 1]
    assert next(n for n in decode.nodes if n.kind == "linear").module == "model.layers.0.self_attn.q_proj"
    assert decode.inputs == () and len(decode.outputs) == 2
    assert decode.spec(decode.outputs[0]).shape == (1, 1, 128) and decode.spec(decode.outputs[1]).dtype is DType.I64


def test_states_and_effects_are_declared() -> None:
    graphs = captured("llama")[1]
    decode = graphs.of_kind(GraphKind.DECODE)[0]
    states = {v.source for v in decode.values if v.kind is ValueKind.STATE}
    assert states == {"session.ids", "session.position", "session.history", *(f"kv.{p}.{i}" for p in ("key", "value") for i in (0, 1))}
    assert decode.spec("kv.key.1").shape == (1, 32, 2, 8) and all(v.spec.strides == () for v in decode.values if v.kind is ValueKind.STATE)
    attention = next(n for n in decode.nodes if n.kind == "attention")
    assert attention.mutates == ("kv.key.0", "kv.value.0")
    assert next(n for n in decode.nodes if n.kind == "advance").mutates == ("session.ids", "session.position", "session.history")
    for prefill in graphs.of_kind(GraphKind.PREFILL):
        assert set(prefill.inputs) == {"prompt", "start", "length"}
        head = [n for n in prefill.nodes if n.kind == "linear"][-1]
        assert prefill.spec(head.outputs[0]).shape == (1, 1, 128), "the head must see one row"


def test_tied_weights_appear_once() -> None:
    graphs = capture_language_model(tiny("llama", {**SIZES, "tie_word_embeddings": True}), "llama", WORKLOAD)
    weights = {v.source for v in graphs.of_kind(GraphKind.DECODE)[0].values if v.kind is ValueKind.WEIGHT}
    assert "model.embed_tokens.weight" in weights and "lm_head.weight" not in weights


def test_window_softcap_and_fresh_reach_the_operator() -> None:
    graphs = captured("gemma2")[1]
    calls = [n for n in graphs.of_kind(GraphKind.DECODE)[0].nodes if n.kind == "attention"]
    assert sorted(argument(n, "window") for n in calls) == [0, 5] and all(argument(n, "softcap") == 50.0 for n in calls)
    fresh = next(g for g in graphs.graphs if g.name == "prefill_8_fresh")
    assert all(argument(n, "fresh") is True for n in fresh.nodes if n.kind == "attention")


@pytest.mark.parametrize(("size", "chunks"), [(6, [6, 0]), (31, [31, 0]), (32, [0, 0]), (8192, [0, 0])])
def test_chunks_reach_the_operator_where_the_context_has_several(size: int, chunks: list[int]) -> None:
    model = tiny("llama4_text", {**IN_CHUNKS["llama4_text"], "attention_chunk_size": size})
    graphs = capture_language_model(model, "llama4", WORKLOAD)
    for graph in graphs.graphs:
        assert [argument(n, "chunk") for n in graph.nodes if n.kind == "attention"] == chunks, graph.name


def test_window_as_long_as_the_context_is_none() -> None:
    graphs = capture_language_model(tiny("mistral", {**SIZES, "sliding_window": 32}), "mistral", WORKLOAD)
    calls = [n for n in graphs.of_kind(GraphKind.DECODE)[0].nodes if n.kind == "attention"]
    assert all(argument(n, "window") == 0 for n in calls)


def test_capture_leaves_the_model_as_it_was() -> None:
    model = tiny("qwen3", SIZES).train()
    before = greedy(model.eval(), PROMPT, 3)[0]
    model.train()
    capture_language_model(model, "qwen3", WORKLOAD)
    assert all(part.training for part in model.modules()) and model.config._attn_implementation == "eager"
    assert "forward" not in vars(model.model.rotary_emb)
    assert greedy(model.eval(), PROMPT, 3)[0] == before


@pytest.mark.slow
def test_full_size_model_is_captured_without_weights() -> None:
    folder = Path(__file__).parents[1] / "benchmarks" / "configs" / "llama-3.2-1b"
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    graphs = capture_language_model(model.eval(), "llama", Workload(dtype=DType.F16, max_context=8192, prefill_chunks=(128,))).verify()
    decode = graphs.of_kind(GraphKind.DECODE)[0]
    kinds = Counter(node.kind for node in decode.nodes)
    assert (kinds["linear"], kinds["rms_norm"], kinds["rope"], kinds["attention"]) == (16 * 7 + 1, 33, 32, 16)
    assert kinds["rotary_embedding"] == 1, "static scaled RoPE is one operator too"
    assert not kinds["cast"] and not kinds["copy"]
    assert graphs.kv is not None and (graphs.kv.layers, graphs.kv.kv_heads, graphs.kv.head_dim) == (16, 8, 64)
