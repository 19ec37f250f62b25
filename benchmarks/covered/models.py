"""Tiny random models of the causal language model types that the installed transformers knows.

The default configuration of a type is shrunk field by field, by name; ``SPECIAL`` holds what a type needs besides. Nothing is
downloaded.
"""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .special import MORE, TYPES

VOCABULARY, WIDTH, HEADS, LAYERS, POSITIONS = 128, 32, 4, 2, 128
_SIZES: tuple[tuple[int, str], ...] = (  # the tiny value of every configuration field of one of these names
    (VOCABULARY, "vocab_size embedding_vocab_size vocab_size_per_layer_input prompt_bins"),
    (WIDTH, "hidden_size d_model n_embd embedding_size word_embed_proj_dim lru_width attention_hidden_size dim embed_dim dim_model "
        "emb_dim mamba_d_ssm"),
    (48, "intermediate_size ffn_dim d_ff n_inner d_inner dff ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size "
        "encoder_ffn_dim decoder_ffn_dim moe_shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp "
        "moe_layer_intermediate_size dim_ff expert_ffn_hidden_size moe_ffn_hidden_size dense_intermediate_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers"),
    (HEADS, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
           "num_local_experts num_experts n_routed_experts moe_num_experts num_encoder_attention_heads num_decoder_attention_heads"),
    (2, "num_key_value_heads num_experts_per_tok moe_k moe_topk experts_per_token num_kv_heads num_experts_per_token top_k_experts"),
    (8, "head_dim global_head_dim swa_head_dim rotary_dim q_lora_rank kv_lora_rank qk_rope_head_dim v_head_dim qk_nope_head_dim d_kv "
       "attention_chunk_size mamba_d_state ssm_state_size state_size sliding_window_size hidden_size_per_layer_input "
       "linear_key_head_dim linear_value_head_dim mamba_d_head time_step_rank"),
    (POSITIONS, "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len context_length max_target_positions"),
    (1, "n_group n_groups topk_group num_expert_groups mamba_n_groups n_shared_experts first_k_dense_replace mamba_num_groups"),
    (5, "sliding_window local_attention window_size"),
)
TINY = {name: value for value, names in _SIZES for name in names.split()}
_NOT_WIDER = frozenset({"mamba_d_state", "ssm_state_size", "state_size", "time_step_rank", "attention_chunk_size"})


def known() -> tuple[str, ...]:
    """Every causal language model type of the installed transformers, as its own mapping lists them."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def covered(more: bool = False) -> tuple[str, ...]:
    """The types of the sweep that this transformers knows; with ``more`` the longer list."""
    return tuple(name for name in (*TYPES, *(MORE if more else ())) if name in known())


def shrunk(config: Any, special: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a configuration like ``config`` with its sizes tiny; ``special`` is laid over them."""
    options: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name in TINY and isinstance(value, int) and not isinstance(value, bool):
            options[name] = min(TINY[name], value) if name != "sliding_window" else TINY[name]
    for name in getattr(config, "attribute_map", {}):
        if config.attribute_map[name] in TINY and config.attribute_map[name] not in options:
            options[config.attribute_map[name]] = TINY[config.attribute_map[name]]
    if "kv_lora_rank" in options:  # latent attention has one K and V per query head
        options["num_key_value_heads"] = HEADS
    options |= {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    return {**options, **special}


def configuration(model_type: str, special: dict[str, Any], wider: int = 1) -> Any:
    """The tiny configuration of ``model_type``; widths, heads' channels and windows ``wider`` times as many."""
    kind = transformers.CONFIG_MAPPING[model_type]
    options = shrunk(kind(), special)
    for name, value in options.items() if wider > 1 else ():
        if TINY.get(name) in (WIDTH, 48, 8, 5) and name not in _NOT_WIDER and isinstance(value, int) and not isinstance(value, bool):
            options[name] = wider * value
        elif TINY.get(name) == POSITIONS and "vocab" not in name and value == POSITIONS:
            options[name] = 32 * POSITIONS
    return kind(**options)


def tiny(model_type: str, special: dict[str, Any], scale: float = 8.0, wider: int = 1) -> nn.Module:
    """A random fp32 model whose greedy tokens vary: matrices are scaled up, vectors are not all one. Always the same one."""
    config = configuration(model_type, special, wider)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return varied(model, scale)


def varied(model: nn.Module, scale: float) -> nn.Module:
    """``model`` with matrices scaled up and vectors that are not all one, by torch's random numbers as they come."""
    looked_up = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        elif id(parameter) not in looked_up:
            parameter.data.mul_(scale)
    return model.eval().requires_grad_(False)
