"""``generate`` under any settings equals HuggingFace's own model: tokens, scores and what is drawn, one prompt or several."""

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate_manners import CONFIG, QUICK

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.runtime.sampling import Pick

VOCABULARY, PADDING = CONFIG.vocab_size, CONFIG.pad_token_id
TOKEN = st.integers(0, VOCABULARY - 1).filter(lambda token: token != PADDING)
TOKENS = st.lists(TOKEN, min_size=1, max_size=4, unique=True)
SHAPED: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.floats(0.6, 2.5), "no_repeat_ngram_size": st.integers(1, 3), "encoder_repetition_penalty": st.floats(0.6, 2.0),
    "encoder_no_repeat_ngram_size": st.integers(1, 2), "bad_words_ids": st.lists(TOKENS, min_size=1, max_size=3), "suppress_tokens": TOKENS,
    "begin_suppress_tokens": TOKENS, "forced_eos_token_id": TOKEN, "min_new_tokens": st.integers(1, 8), "min_length": st.integers(1, 12),
    "renormalize_logits": st.just(True), "remove_invalid_values": st.just(True), "forced_bos_token_id": TOKEN,
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 4), st.floats(1.01, 1.5)),
    "sequence_bias": TOKEN.map(lambda token: [[[token], 7.0]]), "guidance_scale": st.just(1.6),
    "eos_token_id": st.one_of(TOKENS, st.lists(TOKEN, min_size=30, max_size=60, unique=True)), "use_cache": st.just(False),
}
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0.3, 3.0), "top_k": st.integers(1, 60), "top_p": st.floats(0.2, 1.0), "min_p": st.floats(0.0, 0.3),
    "typical_p": st.floats(0.3, 1.0), "epsilon_cutoff": st.floats(1e-4, 1e-2), "eta_cutoff": st.floats(1e-4, 1e-2),
    "top_h": st.floats(0.2, 0.9),
}
BEAMS: dict[str, st.SearchStrategy[Any]] = {
    "length_penalty": st.floats(-1.0, 2.0), "early_stopping": st.sampled_from([True, False, "never"])}


def some(of: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(sorted(of)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: of[name] for name in chosen}))


def searches() -> st.SearchStrategy[dict[str, Any]]:
    sampled = st.tuples(some(DRAWN, 3), st.integers(1, 3)).map(lambda d: {"do_sample": True, "num_return_sequences": d[1], **d[0]})
    beams = st.tuples(st.integers(2, 3), some(BEAMS, 2), st.booleans()).map(lambda d: {
        "num_beams": d[0], "do_sample": d[2], "num_return_sequences": d[0] - 1, **d[1]})
    return st.one_of(st.just({}), st.just({}), sampled, beams, st.just({"prompt_lookup_num_tokens": 3}))


PROMPTS = st.lists(st.lists(TOKEN, min_size=1, max_size=9), min_size=1, max_size=3)
OUTPUTS = st.sampled_from([{}, {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}])


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """As a tokenizer that pads on the left."""
    longest = max(map(len, prompts))
    rows = [[PADDING] * (longest - len(one)) + one for one in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor([[int(i >= longest - len(one)) for i in range(longest)]
                                                                             for one in prompts])}


@pytest.fixture(scope="module")
def mine():
    torch.manual_seed(1)
    made = transformers.LlamaForCausalLM(CONFIG).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.data.mul_(8.0) if parameter.dim() > 1 else None
    return ac.compile(made, **QUICK)


def both(mine, asked: dict[str, Any]) -> tuple[Any, Any]:
    """What HuggingFace's model and ours return, each an error's type where it is refused."""
    model = mine.loaded.module
    found = []
    for run in (model.generate, mine.generate):
        torch.manual_seed(29)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                found.append(run(**copy.deepcopy(asked)))
            except Exception as exc:
                found.append(exc)
    return found[0], found[1]


