"""Prompts are cut into chunks that cover them, never write beyond the cache, and end with the last token."""

import pytest
import torch
from capture_models import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_live_prefill import MODELS

from agentcompile_core.errors import UsageError
from agentcompile_core.ir.graph import DType, Workload
from agentcompile_core.runtime.chunks import EACH, ChunkInputs, cost_of_each, plan_chunks, rows_of
from agentcompile_core.stages.capture.language_model import capture_language_model

SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=200)


@SETTINGS
@given(st.integers(1, 4000), st.lists(st.integers(2, 600), min_size=1, max_size=3, unique=True), st.integers(0, 500))
def test_chunks_cover_the_prompt_inside_the_cache(prompt: int, sizes: list[int], slack: int) -> None:
    capacity = max(prompt, *sizes) + slack
    chunks = plan_chunks(prompt, sizes, capacity)
    covered = 0
    for chunk in chunks:
        assert chunk.start <= covered, "a gap in the prompt"
        assert chunk.start + chunk.tokens <= capacity, "padding beyond the cache"
        assert 0 < chunk.length <= chunk.tokens
        assert chunk.start + chunk.length > covered, "a chunk that brings nothing new"
        covered = chunk.start + chunk.length
    assert covered == prompt
    assert chunks[0].fresh and not any(c.fresh for c in chunks[1:])


def test_a_prompt_longer_than_the_cache_is_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"300 tokens.*256 positions"):
        plan_chunks(300, (64,), 256)


@SETTINGS
@given(st.integers(1, 24000))
def test_no_plan_of_whole_chunks_and_one_that_holds_the_rest_costs_less(prompt: int) -> None:
    """A chunk costs its rows and ``EACH``, whatever it holds."""
    sizes = (128, 512, 2048, 8192)
    cost = sum(chunk.tokens + EACH for chunk in plan_chunks(prompt, sizes, 2 * prompt + sizes[-1]))
    for size in sizes:
        for most in range(prompt // size + 1):
            rest = prompt - most * size
            last = [one for one in sizes if one >= rest][:1] if rest else []
            if last or not rest:
                assert cost <= most * (size + EACH) + sum(one + EACH for one in last)


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(st.integers(1, 400), st.lists(st.integers(2, 60), min_size=1, max_size=3, unique=True))
def test_each_chunk_is_told_its_tokens_and_where_they_are(length: int, sizes: list[int]) -> None:
    prompt = torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length))
    chunks = plan_chunks(length, sizes, length + max(sizes))
    for chunk, rows in zip(chunks, rows_of(chunks, prompt, "cpu"), strict=True):
        inputs = ChunkInputs(chunk.tokens, "cpu")
        inputs.flat.fill_(99).copy_(rows)
        ids, start, count = inputs.named(("ids", "start", "count")).values()
        assert ids[0, : chunk.length].tolist() == prompt[0, chunk.start : chunk.start + chunk.length].tolist()
        assert not ids[0, chunk.length :].any() and ids.shape == (1, chunk.tokens)
        assert (int(start), int(count)) == (chunk.start, chunk.length)


@SETTINGS
@given(prompt=st.integers(1, 5000), each=st.integers(EACH, 20 * EACH))
def test_chunks_that_cost_more_beside_their_rows_are_fewer(prompt: int, each: int) -> None:
    """As those of models whose rows are multiplied with few of the weights: never dearer than the usual cut, by what they cost."""
    sizes = (128, 512, 2048)
    mine, usual = (plan_chunks(prompt, sizes, 8192, each=one) for one in (each, EACH))
    assert len(mine) <= len(usual) and sum(chunk.length for chunk in mine) == prompt
    assert sum(chunk.tokens + each for chunk in mine) <= sum(chunk.tokens + each for chunk in usual)


@pytest.mark.parametrize(("name", "times"), [("qwen3", 1), ("gpt_oss", 2)])
def test_a_chunk_reads_all_experts(name: str, times: int) -> None:
    """Two of 4 experts are chosen in the tiny model, which has other weights besides."""
    workload = Workload(dtype=DType.F32, max_context=64, prefill_chunks=())
    cost = cost_of_each(capture_language_model(tiny(name, MODELS[name]), name, workload))
    assert cost == EACH if times == 1 else EACH < cost < times * EACH
