"""``generate`` of a captured model: HuggingFace's meaning of every argument, and one sentence for what is no request."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.runtime.session import Session
from agentcompile_core.store import Store

CONFIG = transformers.LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                                  num_key_value_heads=2, max_position_embeddings=64, pad_token_id=7, bos_token_id=1, eos_token_id=2)
QUICK: dict[str, Any] = {"device": "cpu", "run_on": "framework", "store": Store(None), "validators": [], "origins": []}
PROMPT = torch.tensor([[5, 17, 99, 3, 42]])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    made = transformers.LlamaForCausalLM(CONFIG).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.data.mul_(8.0) if parameter.dim() > 1 else None
    return made


@pytest.fixture(scope="module")
def mine(model):
    found = ac.compile(model, **QUICK)
    assert isinstance(found.session, Session)
    return found


@pytest.fixture
def settings(model):
    """Assign to it to change the model's generation_config for one test."""
    before = model.generation_config
    yield lambda **values: setattr(model, "generation_config", transformers.GenerationConfig(**{"pad_token_id": 7, **values}))
    model.generation_config = before


SETTINGS: list[dict[str, Any]] = [
    {}, {"repetition_penalty": 1.8}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9, "eos_token_id": list(range(0, 100, 2))},
    {"suppress_tokens": [3, 17, 99]}, {"bad_words_ids": [[42], [5, 17]]}, {"forced_eos_token_id": 2},
    {"do_sample": True}, {"do_sample": True, "temperature": 0.6, "top_k": 5}, {"do_sample": True, "top_p": 0.8, "min_p": 0.02},
    {"do_sample": True, "repetition_penalty": 1.3, "typical_p": 0.9}, {"num_beams": 3},
]


@pytest.mark.parametrize("values", SETTINGS, ids=str)
@pytest.mark.parametrize("where", ["generation_config", "arguments"])
def test_tokens_equal_hugging_face(model, mine, settings, values: dict[str, Any], where: str) -> None:
    given = values if where == "arguments" else {}
    if where == "generation_config":
        settings(**values)
    torch.manual_seed(23)
    wanted = model.generate(PROMPT, max_new_tokens=12, **given)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert torch.equal(mine.generate(PROMPT, 12, seed=23, **given), wanted)
    assert any("own loop" in str(w.message) for w in said) == ("num_beams" in values)
    if "num_beams" in values:
        assert "transformers' own loop runs this request over compiled steps: beam search" in mine.notes


def test_the_end_comes_from_generation_config_unless_it_is_given(mine, settings) -> None:
    free = mine.generate(PROMPT, 20, eos_token_id=None)
    assert free.shape == (1, 25)
    stop = int(free[0, 12])
    first = free[0, 5:].tolist().index(stop) + 1
    for value in (stop, [stop, 1000]):
        settings(eos_token_id=value)
        assert torch.equal(mine.generate(PROMPT, 20), free[:, : 5 + first])
        for never in (None, [], (), -1):
            assert torch.equal(mine.generate(PROMPT, 20, eos_token_id=never), free)
    settings()
    assert torch.equal(mine.generate(PROMPT, 20, eos_token_id=stop), free[:, : 5 + first])


def test_how_many_tokens_come_from_generation_config(mine, settings) -> None:
    settings(max_new_tokens=3)
    assert mine.generate(PROMPT).shape == (1, 8)
    settings(max_length=9)
    assert mine.generate(PROMPT).shape == (1, 9)
    settings()
    assert mine.generate(PROMPT).shape == (1, 64)  # 128, or what fits the context


def test_what_a_tokenizer_gives_is_taken_by_name(mine) -> None:
    wanted = mine.generate(PROMPT, 4)
    assert torch.equal(mine.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=4), wanted)
    for same in (PROMPT[0], PROMPT[0].tolist(), PROMPT.tolist(), PROMPT.int()):
        assert torch.equal(mine.generate(same, 4), wanted)


