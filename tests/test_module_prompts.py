"""Prompts that HuggingFace's own model reads (images, positions, kinds of tokens): tokens are its own, by compiled steps or by its loop."""

import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate_manners import CONFIG, QUICK

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.ir.graph import OFFSET
from agentcompile_core.store import Store

ROOT = Path(__file__).parents[1]
# A window shorter than the prompt; several positions of one token; the same with states of fixed size; images of sizes of their own; layers
# that attend to what others cached.
TYPES = ("gemma3", "qwen2_5_vl", "qwen3_5", "mistral3", "gemma4")
BY_STEPS, BY_LOOP = "compiled steps make its tokens", "without kernels"
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.floats(0.7, 2.0), "top_k": st.integers(1, 40), "temperature": st.floats(0.5, 3.0),
    "top_p": st.floats(0.3, 1.0),
    "eos_token_id": st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True), "no_repeat_ngram_size": st.integers(1, 3),
}
WAYS = st.lists(st.sampled_from(sorted(SETTINGS)), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({"do_sample": st.booleans(), **{name: SETTINGS[name] for name in names}}))


@pytest.fixture(scope="module")
def composite() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from covered import composite

        yield composite
    finally:
        sys.path[:] = before


class Compiled(dict[str, tuple[Any, Any]]):
    """By type HuggingFace's own model and the compiled one, over weights of their own; made when they are asked for."""

    def __init__(self, composite: Any) -> None:
        super().__init__()
        self._tiny = composite.tiny

    def __missing__(self, name: str) -> tuple[Any, Any]:
        self[name] = self._tiny(name), made(self._tiny(name))
        return self[name]


@pytest.fixture(scope="module")
def compiled(composite: Any) -> Compiled:
    return Compiled(composite)


def made(model: Any, context: int = 96) -> Any:
    return ac.compile(model, max_context=context, **QUICK)


def generated(model: Any, seed: int, **asked: Any) -> tuple[torch.Tensor, str]:
    """Tokens, and what was said of the request."""
    torch.manual_seed(seed)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = model.generate(**{"pad_token_id": 0, **asked})
    return found, " ".join(str(one.message) for one in heard if "this request" in str(one.message))


def drawn_prompt(composite: Any, model: Any, image: int, before: list[int], behind: list[int]) -> dict[str, torch.Tensor]:
    """An image with other tokens around it."""
    found = dict(composite.image_prompt(model, image))
    lengths, ids = (len(before), len(behind)), found["input_ids"][:, 2:-3]
    found["input_ids"] = torch.cat([torch.tensor([before], dtype=torch.int64), ids, torch.tensor([behind])], dim=1)
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in found:
            ends = [found[name].new_full((1, length), int(name == "attention_mask")) for length in lengths]
            found[name] = torch.cat([ends[0], found[name][:, 2:-3], ends[1]], dim=1)
    return found


TOKENS = st.lists(st.integers(3, 99), min_size=1, max_size=9)


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=15, deadline=None)
@given(image=st.integers(1, 500), before=TOKENS, behind=TOKENS, count=st.integers(1, 12), way=WAYS, seed=st.integers(0, 99))
def test_tokens_behind_an_image_are_huggingfaces(composite: Any, compiled: Any, name: str, image: int, before: list[int], behind: list[int],
                                                 count: int, way: dict[str, Any], seed: int) -> None:
    original, mine = compiled[name]
    asked = {**drawn_prompt(composite, original, image, before, behind), **way, "max_new_tokens": count}
    wanted, _ = generated(original, seed, **asked)
    found, said = generated(mine, seed, **asked)
    assert torch.equal(found, wanted) and BY_STEPS in said
    text = {"input_ids": torch.tensor([behind]), "attention_mask": torch.ones(1, len(behind), dtype=torch.int64), **way,
            "max_new_tokens": count}
    assert torch.equal(generated(mine, seed, **text)[0], generated(original, seed, **text)[0]), "nothing of the image is left"


