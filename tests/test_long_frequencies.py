"""Models whose rotary frequencies depend on how long a sequence is (LongRoPE): tokens are HuggingFace's on both sides of the limit."""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import agentcompile_core as ac
from agentcompile_core.errors import UsageError
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.store import Store

POSITIONS, LIMIT = 96, 40
SIZES: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LONG = {"rope_type": "longrope", "short_factor": [1.0 + 0.01 * i for i in range(8)], "long_factor": [1.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": LIMIT, "rope_theta": 10000.0}


def tiny(kind: str, limit: int = LIMIT) -> Any:
    """Phi-3 reads a sequence that grows beyond the limit again; Llama goes on with what it has cached."""
    named = {"original_max_position_embeddings": limit, "sliding_window": None} if kind == "phi3" else {}
    config = transformers.CONFIG_MAPPING[kind](**SIZES, **named, rope_parameters={**LONG, "original_max_position_embeddings": limit})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(8.0)
    return model.eval().requires_grad_(False)


def compiled(model: Any, **options: Any) -> Any:
    return ac.compile(model, run_on="framework", store=Store(None), origins=[], validators=(), **options)


@pytest.fixture(scope="module")
def phi() -> tuple[Any, Any]:
    model = tiny("phi3")
    return model, compiled(model)


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    model = tiny("llama")
    return model, compiled(model)


def prompt_of(length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 120, (rows, length), generator=torch.Generator().manual_seed(length))


def read_as_a_whole(model: nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    """The most likely tokens, each behind the whole sequence read anew. transformers before 5.2 loses what it had cached at the limit."""
    for _ in range(count):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def by_hugging_face(model: Any, ids: torch.Tensor, count: int, **options: Any) -> Any:
    return model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, **options)


LENGTHS = st.tuples(st.integers(1, POSITIONS - 1), st.integers(1, 60)).filter(lambda pair: sum(pair) <= POSITIONS)


@settings(derandomize=True, database=None, deadline=None, max_examples=15)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=3), steps=st.sampled_from((1, 4)))
def test_phis_tokens_are_those_of_the_whole_sequence_read_anew(phi: tuple[Any, Any], lengths: list[tuple[int, int]], steps: int) -> None:
    """Requests on both sides of the limit, and over it, one behind the other."""
    model, mine = phi
    assert mine.graphs.kv is not None and mine.notes == () and [f.limit for f in mine.graphs.frequencies] == [LIMIT]
    mine.session.steps_per_graph = steps
    for length, count in lengths:
        found = mine.generate(prompt_of(length), count, eos_token_id=None)
        assert torch.equal(found, read_as_a_whole(model, prompt_of(length), count)), (length, count)


@settings(derandomize=True, database=None, deadline=None, max_examples=12)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=3))
def test_a_model_that_goes_on_with_its_cache_does_so_here(llama: tuple[Any, Any], lengths: list[tuple[int, int]]) -> None:
    model, mine = llama
    assert mine.graphs.kv is not None and mine.notes == () and not mine.graphs.frequencies[0].rereads
    for length, count in lengths:
        assert torch.equal(mine.generate(prompt_of(length), count, eos_token_id=None), by_hugging_face(model, prompt_of(length), count))


@pytest.mark.parametrize("length, count", [(20, 60), (39, 5), (60, 20), (5, 8)])
@pytest.mark.parametrize("options", [{"do_sample": True, "top_k": 7}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}], ids=str)
def test_sampling_and_processors_go_over_the_limit(llama: tuple[Any, Any], length: int, count: int, options: dict[str, Any]) -> None:
    found = []
    for model in llama:
        torch.manual_seed(9)
        found.append(model.generate(prompt_of(length), max_new_tokens=count, min_new_tokens=count, eos_token_id=None, **options))
    assert torch.equal(*found)


def test_processors_see_what_was_read_again(phi: tuple[Any, Any]) -> None:
    """A penalty of a hair changes no token: what the host picks goes over the limit as what the device picks does."""
    model, mine = phi
    for length, count in ((30, 30), (39, 3), (50, 9)):
        found = mine.generate(prompt_of(length), count, eos_token_id=None, repetition_penalty=1.0 + 1e-9, no_repeat_ngram_size=60)
        assert torch.equal(found, read_as_a_whole(model, prompt_of(length), count))


