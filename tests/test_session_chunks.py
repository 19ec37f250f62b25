"""Prompts are cut into chunks that cover them, never write beyond the cache, and end with the last token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.errors import UsageError
from agentcompile_core.runtime.chunks import EACH, ChunkInputs, plan_chunks, rows_of

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
