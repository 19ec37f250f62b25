"""Padding before a prompt: models whose own forward lets it have a say are run by transformers' own loop, which says so; others are not."""

import copy
from typing import Any

import pytest
import torch
import transformers
from test_generate_manners import CONFIG, QUICK

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.runtime.generation import padded

COUNTED = transformers.BartConfig(vocab_size=100, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48,
                                  max_position_embeddings=64, pad_token_id=7, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
                                  is_decoder=True, forced_eos_token_id=None, is_encoder_decoder=False)
IDS = torch.tensor([[7, 7, 7, 7, 11, 25, 93], [9, 8, 44, 31, 60, 5, 6]])
MASK = (IDS != 7).long()
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 7}


def made(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.mul_(8.0) if parameter.dim() > 1 else None
    return model


@pytest.fixture(scope="module")
def counting() -> Any:
    """Its positions count the padding in."""
    return made(transformers.BartForCausalLM, COUNTED)


@pytest.fixture
def mine(counting) -> Any:
    return ac.compile(copy.deepcopy(counting), **QUICK)


@pytest.mark.parametrize("values", [{}, {"do_sample": True, "top_k": 3}, {"num_beams": 2}, {"repetition_penalty": 1.4}], ids=str)
def test_where_padding_has_a_say_tokens_are_hugging_faces(counting, mine, values: dict[str, Any]) -> None:
    for ids, mask in ((IDS[:1], MASK[:1]), (IDS, MASK)):
        torch.manual_seed(3)
        wanted = counting.generate(ids, attention_mask=mask, **OPTIONS, **values)
        torch.manual_seed(3)
        with pytest.warns(UserWarning, match="without kernels: what the model makes of a prompt depends on the padding before it"):
            assert torch.equal(mine.generate(ids, attention_mask=mask, **OPTIONS, **values), wanted)
    alone = counting.generate(IDS[:1, 4:], **OPTIONS)
    assert not torch.equal(counting.generate(IDS[:1], attention_mask=MASK[:1], **OPTIONS)[0, 7:], alone[0, 3:])  # it does have a say


@pytest.mark.filterwarnings("error")
def test_without_padding_of_the_caller_it_has_none(counting, mine) -> None:
    rows = [IDS[0, 4:].tolist(), IDS[1].tolist()]
    found = mine.generate(rows, **OPTIONS)  # no HuggingFace model takes lists: each prompt is alone
    for row, tokens in zip(rows, found, strict=True):
        assert torch.equal(tokens[7:], counting.generate(torch.tensor([row]), **OPTIONS)[0, len(row):])
    assert torch.equal(mine.generate(IDS, **{**OPTIONS, "pad_token_id": 99}), counting.generate(IDS, **{**OPTIONS, "pad_token_id": 99}))


def test_custom_generate_refuses_it(mine) -> None:
    with pytest.raises(UsageError, match=r"depends on the padding before it.*call generate of the compiled model"):
        mine.loaded.module.generate(IDS, attention_mask=MASK, custom_generate=mine.custom_generate, **OPTIONS)


@pytest.mark.filterwarnings("error")
def test_a_model_that_sets_padding_aside_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(transformers.LlamaForCausalLM, CONFIG)
    mine, asked = ac.compile(copy.deepcopy(model), **QUICK), []
    ask = padded._logits
    monkeypatch.setattr(padded, "_logits", lambda *given: asked.append(given[2].shape) or ask(*given))
    state = torch.get_rng_state()
    assert mine.generate(IDS[1:], **OPTIONS).shape == (1, 13) and not asked
    for _ in range(2):
        assert torch.equal(mine.generate(IDS, attention_mask=MASK, **OPTIONS), model.generate(IDS, attention_mask=MASK, **OPTIONS))
    assert asked == [(1, 7), (1, 3)] and torch.equal(torch.get_rng_state(), state)


def test_what_transformers_refuses_is_not_known_to_differ(mine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> Any:
        raise UsageError("no")

    monkeypatch.setattr(padded, "by_framework", refuse)
    known, mine.session.padding = mine.session.padding, None
    assert padded.told_by_padding(mine.loaded.module, mine.session, IDS, MASK) == "" and mine.session.padding is None
    monkeypatch.undo()
    assert padded.told_by_padding(mine.loaded.module, mine.session, IDS, MASK)  # the next one is compared
    mine.session.padding = known


def test_no_room_for_the_comparison_costs_no_request(mine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("80 GiB")

    known, mine.session.padding = mine.session.padding, None
    monkeypatch.setattr(padded, "by_framework", full)
    assert padded.told_by_padding(mine.loaded.module, mine.session, IDS, MASK) == "" and mine.session.padding is None
    mine.session.padding = known