def check(theirs: Any, ours: Any) -> None:
    if isinstance(theirs, Exception):
        assert isinstance(ours, UsageError), (theirs, ours)
        return
    if isinstance(ours, Exception):
        raise ours
    if isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs)
        return
    assert torch.equal(ours.sequences, theirs.sequences) and type(ours) is type(theirs)
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(theirs[name])
        for mine, yours in zip(ours[name], theirs[name], strict=True):
            assert torch.allclose(mine.softmax(-1), yours.softmax(-1), rtol=0, atol=1e-6), "probabilities after all processors"


@settings(max_examples=30)
@given(prompts=PROMPTS, search=searches(), shaped=some(SHAPED, 2), outputs=OUTPUTS,
       where=st.sampled_from(["by name", "for this call", "model's"]))
def test_tokens_and_probabilities_are_hugging_faces(mine, prompts, search, shaped, outputs, where: str) -> None:
    if len(prompts) > 1 and "prompt_lookup_num_tokens" in search:
        prompts = prompts[:1]
    values = {"eos_token_id": None, "pad_token_id": PADDING, **search, **shaped, **outputs, "max_new_tokens": 9}
    model, asked = mine.loaded.module, padded(prompts)
    before = model.generation_config
    try:
        if where == "by name":
            asked = {**asked, **values}
        elif where == "for this call":
            model.generation_config = transformers.GenerationConfig()  # or it fills in what is None
            asked = {**asked, "generation_config": transformers.GenerationConfig(**values)}
        else:
            model.generation_config = transformers.GenerationConfig(**values)
        check(*both(mine, asked))
    finally:
        model.generation_config = before


class Ban(transformers.LogitsProcessor):
    """Forbids what the last token says, differently for every row."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill((torch.arange(VOCABULARY) % 7 == (input_ids[:, -1:] % 7)), -float("inf"))


class Until(transformers.StoppingCriteria):
    """Ends a row behind a multiple of 9."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -1] % 9 == 0


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    return [int(token) for token in range(8, VOCABULARY) if (token + len(ids) + row) % 3]


def halves(model: Any, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, step: int = 1,
           **arguments: Any) -> torch.Tensor:
    """A loop of somebody's own, with an argument of its own, over whatever model it is given."""
    for _ in range(6):
        logits = model(input_ids=input_ids).logits[:, -1].float()
        ranked = logits_processor(input_ids, logits).argsort(-1, descending=True)
        input_ids = torch.cat([input_ids, ranked[:, step : step + 1]], 1)
    return input_ids


@settings(max_examples=10)
@given(prompts=PROMPTS, search=searches().filter(lambda s: "prompt_lookup_num_tokens" not in s), asked=st.sampled_from([
    {"logits_processor": transformers.LogitsProcessorList([Ban()])}, {"stopping_criteria": transformers.StoppingCriteriaList([Until()])},
    {"prefix_allowed_tokens_fn": allowed}, {"logits_processor": [], "stopping_criteria": None}, {"max_time": 1000.0},
    {"custom_generate": halves, "step": 1}, {"stopping_criteria": transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(12)])},
], ))
def test_rules_of_the_caller_are_followed(mine, prompts, search, asked) -> None:
    if "custom_generate" in asked:
        prompts = [prompts[0]] * len(prompts)
    check(*both(mine, {**padded(prompts), "eos_token_id": None, "max_new_tokens": 9, **search, **asked}))


@settings(max_examples=40)
@given(logits=st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=50), seed=st.integers(0, 2**31))
def test_a_draw_is_the_first_of_exponential_clocks_that_rings(logits: list[float], seed: int) -> None:
    """Which is how torch draws one of several, so that tokens equal HuggingFace's at the same seed (docs/decisions/0024)."""
    pick = Pick(processors=lambda ids, scores: scores, stops=lambda ids, scores: torch.tensor([False]), do_sample=True)
    torch.manual_seed(seed)
    found = int(pick.token(torch.zeros(1, 1, dtype=torch.int64), torch.tensor(logits)))
    torch.manual_seed(seed)
    p = torch.tensor([logits]).softmax(-1)
    assert found == int((p / torch.empty_like(p).exponential_(1)).argmax())
