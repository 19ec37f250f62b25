"""Without a GPU: the tiny model's programs, every node on the framework, give HuggingFace's tokens and probabilities in fp32."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

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


SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 3, "num_return_sequences": 2}, {"stop_strings": [".", "tion"]}, {"prompt_lookup_num_tokens": 4},
    {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1},
    {"do_sample": True, "min_p": 0.05, "typical_p": 0.9, "num_return_sequences": 2},
]


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_tokens_and_probabilities_of_every_search_are_hugging_faces(compiled, search: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    several = "prompt_lookup_num_tokens" not in search
    encoded = compiled.tokenizer(list(PROMPTS) if several else PROMPTS[0], return_tensors="pt", padding=True, padding_side="left")
    found = []
    for model in (compiled.loaded.module, compiled):
        torch.manual_seed(8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(model.generate(**encoded, max_new_tokens=16, return_dict_in_generate=True, output_scores=True, pad_token_id=0,
                                        tokenizer=compiled.tokenizer, **search))
    theirs, mine = found
    assert torch.equal(mine.sequences, theirs.sequences)
    for ours, wanted in zip(mine.scores, theirs.scores, strict=True):  # HuggingFace's own fp32 is up to 2.7e-6 off its fp64 here
        assert float((ours.softmax(-1) - wanted.softmax(-1)).abs().max()) <= 1e-5


def test_probabilities_are_what_hugging_faces_processors_make_of_the_logits(compiled) -> None:  # type: ignore[no-untyped-def]
    ids = compiled.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    found = compiled.generate(ids, 12, do_sample=True, temperature=0.7, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=4,
                              return_dict_in_generate=True, output_scores=True, output_logits=True)
    processors = transformers.LogitsProcessorList([
        transformers.RepetitionPenaltyLogitsProcessor(1.2), transformers.TemperatureLogitsWarper(0.7), transformers.TopKLogitsWarper(30),
        transformers.TopPLogitsWarper(0.9), transformers.MinPLogitsWarper(0.01)])
    for index, (scores, logits) in enumerate(zip(found.scores, found.logits, strict=True)):
        wanted = processors(found.sequences[:, : ids.shape[1] + index], logits.clone())
        assert float((scores.softmax(-1) - wanted.softmax(-1)).abs().max()) <= 1e-6


def test_stop_strings_need_no_loop_but_the_sessions(compiled) -> None:  # type: ignore[no-untyped-def]
    ids = compiled.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    options: dict[str, Any] = {"max_new_tokens": 60, "stop_strings": "no exc", "tokenizer": compiled.tokenizer, "pad_token_id": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = compiled.generate(ids, **options)
    assert torch.equal(mine, compiled.loaded.module.generate(ids, **options))
    assert "no exc" in compiled.tokenizer.decode(mine[0]) and mine.shape[1] < 60


def test_a_pipeline_of_transformers_writes_what_hugging_faces_model_writes(compiled) -> None:  # type: ignore[no-untyped-def]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "batch_size": 2}
    model, tokenizer = compiled.loaded.module, compiled.tokenizer
    wanted = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")(list(PROMPTS), **options)
    for pipe in (compiled.pipeline(), transformers.pipeline("text-generation", model=compiled, tokenizer=tokenizer, device="cpu")):
        assert pipe(list(PROMPTS), **options) == wanted
    with pytest.raises(ac.errors.UsageError, match="serves 'text-generation'"):
        compiled.pipeline("summarization")


def test_text_streams_as_from_hugging_faces_model(compiled, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    ids, said = compiled.tokenizer(PROMPTS[1], return_tensors="pt").input_ids, []
    for model in (compiled.loaded.module, compiled):
        for options in ({}, {"repetition_penalty": 1.2}, {"return_dict_in_generate": True}):
            model.generate(ids, max_new_tokens=8, streamer=transformers.TextStreamer(compiled.tokenizer), pad_token_id=0, **options)
            said.append(capsys.readouterr().out)
    assert said[:3] == said[3:] and PROMPTS[1] in said[0]
