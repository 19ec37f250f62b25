"""Without a GPU: the tiny model's programs, every node on the framework, give HuggingFace's greedy tokens in fp32."""

from pathlib import Path

import pytest
import torch

import agentcompile_core as ac
from agentcompile_core.configuration import Config
from agentcompile_core.store import Store

TINY = Path(__file__).parent.parent / "examples" / "tiny_model"
PROMPTS = ("When an exception", "The following", "If the")
NEW_TOKENS = 200


@pytest.fixture(scope="module")
def compiled():  # type: ignore[no-untyped-def]
    return ac.compile(str(TINY), dtype="float32", device="cpu", run_on="framework", store=Store(None),
                      config=Config(validators=(), budget_plans=1, budget_s=0.1, rounds=1))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_equal_hugging_face(compiled, prompt: str) -> None:  # type: ignore[no-untyped-def]
    ids = compiled.tokenizer(prompt, return_tensors="pt").input_ids
    wanted = compiled.loaded.module.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
                                             eos_token_id=None, pad_token_id=0)
    assert torch.equal(compiled.generate(ids, NEW_TOKENS, eos_token_id=None), wanted)
