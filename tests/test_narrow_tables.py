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


class TwoTables(nn.Module):
    """The sum of a token's vectors in two tables."""

    def __init__(self, first: nn.Embedding, rows: int) -> None:
        super().__init__()
        self.first, self.second = first, nn.Embedding(rows, first.embedding_dim)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.first(ids) + self.second(ids)
        return found


def model(rows: int) -> Any:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=None,
                                      pad_token_id=0)
    torch.manual_seed(0)
    found = transformers.LlamaForCausalLM(config)
    found.model.embed_tokens = TwoTables(found.model.embed_tokens, rows)
    return found.eval()


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
