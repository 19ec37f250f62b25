"""Attention in chunks of positions (Llama 4) by generated kernels, emulated: tokens and logits are HuggingFace's across the borders."""

from pathlib import Path

import pytest
import torch
from capture_models import SIZES, tiny

import agentcompile_core as agentcompile
from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.store import Store

pytest.importorskip("agentcompile_validator_emulation")
CONTEXT, CHUNK = 23, 7
PLUGINS = ("core_frontends", "core_runtimes", "core_advisors", "emulation", "numerics", "attention", "transformers_rules")
LAYERS = {**SIZES, "num_hidden_layers": 2, "head_dim": 16, "num_local_experts": 2, "attention_chunk_size": CHUNK,
          "intermediate_size_mlp": 48, "no_rope_layers": [1, 0], "floor_scale": 4}


def test_llama4_decodes_over_the_borders_of_its_chunks_by_kernels(tmp_path: Path) -> None:
    model = tiny("llama4_text", LAYERS).eval()
    options = {"run_on": "emulation", "budget_s": 60, "budget_plans": 4, "store": Store(tmp_path), "catalog": load_catalog(only=PLUGINS)}
    mine = agentcompile.compile(tiny("llama4_text", LAYERS).eval(), max_context=CONTEXT, **options)
    kernels = [source for source in mine.session.bound("decode").program.sources if source.launches[0].entry.startswith("attention_kernel")]
    assert any(f"int chunk = {CHUNK};" in text for kernel in kernels for _, text in kernel.headers)
    ids = torch.randint(3, model.config.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(5))
    for length in (1, CHUNK, 2 * CHUNK - 1):
        prompt, more = ids[:, :length], CONTEXT - length
        wished = {"max_new_tokens": more, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), **wished)
        found = mine.generate(prompt, attention_mask=torch.ones_like(prompt), **wished)
        assert torch.equal(found, wanted), length
    with torch.inference_mode():
        torch.testing.assert_close(mine.session.teacher_forced(ids[:, 1:]), model(ids[:, 1:]).logits[0], rtol=1e-4, atol=1e-4)
