"""The name by which transformers hands a cache from step to step: ``past_key_values`` up to 5.23, ``cache`` from 5.24 on."""

from dataclasses import fields

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_NAMES = ("past_key_values", "cache")
CACHE_NAME = next(name for name in CACHE_NAMES if name in {field.name for field in fields(CausalLMOutputWithPast)})
