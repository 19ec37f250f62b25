"""What single model types need beside the shrunk default configuration: patterns of layers, divisors, switches."""

from typing import Any

_MLA = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
_ENCODER: dict[str, Any] = {"is_decoder": True, "pad_token_id": 0}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_INKLING = {"unpadded_vocab_size": 128, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "d_rel": 4, "rel_extent": 8,
            "n_layers_per_attn_res_block": 1}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_chunk_size": 4},
    "falcon_h1": {"mamba_n_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2,
                         "mamba_chunk_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "mamba_ngroups": 1,
               "n_mamba_heads": 4, "adapter_rank": 4, "chunk_size": 8, "num_key_value_heads": 4, "attention_hidden_size": 64,
               "attention_head_dim": 16, "mamba_d_state": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 16, "head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"], "num_layers": 2},
    "gemma4_text": {"global_head_dim": 16, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "num_kv_shared_layers": 2},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "deepseek_v2": {**_MLA, "num_experts_per_tok": 2},
    "deepseek_v3": _MLA,
    "glm4_moe_lite": _MLA,
    "youtu": _MLA,
    "minicpm3": _MLA,
    "longcat_flash": {**_MLA, "num_layers": 2, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 48},
    "dots1": {"layer_types": None, "num_key_value_heads": 2, "n_shared_experts": 1, "n_routed_experts": 4,
              "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "gemma3n_text": {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "modernbert-decoder": {"pad_token_id": 0},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 16), "feed_forward_size": 48,
                 "attn_layers": ["local", "lsh"], "attention_head_size": 8, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8,
                 "num_buckets": 4, "hash_seed": 1},
    "big_bird": {**_ENCODER, "attention_type": "original_full"},  # as decoders have it
    "bailing_hybrid": {**_MLA, **_HYBRID, "mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4, "n_group": 1, "topk_group": 1,
                       "num_mtp_layers": 0},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 48, "moe_top_k": 2}},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"],
                            "rope_parameters": {"sliding_attention": _THREE_AXES, "full_attention": _THREE_AXES}},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1,
             "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "inkling2_text": {**_INKLING, "layer_types": ["hybrid_sliding", "hybrid"]},
    "inkling2_loop_text": {**_INKLING, "num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid"],
                           "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2},
    "prophetnet": {"pad_token_id": 0, "is_decoder": True},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                       "hc_lowrank": 4, "hc_count": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 16, "indexer_compress_ratio": 4, "ple_layer_ids": [1], "heads_per_ngram": 2,
                       "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1},
    "xlm": {"causal": True, "pad_token_id": 0, "mask_token_id": 3},
    "xlstm": {"hidden_size": 64, "num_heads": 2, "head_dim": None, "ffn_round_up_to_multiple_of": 16, "chunk_size": 8,
              "qk_dim_factor": 1.0},
    "xmod": {**_ENCODER, "default_language": "en_XX", "languages": ("en_XX", "de_DE")},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2, "mamba_dt_rank": 4,
              "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "mamba_d_state": 8},
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "bert",
                     "bert-generation", "electra", "ernie", "megatron-bert", "roformer", "rembert", "roc_bert"), _ENCODER),
}
TYPES = tuple("""
    apertus arcee axk1 bamba bart bert bitnet bloom codegen cohere cohere2 ctrl deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5
    ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba gemma gemma2 gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2
    gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan_v1_dense hunyuan_v1_moe jamba
    jetmoe lfm2 llama llama4_text longcat_flash mamba mamba2 minicpm3 minimax minimax_m2 ministral mistral mixtral mpt nanochat
    olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma
    rwkv seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma whisper xglm xlnet youtu
""".split())  # noqa: SIM905
MORE = tuple("""
    afmoe apertus1p5_text aria_text axk2 bailing_hybrid beam bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small
    camembert cohere2_moe cohere_compass_text cpmant cwm data2vec-text dbrx deepseek_v32 deepseek_v4 doge dory dots3_note_text electra
    ernie exaone flex_olmo flint gemma3n_text gemma4_unified_text git glm_moe_dsa gpt-sw3 gpt_neox_japanese granite_swa granitemoe_swa
    granitemoeshared hrm_text hy_v3 hy_v4 hyperclovax inkling2_loop_text inkling2_text inkling_text internlm3 iquestcoder jais2
    kimi_linear kolibri1 laguna lara_mini lfm2_moe lfm3 marian mbart megatron-bert mellum mimo_v2_flash minimax_m3_vl_text ministral3
    modernbert-decoder moshi mvp nemotron nemotron_h olmo_hybrid pegasus phi4_multimodal plbart prophetnet qwen3_5_moe_text qwen3_5_text
    qwen4_exp_text reformer rembert roberta roberta-prelayernorm roc_bert roformer sarvam_mla sarvam_moe trocr xlm xlm-roberta
    xlm-roberta-xl xlstm xmod zamba zamba2 zaya
""".split())  # noqa: SIM905