def driven(model: Any, input_ids: torch.Tensor, logits_processor: Any = None, stopping_criteria: Any = None, generation_config: Any = None,
           **others: Any) -> torch.Tensor:
    """A decoding method of somebody's own, as ``custom_generate`` takes it: one token after the other."""
    past, ids, last = None, input_ids, input_ids
    while ids.shape[1] < generation_config.max_length:
        out = model(input_ids=last, past_key_values=past, use_cache=True, logits_to_keep=1)
        past, last = out.past_key_values, out.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, last], dim=1)
    return ids


OTHERS: list[tuple[dict[str, Any], int]] = [
    ({"num_beams": 3}, 1), ({}, 2), ({"num_beams": 2}, 2), ({"custom_generate": driven}, 1), ({"guidance_scale": 1.5}, 1),
    ({"return_dict_in_generate": True}, 1), ({"do_sample": True, "num_return_sequences": 2}, 1)]


@pytest.mark.parametrize("options, rows", OTHERS, ids=lambda given: "-".join(given) or "rows" if isinstance(given, dict) else str(given))
def test_what_steps_do_not_follow_runs_on_hugging_faces_loop(llama: tuple[Any, Any], options: dict[str, Any], rows: int) -> None:
    model, mine = llama
    said: list[str] = []
    for length, count, is_short in ((30, 30, False), (50, 9, False), (9, 9, True)):
        given: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None, "do_sample": False, **options}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(mine), "_say", lambda self, line: said.append(line))
            said.clear()
            found = []
            for one in (model, mine):
                torch.manual_seed(8)
                made = one.generate(prompt_of(length, rows), **given)
                found.append(made if isinstance(made, torch.Tensor) else made.sequences)
        assert torch.equal(*found), (length, count)
        assert any("turned otherwise" in line for line in said) is not is_short


def test_over_the_session_no_step_grows_over_the_limit(llama: tuple[Any, Any]) -> None:
    """HuggingFace's model with the session's loop as its ``custom_generate``, and a prompt whose positions do not count its tokens."""
    model, mine = llama
    for length, count in ((9, 20), (30, 30), (50, 9)):
        found = model.generate(prompt_of(length), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None,
                               custom_generate=mine.custom_generate)
        assert torch.equal(found, by_hugging_face(model, prompt_of(length), count))
    def placed(length: int, **options: Any) -> torch.Tensor:
        positions = torch.arange(length)[None].clone()
        positions[:, 1] = 0
        found = model.generate(prompt_of(length), position_ids=positions, min_new_tokens=9, do_sample=False, eos_token_id=None, **options)
        assert isinstance(found, torch.Tensor)
        return found

    assert torch.equal(placed(5, max_new_tokens=9, custom_generate=mine.custom_generate), placed(5, max_new_tokens=9))
    with pytest.raises(UsageError, match="beyond 40 positions"):
        placed(30, max_new_tokens=30, custom_generate=mine.custom_generate)


def test_a_step_of_hugging_faces_own_model_between_two_requests_changes_nothing(phi: tuple[Any, Any]) -> None:
    """It keeps its frequencies in a buffer that it writes itself; ours are memory of their own."""
    model, mine = phi
    short, long = (mine.generate(prompt_of(length), 8, eos_token_id=None) for length in (9, 60))
    for length in (70, 4):
        with torch.no_grad():
            model(prompt_of(length))
        assert torch.equal(mine.generate(prompt_of(9), 8, eos_token_id=None), short)
        assert torch.equal(mine.generate(prompt_of(60), 8, eos_token_id=None), long)
        assert torch.equal(model(prompt_of(length)).logits, model(prompt_of(length)).logits)
    assert torch.equal(read_as_a_whole(model, prompt_of(9), 8), short), "and it is what it was"