@pytest.mark.parametrize("name", TYPES)
def test_images_matter_and_steps_are_told_where_they_are(composite: Any, compiled: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, mine = compiled[name]
    told: list[int] = []
    mine.session.agreed.clear()
    read_next = mine.session.read_next
    monkeypatch.setattr(mine.session, "read_next", lambda *given: told.append(int(mine.session.states[OFFSET])) or read_next(*given)
                        if OFFSET in mine.graphs.zeroed else read_next(*given))
    asked = {"max_new_tokens": 12, "eos_token_id": None}
    several = (generated(mine, 0, **composite.image_prompt(original, seed), **asked)[0] for seed in range(1, 40))
    first = next(several)
    assert any(not torch.equal(one, first) for one in several)
    assert (OFFSET in mine.graphs.zeroed) == (name in ("qwen2_5_vl", "qwen3_5"))
    if OFFSET in mine.graphs.zeroed:
        assert set(told) == {-3}, "six tokens of an image have three positions"
        assert int(mine.session.states[OFFSET]) == 0, "of whoever comes next"


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "qwen3_5"])
def test_custom_generate_of_a_prompt_with_an_image(composite: Any, compiled: Any, name: str) -> None:
    original, mine = compiled[name]
    asked = {**composite.image_prompt(original), "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    wanted = original.generate(**asked)
    hosted = mine.loaded.module
    assert torch.equal(hosted.generate(**asked, custom_generate=mine.custom_generate), wanted)
    text = {name: asked[name][:, -3:] for name in ("input_ids", "attention_mask")}
    found = hosted.generate(**text, max_new_tokens=6, eos_token_id=None, pad_token_id=0, custom_generate=mine.custom_generate)
    assert torch.equal(found, original.generate(**text, max_new_tokens=6, eos_token_id=None, pad_token_id=0))
    two = {key: torch.cat([one, one]) for key, one in asked.items() if isinstance(one, torch.Tensor)}
    with pytest.raises(UsageError, match="custom_generate cannot serve this prompt"):
        hosted.generate(**two, max_new_tokens=4, pad_token_id=0, custom_generate=mine.custom_generate)


def test_a_session_that_was_made_in_inference_mode_serves_outside_of_it(composite: Any) -> None:
    original = composite.tiny("gemma3")
    with torch.inference_mode():
        mine = made(composite.tiny("gemma3"))
    asked = {**composite.image_prompt(original), "max_new_tokens": 6, "eos_token_id": None}
    assert torch.equal(generated(mine, 0, **asked)[0], generated(original, 0, **asked)[0])


def test_what_transformers_refuses_is_one_sentence_behind_an_image_too(composite: Any, compiled: Any) -> None:
    original, mine = compiled["gemma3"]
    with pytest.raises(UsageError, match="refused this request"):
        generated(mine, 0, **composite.image_prompt(original), max_new_tokens=4, prefix_allowed_tokens_fn=lambda row, ids: [])


def test_a_streamer_sees_the_prompt_and_each_token(composite: Any, compiled: Any) -> None:
    class Seen:
        def __init__(self) -> None:
            self.heard: list[list[int]] = []
            self.over = False

        def put(self, tokens: torch.Tensor) -> None:
            self.heard.append(tokens.flatten().tolist())

        def end(self) -> None:
            self.over = True

    original, mine = compiled["gemma3"]
    seen, prompt = Seen(), composite.image_prompt(original)
    found, _ = generated(mine, 0, **prompt, max_new_tokens=5, eos_token_id=None, streamer=seen)
    assert seen.over and seen.heard[0] == prompt["input_ids"][0].tolist()
    assert [token for one in seen.heard for token in one] == found[0].tolist()


class Broken(Exception):
    pass


def test_what_a_streamer_raises_comes_through(composite: Any, compiled: Any) -> None:
    class Ends:
        def put(self, tokens: torch.Tensor) -> None:
            raise Broken

        def end(self) -> None:
            pass

    original, mine = compiled["gemma3"]
    with pytest.raises(Broken):
        generated(mine, 0, **composite.image_prompt(original), max_new_tokens=5, streamer=Ends())
    found, _ = generated(mine, 0, **composite.image_prompt(original), max_new_tokens=5)
    assert torch.equal(found, generated(original, 0, **composite.image_prompt(original), max_new_tokens=5)[0]), "it serves on"


@cache
def llama() -> tuple[Any, Any]:
    """Not while tests are collected, which every process of a run does."""
    def drawn() -> Any:
        torch.manual_seed(1)
        return transformers.LlamaForCausalLM(CONFIG).eval().requires_grad_(False)

    return drawn(), made(drawn(), CONFIG.max_position_embeddings)


@settings(max_examples=15, deadline=None)
@given(ids=st.lists(st.integers(0, CONFIG.vocab_size - 1).filter(lambda token: token != CONFIG.pad_token_id), min_size=2, max_size=9),
       start=st.integers(0, 2), step=st.integers(1, 2))
def test_positions_of_the_callers_are_those_of_steps_or_the_model_runs_alone(ids: list[int], start: int, step: int) -> None:
    original, mine = llama()
    places = torch.arange(start, start + step * len(ids), step)[None]
    asked = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64), "position_ids": places,
             "max_new_tokens": 4, "eos_token_id": None}
    found, said = generated(mine, 0, **asked)
    assert torch.equal(found, generated(original, 0, **asked)[0])
    counted = int(places[0, -1]) + 1 == len(ids)
    assert BY_STEPS in said or (said == "" and counted) if counted else BY_LOOP in said


