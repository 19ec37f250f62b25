"""What a model's own cache drops: a graph that would still attend to it is not served."""

from typing import Any

import pytest
import torch
from attrs import evolve
from capture_models import TOKENS, WORKLOAD, tiny
from transformers import DynamicCache

import agentcompile_core as ac
from agentcompile_core.stages.capture import language_model
from agentcompile_core.stages.capture.language_model import capture_language_model
from agentcompile_core.stages.capture.states import held_by

MOSHI: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, **TOKENS}


@pytest.mark.parametrize(("window", "context", "why"), [(16, 32, "keeps the last 16 positions"), (16, 16, ""), (32, 32, "")])
def test_a_mask_that_hides_less_than_the_cache_drops(window: int, context: int, why: str) -> None:
    """Moshi's mask is causal, and what it caches are the last positions of a window: its steps behind one see less than its mask says."""
    model = tiny("moshi", {**MOSHI, "sliding_window": window})
    assert held_by(model).kept == (window, window) == tuple(layer.sliding_window for layer in DynamicCache(config=model.config).layers)
    graphs = capture_language_model(model, "tiny", evolve(WORKLOAD, max_context=context))
    assert why in graphs.eager_reason and bool(graphs.graphs) is not bool(why)


@pytest.mark.parametrize(("model_type", "options"), [
    ("mistral", {"sliding_window": 8}),
    ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    ("llama4_text", {"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
                     "num_local_experts": 2, "intermediate_size_mlp": 48}),
])
def test_masks_that_hide_what_is_dropped_are_served(model_type: str, options: dict[str, Any]) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, **TOKENS}
    model = tiny(model_type, {**sizes, **options})
    assert max(held_by(model).kept) == 8
    assert capture_language_model(model, "tiny", WORKLOAD).graphs


def test_the_comparison_of_a_few_tokens_would_not_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check its graphs would be served, and answer otherwise behind the window."""
    monkeypatch.setattr(language_model, "check_kept", lambda graph, *_: graph)
    options, prompt = {**MOSHI, "sliding_window": 14}, torch.tensor([[5, 17, 99]])
    compiled = ac.compile(tiny("moshi", options), run_on="framework", max_context=32, origins=(), validators=())
    given: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 28, "do_sample": False, "eos_token_id": None}
    found, wanted = compiled.generate(prompt, **given), tiny("moshi", options).generate(prompt, **given)
    assert not compiled.graphs.eager_reason and torch.equal(found[:, :14], wanted[:, :14]) and not torch.equal(found, wanted)