def test_padding_in_a_prompt_is_treated_as_by_hugging_face(model, mine) -> None:
    padded = torch.tensor([[7, 7, 5, 17, 99]])
    assert torch.equal(mine.generate(padded, 8), model.generate(padded, max_new_tokens=8))
    meant = torch.ones_like(padded)
    assert torch.equal(mine.generate(padded, 8, attention_mask=meant), model.generate(padded, attention_mask=meant, max_new_tokens=8))
    for mask in ([[1, 0, 1, 1, 1]], [[1, 1, 1, 1, 0]]):
        with pytest.warns(UserWarning, match="without kernels: the prompt holds padding that is not before its tokens"):
            found = mine.generate(PROMPT, 8, attention_mask=torch.tensor(mask))
        assert torch.equal(found, model.generate(PROMPT, attention_mask=torch.tensor(mask), max_new_tokens=8))


def test_prompts_of_different_lengths_are_padded_before_and_end_each_by_itself(model, mine) -> None:
    prompts = [[5, 17, 99], [42], [3, 99, 42, 11, 5]]
    padded = torch.tensor([[7, 7, 5, 17, 99], [7, 7, 7, 7, 42], [3, 99, 42, 11, 5]])
    mask = (padded != 7).long()
    free = model.generate(padded, attention_mask=mask, max_new_tokens=12, eos_token_id=None)
    ends = [int(free[0, 8]), int(free[1, 13])]
    wanted = model.generate(padded, attention_mask=mask, max_new_tokens=12, eos_token_id=ends)
    assert bool((wanted == 7).any())
    for given in ({"input_ids": prompts}, {"input_ids": [torch.tensor(one) for one in prompts]}, {"inputs": padded},
                  {"input_ids": prompts, "attention_mask": [[1] * len(one) for one in prompts]},
                  {"input_ids": padded, "attention_mask": mask}, {"input_ids": padded.tolist(), "attention_mask": mask.tolist()}):
        assert torch.equal(mine.generate(**given, max_new_tokens=12, eos_token_id=ends), wanted), given
    ends = [ends[0], 7]  # then nobody can tell what is padding
    assert torch.equal(mine.generate(padded, 12, eos_token_id=ends), model.generate(padded, max_new_tokens=12, eos_token_id=ends))


def test_without_a_prompt_the_first_token_is_the_beginning(model, mine, settings) -> None:
    assert torch.equal(mine.generate(max_new_tokens=4), model.generate(max_new_tokens=4))
    settings()
    with pytest.raises(UsageError, match="names no bos_token_id"):
        mine.generate(max_new_tokens=4)


