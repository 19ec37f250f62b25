"""Models one of whose tables has fewer rows than the configuration says tokens: what has no row is never drawn, and refused by name."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.report.bench import random_prompt
from agentcompile_core.store import Store

VOCABULARY, ROWS, CONTEXT = 400, 7, 40


class TwoTables(transformers.LlamaForCausalLM):
    """A Llama that adds to each token's vector one of a second table."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.second = nn.Embedding(config.rows, config.hidden_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = None, logits_to_keep: int = 0) -> Any:
        found = self.second(input_ids) + self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=found, attention_mask=attention_mask, position_ids=position_ids,
                               past_key_values=past_key_values, use_cache=use_cache, logits_to_keep=logits_to_keep)


def model(rows: int) -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None,
                                      pad_token_id=0, rows=rows)
    torch.manual_seed(0)
    return TwoTables(config).eval()


@pytest.mark.parametrize("rows", [ROWS, VOCABULARY, 2 * VOCABULARY])
def test_only_what_every_table_has_is_drawn_and_allowed(rows: int) -> None:
    """Compiling compares random tokens with the model's own forward, for which an index beyond a table is an error, on a GPU for good."""
    module = model(rows)
    mine = ac.compile(module, max_context=CONTEXT, run_on="framework", store=Store(None), origins=[], validators=())
    allowed = min(rows, VOCABULARY)
    assert mine.graphs.kv is not None and mine.notes == () and mine.graphs.model.vocab_size == allowed
    assert int(random_prompt(mine.graphs.model.vocab_size, 30, 0).max()) < allowed
    prompt = torch.tensor([[allowed - 1, 3, 2]])
    if rows >= VOCABULARY:  # else a token that the model makes may have no row
        wanted = module.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        assert torch.equal(mine.generate(prompt, 8, eos_token_id=None), wanted)
    with pytest.raises(UsageError, match=f"{allowed}"):
        mine.generate(torch.tensor([[3, allowed]]), 2)