@pytest.mark.parametrize(("changes", "why"), [
    ({"num_beams": 2}, "is given"), ({"num_return_sequences": 2, "do_sample": True}, "rows"),
    ({"return_dict_in_generate": True}, "return_dict"), ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ({"guidance_scale": 1.5}, "guidance"), ({"prompt_lookup_num_tokens": 2}, "is given"),
])
def test_what_no_step_behind_an_image_can_serve_is_the_models_own(composite: Any, compiled: Any, changes: dict[str, Any], why: str) -> None:
    original, mine = compiled["mistral3"]
    asked = {**composite.image_prompt(original), "max_new_tokens": 4, "eos_token_id": None, **changes}
    wanted, _ = generated(original, 1, **asked)
    found, said = generated(mine, 1, **asked)
    assert BY_LOOP in said and why in said
    one, other = (getattr(result, "sequences", result) for result in (found, wanted))
    assert torch.equal(one, other)


def test_several_prompts_with_images_are_the_models_own(composite: Any, compiled: Any) -> None:
    original, mine = compiled["gemma3"]
    two = {name: torch.cat([composite.image_prompt(original, seed)[name] for seed in (1, 2)]) for name in composite.image_prompt(original)}
    found, said = generated(mine, 0, **two, max_new_tokens=4)
    assert torch.equal(found, generated(original, 0, **two, max_new_tokens=4)[0]) and BY_LOOP in said


def test_a_prompt_that_the_model_refuses_is_one_sentence(composite: Any, compiled: Any) -> None:
    original, mine = compiled["gemma3"]
    prompt = composite.image_prompt(original)
    shorter = {name: one[:, 3:] if one.dim() == 2 else one for name, one in prompt.items()}
    with pytest.raises(UsageError, match="refused this request"):
        generated(mine, 0, **shorter, max_new_tokens=4)
    with pytest.raises(UsageError, match="exceed the context"):
        generated(mine, 0, **prompt, max_new_tokens=400)
    found, _ = generated(mine, 0, **prompt, max_new_tokens=4)
    assert torch.equal(found, generated(original, 0, **prompt, max_new_tokens=4)[0])


def test_rows_of_a_batch_have_no_offset(compiled: Any) -> None:
    original, mine = compiled["qwen2_5_vl"]
    mine.session.rows.when = "always"
    ids = torch.tensor([[5, 6, 7], [9, 8, 7]])
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "eos_token_id": None}
    assert torch.equal(generated(mine, 0, **asked)[0], generated(original, 0, **asked)[0])
    assert not mine.session.rows.notes, mine.session.rows.notes
    mine.session.rows.when = "never"


def test_a_folder_of_a_model_with_images_is_opened(composite: Any, tmp_path: Path) -> None:
    original = composite.tiny("mistral3")
    original.save_pretrained(tmp_path / "model")
    mine = ac.compile(str(tmp_path / "model"), max_context=96, **QUICK)
    asked = {**composite.image_prompt(original), "max_new_tokens": 5, "eos_token_id": None}
    found, said = generated(mine, 0, **asked)
    assert torch.equal(found, generated(original, 0, **asked)[0]) and BY_STEPS in said
    mine.save(tmp_path / "bundle")
    again = ac.load(tmp_path / "bundle", composite.tiny("mistral3"), device="cpu", run_on="framework", store=Store(None))
    assert torch.equal(generated(again, 0, **asked)[0], found)
