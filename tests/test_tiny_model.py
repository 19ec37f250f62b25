"""The bundled tiny model: loads offline by the usual classes, is as small as promised, and writes readable text."""

from __future__ import annotations

import pydoc_data.topics
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

FOLDER = Path(__file__).parents[1] / "examples" / "tiny_model"
NEW_TOKENS = 200


@cache
def load_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True, dtype=torch.float32)


@cache
def load_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@cache
def recorded_texts() -> dict[str, str]:
    """Return {prompt: prompt and the begin of its continuation} as README.md records them (heading, then a block)."""
    readme = (FOLDER / "README.md").read_text("utf-8")
    return dict(re.findall(r"^### `(.+?)`\n\n```text\n(.*?)\n```$", readme, re.MULTILINE | re.DOTALL))


@cache
def greedy_ids(prompt: str) -> tuple[int, ...]:
    ids = torch.tensor([load_tokenizer().encode(prompt)])
    out = load_model().generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tuple(out[0, ids.shape[1] :].tolist())


def prompts() -> list[str]:
    return list(recorded_texts())


def test_architecture_is_a_small_grouped_query_qwen3() -> None:
    config = load_model().config
    assert config.model_type == "qwen3"
    assert config.tie_word_embeddings
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.max_position_embeddings == 1024
    assert sum(p.numel() for p in load_model().parameters()) <= 4_000_000


def test_weights_are_fp16_under_8_mib_and_finite() -> None:
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size < 8 * 2**20
    stored = AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True)
    assert {p.dtype for p in stored.parameters()} == {torch.float16}
    assert all(torch.isfinite(p).all() for p in stored.parameters())


def test_every_stored_tensor_is_used_and_none_is_missing() -> None:
    _, info = AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True, output_loading_info=True)
    assert not any(info.values()), info


def test_vocabulary_fits_the_embedding() -> None:
    assert len(load_tokenizer()) == load_model().config.vocab_size
    assert load_tokenizer().eos_token_id == load_model().generation_config.eos_token_id


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_text_round_trips(text: str) -> None:
    tokenizer = load_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_are_shorter_than_bytes_on_english() -> None:
    text = "The expression list is evaluated and each element must be an iterable object."
    assert len(load_tokenizer().encode(text)) * 3 < len(text)


def test_readme_records_at_least_three_prompts() -> None:
    assert len(prompts()) >= 3


@pytest.mark.parametrize("prompt", prompts())
def test_readme_text_is_what_the_model_writes(prompt: str) -> None:
    recorded = recorded_texts()[prompt]
    assert len(recorded) > len(prompt) + 200
    assert (prompt + load_tokenizer().decode(greedy_ids(prompt))).startswith(recorded)


@pytest.mark.parametrize("prompt", prompts())
def test_greedy_choice_is_clear_enough_to_survive_rounding(prompt: str) -> None:
    """The first and second logit differ by more than fp32 and fp16 kernels err, so that tokens can be compared exactly."""
    start = load_tokenizer().encode(prompt)
    with torch.no_grad():
        logits = load_model()(torch.tensor([[*start, *greedy_ids(prompt)]])).logits[0, len(start) - 1 : -1]
    best = logits.topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 0.1


@pytest.mark.parametrize("prompt", prompts())
def test_greedy_text_does_not_loop(prompt: str) -> None:
    ids = greedy_ids(prompt)
    assert len(ids) == NEW_TOKENS, "the text ended before 200 tokens"
    grams = [ids[i : i + 4] for i in range(len(ids) - 3)]
    assert len(set(grams)) >= 0.7 * len(grams)
    tail = grams[len(grams) // 2 :]
    assert len(set(tail)) >= 0.7 * len(tail), "the second half repeats itself"


@pytest.mark.parametrize("prompt", prompts())
def test_greedy_text_is_made_of_english_words(prompt: str) -> None:
    known = set(re.findall(r"[a-z]+", " ".join(pydoc_data.topics.topics.values()).lower()))
    words = re.findall(r"[a-z]+", load_tokenizer().decode(greedy_ids(prompt)).lower())
    assert len(words) >= 60
    assert sum(word in known for word in words) >= 0.9 * len(words)
    assert len(set(words)) >= 30


def test_model_prefers_the_right_word_order() -> None:
    def loss(text: str) -> float:
        ids = torch.tensor([load_tokenizer().encode(text)])
        with torch.no_grad():
            return float(load_model()(ids, labels=ids).loss)

    assert loss("Return a list of the names in the module.") + 1.0 < loss("Names module of the in a Return the list.")
