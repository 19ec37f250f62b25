"""A model that is not captured generates what HuggingFace generates, because HuggingFace's own loop runs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from capture_models import GPT, SIZES, TOKENS, tiny

import agentcompile_core as ac
from agentcompile_core.api import CompiledModel
from agentcompile_core.errors import UsageError
from agentcompile_core.runtime.framework_session import EagerSession
from agentcompile_core.store import Store

NEW = 16
PROMPT = torch.tensor([[5, 17, 99, 3, 42]])
CAUSAL: dict[str, dict[str, Any]] = {
    "minimax": {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4},
    "mamba2": {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1,
               "chunk_size": 4, **TOKENS},
    "recurrent_gemma": {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 16, **TOKENS},
    "rwkv": {"vocab_size": 128, "hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "context_length": 64, **TOKENS},
    "bart": {"vocab_size": 128, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
             "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2},
    "bloom": {"vocab_size": 128, "hidden_size": 32, "n_layer": 2, "n_head": 4, **TOKENS},
    "openai-gpt": {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "ctrl": {"vocab_size": 128, "n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKENS},
    "xlnet": {"vocab_size": 128, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, **TOKENS},
    "xglm": {"vocab_size": 128, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4,
             "max_position_embeddings": 64, **TOKENS},
    "biogpt": {**{k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}, "pad_token_id": 1},
    "gpt2": GPT,
}
UNCAPTURED = ("openai-gpt", "rwkv", "xlnet")


def compiled(model: torch.nn.Module, **options: Any) -> CompiledModel:
    return ac.compile(model, device="cpu", run_on="framework", store=Store(None), validators=(), origins=[],
                      **{"max_context": 64, **options})


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Models this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pairs() -> Callable[[str], tuple[torch.nn.Module, CompiledModel]]:
    """By model type HuggingFace's model, and the same one compiled once for all tests."""
    @cache
    def made(name: str) -> tuple[torch.nn.Module, CompiledModel]:
        model = tiny(name, CAUSAL[name])
        return model, compiled(model)

    return made


@pytest.fixture(scope="module", params=CAUSAL)
def pair(request: pytest.FixtureRequest, pairs):
    """(model type, HuggingFace's model, the same one compiled)."""
    return request.param, *pairs(request.param)


def test_greedy_tokens_equal_hugging_face(pair) -> None:
    name, model, mine = pair
    assert isinstance(mine.session, EagerSession) or name not in UNCAPTURED
    assert "IndexError" not in mine.graphs.eager_reason
    wanted = model.generate(PROMPT, max_new_tokens=NEW)
    assert torch.equal(mine.generate(PROMPT, NEW), wanted)


@pytest.mark.parametrize("pair", ["mamba2", "minimax", "recurrent_gemma", "rwkv", "gpt2", "bart"], indirect=True)
def test_the_end_and_a_penalty_are_honoured_as_by_hugging_face(pair) -> None:
    _, model, mine = pair
    free = model.generate(PROMPT, max_new_tokens=NEW, eos_token_id=None)
    stop = int(free[0, -6])
    before = model.generation_config
    model.generation_config = transformers.GenerationConfig(eos_token_id=[stop, 127], repetition_penalty=1.7, pad_token_id=0)
    try:
        assert torch.equal(mine.generate(PROMPT, NEW), model.generate(PROMPT, max_new_tokens=NEW))
        short = mine.generate(PROMPT, NEW, repetition_penalty=1.0)
        assert int(short[0, -1]) in (stop, 127) and torch.equal(short, free[:, : short.shape[1]])
        torch.manual_seed(11)
        drawn = model.generate(PROMPT, max_new_tokens=NEW, do_sample=True, temperature=0.8, top_p=0.9)
        assert torch.equal(mine.generate(PROMPT, NEW, do_sample=True, temperature=0.8, top_p=0.9, seed=11), drawn)
    finally:
        model.generation_config = before


def test_the_context_holds_where_the_model_has_one(pairs) -> None:
    limited, endless = pairs("ctrl")[1], pairs("xlnet")[1]
    if limited.graphs.model.limit:
        with pytest.raises(UsageError, match="exceed the context of 64"):
            limited.generate(PROMPT, 60)
    assert endless.generate(PROMPT, 70, eos_token_id=None).shape == (1, 75)


def test_a_busy_session_says_so(pairs) -> None:
    mine = pairs("rwkv")[1]
    with mine.session.exclusive(), pytest.raises(UsageError, match="busy with another request"):
        mine.generate(PROMPT, 2)
    assert mine.generate(PROMPT, 2).shape[1] <= 7


def scaled(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        parameter.data.mul_(4.0) if parameter.dim() > 1 else None
    return model.eval().requires_grad_(False)


def t5() -> torch.nn.Module:
    torch.manual_seed(0)
    return scaled(transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)))


def bart() -> torch.nn.Module:
    torch.manual_seed(0)
    return scaled(transformers.BartForConditionalGeneration(transformers.BartConfig(**CAUSAL["bart"])))


@pytest.mark.parametrize("build", [t5, bart])
def test_an_encoder_decoder_model_reads_the_prompt_and_returns_the_decoders_tokens(build) -> None:
    model = build()
    mine = compiled(model, max_context=None)
    wanted = model.generate(PROMPT, max_new_tokens=NEW)
    assert torch.equal(mine.generate(PROMPT, NEW), wanted)
    mask = torch.ones_like(PROMPT)
    assert torch.equal(mine.generate(input_ids=PROMPT, attention_mask=mask, max_new_tokens=NEW, num_beams=2),
                       model.generate(PROMPT, attention_mask=mask, max_new_tokens=NEW, num_beams=2))
    with pytest.raises(UsageError, match="text was given"):
        mine.generate("translate this")


def test_whisper_takes_its_features() -> None:
    torch.manual_seed(0)
    model = scaled(transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(
        vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20, max_target_positions=40, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None)))
    mine = compiled(model, max_context=None)
    features = torch.randn(1, 8, 40)
    wanted = model.generate(features, max_new_tokens=NEW)
    assert torch.equal(mine.generate(features, NEW), wanted)
    with pytest.raises(UsageError, match=r"takes input_features, a tensor of shape \[rows, \.\.\.\]"):
        mine.generate([1, 2, 3], 4)


def test_blip_takes_its_image_first() -> None:
    torch.manual_seed(0)
    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "max_position_embeddings": 32, "encoder_hidden_size": 16, "bos_token_id": 1, "sep_token_id": 2, "pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
              "patch_size": 8}
    model = transformers.BlipForConditionalGeneration(transformers.BlipConfig(text_config=text, vision_config=vision)).eval()
    mine, pixels = compiled(model, max_context=None), torch.randn(1, 3, 16, 16)
    prompt = torch.tensor([[1, 5, 9, 7]])
    wanted = model.generate(pixels, input_ids=prompt, max_new_tokens=4)
    assert torch.equal(mine.generate(prompt, 4, pixel_values=pixels), wanted)


def test_what_hugging_face_raises_is_one_sentence(pairs) -> None:
    mine = pairs("rwkv")[1]
    for options in ({"no_such_option": 3}, {"do_sample": True, "temperature": -1.0}, {"num_beams": 2, "num_return_sequences": 3}):
        with pytest.raises(UsageError, match="refused this request") as caught:
            mine.generate(PROMPT, 2, **options)
        assert "\n" not in str(caught.value)