class Pieces:
    """A tokenizer for stop strings: token i is the letter a, b, c, ... of i modulo 26."""

    @staticmethod
    def get_vocab() -> dict[str, int]:
        return {chr(97 + i % 26) + "'" * (i // 26): i for i in range(100)}

    @staticmethod
    def convert_tokens_to_string(tokens: list[str]) -> str:
        return "".join(tokens)


def test_stop_strings_end_a_request_by_its_tokenizer(model, mine) -> None:
    from transformers import StopStringCriteria

    free = mine.generate(PROMPT, 20)
    names = {index: name for name, index in Pieces.get_vocab().items()}
    ends = [names[int(free[0, 12])]]
    vocab = StopStringCriteria.clean_tokenizer_vocab
    StopStringCriteria.clean_tokenizer_vocab = staticmethod(lambda tokenizer, **_: (tuple(names.values()), tuple(names)))
    try:
        wanted = model.generate(PROMPT, max_new_tokens=20, stop_strings=ends, tokenizer=Pieces())
        assert wanted.shape[1] <= 13 and torch.equal(mine.generate(PROMPT, 20, stop_strings=ends, tokenizer=Pieces()), wanted)
    finally:
        StopStringCriteria.clean_tokenizer_vocab = vocab
    with pytest.raises(UsageError, match="could not locate a tokenizer"):
        mine.generate(PROMPT, 20, stop_strings=ends)


@pytest.mark.parametrize(("options", "why"), [
    ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
    ({"position_ids": torch.tensor([[3, 4, 5, 6, 7]])}, "position_ids is given"), ({"synced_gpus": True}, "synced_gpus is given"),
], ids=str)
def test_what_no_step_can_give_comes_from_hugging_faces_model(model, mine, options: dict[str, Any], why: str) -> None:
    if "synced_gpus" in options:  # which needs a group of processes
        with pytest.warns(UserWarning, match=why), pytest.raises(UsageError, match="refused this request"):
            mine.generate(PROMPT, 4, **options)
        return
    wanted = model.generate(PROMPT, max_new_tokens=4, **options)
    with pytest.warns(UserWarning, match=f"without kernels: {why}"):
        found = mine.generate(PROMPT, 4, **options)
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    else:
        assert torch.equal(found.sequences, wanted.sequences) and torch.equal(found.hidden_states[-1][-1], wanted.hidden_states[-1][-1])


def test_embeddings_in_place_of_tokens_go_to_hugging_faces_model(model, mine) -> None:
    embeds = model.get_input_embeddings()(PROMPT)
    with pytest.warns(UserWarning, match="without kernels: inputs_embeds is given"):
        assert torch.equal(mine.generate(inputs_embeds=embeds, max_new_tokens=4), model.generate(inputs_embeds=embeds, max_new_tokens=4))
    hidden = {"inputs_embeds": embeds, "attention_mask": torch.tensor([[0, 0, 1, 1, 1]]), "max_new_tokens": 4}
    with pytest.warns(UserWarning, match="without kernels"):
        assert torch.equal(mine.generate(**hidden), model.generate(**hidden))


def test_lists_of_different_lengths_keep_their_mask_whoever_runs_them(model, mine, settings) -> None:
    settings(pad_token_id=None, eos_token_id=[5, 7])  # so that nobody can tell padding by its token
    prompts, more = [[5, 17, 99], [42]], {"max_new_tokens": 5, "output_hidden_states": True, "return_dict_in_generate": True}
    with pytest.warns(UserWarning, match="without kernels"):
        found = mine.generate(prompts, **more)
    padded, mask = torch.tensor([[5, 17, 99], [5, 5, 42]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    assert torch.equal(found.sequences, model.generate(padded, attention_mask=mask, **more).sequences)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"repetition_penalty": 1.7}, {"return_dict_in_generate": True}], ids=str)
def test_hugging_faces_own_model_takes_the_session_as_its_loop(model, mine, options: dict[str, Any]) -> None:
    prompts = {"input_ids": torch.tensor([[7, 5, 17], [3, 99, 42]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    found = []
    for loop in ({}, {"custom_generate": mine.custom_generate}):
        torch.manual_seed(3)
        one = model.generate(**prompts, max_new_tokens=6, eos_token_id=None, pad_token_id=7, **options, **loop)
        found.append(one if isinstance(one, torch.Tensor) else one.sequences)
    assert torch.equal(*found)
    with pytest.raises(UsageError, match="this request is beam search"):
        model.generate(PROMPT, max_new_tokens=4, num_beams=2, custom_generate=mine.custom_generate)


def test_it_looks_like_a_model_of_hugging_face(model, mine) -> None:
    assert mine.config is model.config and mine.generation_config is model.generation_config
    assert (mine.device, mine.dtype, mine.main_input_name, mine.can_generate()) == (torch.device("cpu"), torch.float32, "input_ids", True)
    assert mine.eval() is mine and mine.to("cpu") is mine and mine.to(device="cpu", dtype=torch.float32) is mine
    for wanted in ("cuda", torch.float16):
        with pytest.raises(UsageError, match="compile it with that"):
            mine.to(wanted)


class Encoding(dict):  # type: ignore[type-arg]
    """As a tokenizer's."""


@pytest.mark.parametrize(("given", "words"), [
    ("some text", "tokenize it first"), (["some text"], "tokenize it first"), (b"x", "tokenize it first"),
    (Encoding(input_ids=PROMPT), "by name"), ([], "0 tokens"), (torch.zeros(1, 0, dtype=torch.int64), "0 tokens"),
    ([[1, 2], []], "no prompt"), ([[1, 2], ["a"]], "no prompt"), (torch.ones(1, 3), "integers"),
    ([1.5], "integers"), (torch.ones(1, 3, dtype=torch.bool), "integers"), (5, r"shape \(\)"), (object(), "no prompt"),
    ([[1, 100]], "vocabulary is 0 to 99"), ([-1], "vocabulary"), (torch.zeros(1, 2, 2, dtype=torch.int64), "prompts as integers"),
])
def test_what_is_no_prompt_gets_one_sentence(mine, given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        mine.generate(given, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "words"), [
    ({"max_new_tokens": 0}, "at least 1"), ({"max_new_tokens": "5"}, "must be an integer"), ({"max_new_tokens": 2.5}, "must be an integer"),
    ({"max_new_tokens": 60}, "exceed the context of 64"), ({"temperatur": 1.0}, "did you mean temperature"),
    ({"attention_mask": torch.zeros(1, 5)}, "hides all tokens"), ({"generation_config": {"top_k": 3}}, "generation_config is a dict"),
    ({"inputs": PROMPT}, "pass one of them"), ({"num_beams": 3, "num_return_sequences": 4}, "num_return_sequences"),
    ({"logits_processors": []}, "did you mean logits_processor"), ({"streamer": 1, "num_beams": 2}, "streamer"),
    ({"attention_mask": torch.ones(1, 4)}, "must agree"),
    ({"do_sample": True, "temperature": -1.0}, "temperature"), ({"do_sample": True, "top_p": -0.5}, "top_p"),
    ({"eos_token_id": "end"}, "eos_token_id is 'end'"), ({"seed": 1.5}, "seed is 1.5"),
])
def test_what_is_no_request_gets_one_sentence(mine, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        mine.generate(PROMPT, **options)
    assert "\n" not in str(caught.value)


def test_sampling_values_without_sampling_are_said_to_be_ignored(mine) -> None:
    with pytest.warns(UserWarning, match="temperature without do_sample=True"):
        mine.generate(PROMPT, 2, temperature=0.5)


def test_a_streamer_sees_the_prompt_and_every_token_once(mine) -> None:
    class Collect:
        tokens: list[int]

        def __init__(self) -> None:
            self.tokens, self.ended = [], 0

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    for options in ({}, {"repetition_penalty": 1.5}):
        streamer = Collect()
        assert streamer.tokens == [] and mine.generate(PROMPT, 6, streamer=streamer, **options)[0].tolist() == streamer.tokens
        assert streamer.ended == 1


def test_random_weights_are_announced(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    found = ac.compile(tmp_path, meta=False, **{**QUICK, "run_on": "nothing"})
    assert found.notes[0].startswith(f"no weights in {tmp_path}: random weights, seed 0")


@pytest.mark.parametrize(("options", "words"), [
    ({"advisr": "x"}, "unknown option 'advisr'; did you mean advisor"), ({"advisor": "oracle"}, "unknown advisor 'oracle'"),
    ({"validators": "numerics,hope"}, "unknown validator 'hope'"), ({"kv_cache": "paper"}, "unknown KV cache runtime 'paper'"),
    ({"decode": "paper"}, "unknown decode runtime 'paper'"), ({"origins": ["generatd"]}, "unknown origin 'generatd'; allowed: generated"),
    ({"budget_s": -1}, "budget_s is -1"), ({"rounds": 1.5}, "rounds is 1.5"), ({"dtype": "int4"}, "unknown dtype 'int4'"),
    ({"max_context": 1}, "context of 1"), ({"max_context": "9"}, "context of '9'"), ({"target": "gtx280"}, "gtx280"),
    ({"device": "tpu"}, "unknown device 'tpu'"), ({"run_on": "moon"}, "cannot run on 'moon'"), ({"backend": "abacus"}, "abacus"),
])
def test_bad_options_are_refused_before_a_model_is_opened(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ac.compile("/nowhere/at/all", **{"device": "cpu", **options})


@pytest.mark.parametrize("options", [
    {}, {"attention_mask": torch.ones_like(PROMPT)}, {"eos_token_id": [3, 4]}, {"do_sample": False, "num_beams": 1, "temperature": None},
    {"use_cache": True, "pad_token_id": 0, "max_length": 20}, {"logits_processor": [], "stopping_criteria": None},
    {"generation_config": transformers.GenerationConfig(max_new_tokens=4)}], ids=str)
def test_one_greedy_prompt_is_left_to_the_device(mine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """No loop on the host, and nothing of transformers' preparation."""
    used: list[int] = []
    real = mine.session.generate
    monkeypatch.setattr(mine.session, "generate", lambda *given, **named: used.append(1) or real(*given, **named))
    mine.generate(PROMPT, **({} if {"max_length", "generation_config"} & set(options) else {"max_new_tokens": 4}), **options)
    assert used == [1]