def test_a_model_that_has_read_a_long_prompt_is_captured_as_any_other() -> None:
    model = tiny("phi3")
    with torch.no_grad():
        model(prompt_of(80))
    mine = compiled(model)
    assert mine.graphs.kv is not None
    assert torch.equal(mine.generate(prompt_of(12), 9, eos_token_id=None), read_as_a_whole(model, prompt_of(12), 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_module_that_was_converted_as_a_whole_keeps_its_frequencies_in_its_type(dtype: torch.dtype) -> None:
    """``module.to(dtype)`` converts buffers, too. Versions of transformers whose long ones stay in float32 then run on the framework."""
    model = tiny("phi3").to(dtype)
    mine = compiled(model)
    if mine.graphs.kv is None:
        assert "otherwise than by one limit" in mine.notes[0]
        return
    for length, count in ((9, 12), (60, 12)):
        found = mine.generate(prompt_of(length), count, eos_token_id=None)
        for end in range(length, length + count):  # both round in their own way: each token is one of the best behind those before it
            logits = model(input_ids=found[:, :end], use_cache=False).logits[0, -1].float()
            assert float((logits.max() - logits[found[0, end]]) / logits.std()) <= 0.1, end


@pytest.mark.parametrize("context", [LIMIT // 2, LIMIT, LIMIT + 1])
def test_a_context_up_to_the_limit_is_one_kind_of_sequence(context: int) -> None:
    model = tiny("phi3")
    mine = compiled(model, max_context=context)
    count = context - 7
    assert torch.equal(mine.generate(prompt_of(7), count, eos_token_id=None), read_as_a_whole(model, prompt_of(7), count))
    with pytest.raises(UsageError, match="exceed the context"):
        mine.generate(prompt_of(7), count + 1)


def test_teacher_forced_logits_are_those_of_the_whole_sequence(phi: tuple[Any, Any]) -> None:
    model, mine = phi
    for length in (12, LIMIT, LIMIT + 1, 70):
        wanted = model(prompt_of(length), use_cache=False).logits[0]
        torch.testing.assert_close(mine.session.teacher_forced(prompt_of(length)), wanted, rtol=1e-3, atol=1e-3 * float(wanted.std()))


def test_a_bundle_keeps_both_kinds(phi: tuple[Any, Any], tmp_path: Any) -> None:
    model, mine = phi
    again = ac.load(mine.save(tmp_path / "bundle"), tiny("phi3"), run_on="framework", store=Store(None))
    assert again.graphs.frequencies == mine.graphs.frequencies
    for length, count in ((20, 60), (50, 9)):
        assert torch.equal(again.generate(prompt_of(length), count, eos_token_id=None), read_as_a_whole(model, prompt_of(length), count))


def test_frequencies_that_grow_beyond_the_models_limit_are_one_kind_up_to_it() -> None:
    """NTK's dynamic form; and after HuggingFace's own model has read more than its limit, which is its own affair."""
    config = transformers.LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(config).eval()
    mine = compiled(model)
    assert mine.graphs.kv is not None and mine.notes == () and mine.graphs.workload.max_context == POSITIONS
    for length, count in ((5, POSITIONS - 5), (POSITIONS - 1, 1)):
        assert torch.equal(mine.generate(prompt_of(length), count, eos_token_id=None), by_hugging_face(model, prompt_of(length), count))
    with torch.no_grad():
        model(prompt_of(POSITIONS + 30))
    assert torch.equal(mine.generate(prompt_of(5), 9, eos_token_id=None), by_hugging_face(model, prompt_of(5), 9))


ROTATIONS: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 2.0}, "yarn": {"factor": 4.0, "original_max_position_embeddings": LIMIT},
    "longrope": {"original_max_position_embeddings": LIMIT, "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0] * 8,
                 "factor": 2.0}}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},  # of which the second turns by these
    "cohere": {"num_hidden_layers": 1},  # the layers of one type turn alike
    "deepseek_v3": {"num_hidden_layers": 1, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8,
                    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 32, "num_key_value_heads": 4}}


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_rotations_of_all_kinds_and_forms(name: str, rotation: str) -> None:
    """Of several types of layers, of neighbouring channels, of latent attention; prompts in chunks on both sides of the limit."""
    kind = transformers.CONFIG_MAPPING[name]
    base = kind(**SIZES | MODELS[name]).rope_parameters
    said = {"rope_type": rotation, **ROTATIONS[rotation]}
    given = {**base, "full_attention": {**base["full_attention"], **said}} if "full_attention" in base else {**base, **said}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES | MODELS[name], rope_parameters=given)).eval()
    mine = compiled(model, workload=Workload(dtype=DType.F32, max_context=POSITIONS, prefill_chunks=(16,)))
    assert mine.graphs.kv is not None, mine.notes
    for length, count in ((9, 20), (60, 20), (9, 50), (LIMIT + 1, 5)):
        assert torch.equal(mine.generate(prompt_of(length), count, eos_token_id=None), by_hugging_face(model, prompt_of(length), count))
