"""Attention over what is cached: the operator's results, parts of a history, and how they are merged."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from attention_library import library, over_all
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentcompile_core.ops import live_attention, operators
from agentcompile_core.ops.operators import AttentionCall

LARGE = 8


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories in several parts, and rows in several blocks, at these sizes too."""
    monkeypatch.setattr(live_attention, "LARGE", LARGE)
    monkeypatch.setattr(live_attention, "SCORES", 1)
    monkeypatch.setattr(live_attention, "PLAIN_SCORES", 1)


class Block:
    """Notes whether somebody is in it."""

    is_open = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.is_open = True
        yield
        self.is_open = False


def attended(block: Block, lengths: list[int], q: Tensor, k: Tensor, *others: Any) -> Tensor:
    """SDPA as it is, asked within the block alone; ``lengths``: over how many keys."""
    assert block.is_open
    lengths.append(k.shape[2])
    return operators.grouped_sdpa(q, k, *others)


def counted(asked: list[tuple[int, set[str]]], serves: bool, q: Tensor, k: Tensor, v: Tensor, out: Tensor, **scores: Any) -> bool:
    """``over_all`` if it ``serves``; ``asked``: over how many keys it should have, and in which words."""
    asked.append((k.shape[2], set(scores)))
    return serves and over_all(q, k, v, out, **scores)


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(st.data())
def test_attention_over_what_is_cached_is_the_operators(data: st.DataObject) -> None:
    """Whatever the call says, over rows that NaN lies behind, and in place of those that a window or a chunk hides."""
    draw = data.draw
    kv_heads, group, dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    wide = draw(st.sampled_from([dim, dim + 3]))
    count, start = draw(st.integers(1, 20)), draw(st.one_of(st.just(0), st.integers(0, 40)))
    window = draw(st.sampled_from([0, 1, 2, 7, start + count, 100]))
    chunk = draw(st.one_of(st.just(0), st.integers(1, 70)))
    heads, capacity = kv_heads * group, start + count + draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    caches = normal(1, capacity, kv_heads, dim), normal(1, capacity, kv_heads, wide)
    for cache in caches:
        cache[:, start:] = float("nan")
        if 0 < window <= start:
            cache[:, : start - window + 1] = float("nan")
        if chunk:
            cache[:, : start - start % chunk] = float("nan")
    call = AttentionCall(
        normal(1, heads, count, dim), normal(1, kv_heads, count, dim), normal(1, kv_heads, count, wide), *caches, torch.tensor([start]),
        0.4, window, draw(st.sampled_from([0.0, 2.0])), draw(st.sampled_from([None, normal(heads)])), start == 0 and draw(st.booleans()),
        draw(st.sampled_from([None, normal(heads).tolist()])), chunk)
    clean = evolve(call, k_cache=caches[0].nan_to_num(), v_cache=caches[1].nan_to_num())
    wanted = operators.attention(*(getattr(clean, a) for a in ("q", "k", "v", "k_cache", "v_cache", "position", "scale", "window",
                                                              "softcap", "sinks", "fresh", "slopes", "chunk")))
    live_attention.append_rows(call)
    plain, block = not 0 < window < start + count and call.softcap == 0.0 and call.sinks is None and call.slopes is None, Block()
    for part in (None, library):
        lengths: list[int] = []
        with mock.patch.object(live_attention, "grouped_sdpa", side_effect=partial(attended, block, lengths)):
            torch.testing.assert_close(live_attention.attend(call, start, part=part, around=block), wanted)
        assert not (lengths and plain and part is not None and not chunk and wide == dim), "the library serves these"
        out = torch.full_like(wanted, float("nan"))
        live_attention.attend(call, start, out=out, part=part)
        torch.testing.assert_close(out, wanted)
    for serves, place in product((True, False), (None, torch.full_like(wanted, float("nan")))):
        asked: list[tuple[int, set[str]]] = []
        found = live_attention.attend(call, start, out=place, part=library, over_all=partial(counted, asked, serves))
        torch.testing.assert_close(found, wanted)
        assert place is None or found is place
        if 0 < chunk < start + count:
            assert len(asked) == (start + count - 1) // chunk - start // chunk + 1  # each chunk of positions by itself
            continue
        seen = min(start + count, window + count - 1) if window else start + count  # a key that no row sees may be anything
        assert asked == [(seen, {"scale"} if plain else {"scale", "window", "softcap", "sinks", "slopes"})]
    with pytest.raises(ValueError, match="attends over a cache"):
        live_attention.attend(call, capacity - count + 1)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "more", "mib"), [
    (32, 8, 64, {}, 128), (16, 8, 128, {}, 128), (4, 1, 64, {}, 32), (32, 8, 64, {"softcap": 2.0}, 32), (32, 8, 60, {}, 32),
    (32, 8, 64, {"dtype": torch.float64}, 32)], ids=str)
def test_blocks_of_rows_are_of_bounded_size(monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, dim: int, more: dict[str, Any],
                                            mib: int) -> None:
    """Scores of a block in fp32 take so much, where they lie in memory or not; of one K and V for all heads the mask counts."""
    monkeypatch.undo()
    dtype, softcap = more.get("dtype", torch.float16), more.get("softcap", 0.0)
    q, k, cache = (torch.empty(*size, dtype=dtype, device="meta") for size in (
        (1, heads, 8192, dim), (1, kv_heads, 8192, dim), (1, 16384, kv_heads, dim)))
    call = AttentionCall(q, k, k, cache, cache, torch.empty(1, device="meta"), 1.0, 0, softcap, None, False, None, 0)
    for live in (8192, 16384):
        rows = live_attention._rows_at_a_time(call, live)
        assert mib / 1.5 <= rows * heads * live * 4 / 2**20 <= mib
    assert live_attention._rows_at_a_time(call, 1 << 24) == 16


@settings(derandomize=True, database=None, deadline=None, max_examples=200)
@given(st.integers(0, 300), st.integers(1, 40))
def test_parts_of_a_history_cover_it_and_have_few_lengths(start: int, count: int) -> None:
    ranges = list(live_attention._history(start, count))
    assert [n for first, last in ranges for n in range(first, last)] == list(range(start))
    if count >= LARGE and start % count == 0:
        assert all((last - first) // count & ((last - first) // count - 1) == 0 for first, last in ranges)
        assert len(ranges) == (start // count).bit_count()
    else:
        assert len(ranges) <= 1


@pytest.mark.parametrize("dtype, off", [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_merged_parts_are_rounded_once(dtype: torch.dtype, off: float) -> None:
    """A long history beside a chunk of one row: whose share is far below what a half resolves beside 1."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator, dtype=torch.float64) for n in (3, 4000, 4000))
    v[:, :, -1] *= 40
    wanted = torch.softmax(q @ k.transpose(2, 3) * 0.02, -1) @ v
    parts = [library(q, k[:, :, a:b], v[:, :, a:b], causal=False, scale=0.02) for a, b in ((3999, 4000), (0, 3000), (3000, 3999))]
    out = torch.empty(1, 2, 3, 16, dtype=dtype)
    live_attention.merge([(rows.to(dtype), lse) for rows, lse in parts if rows is not None], out)  # type: ignore[misc]
    assert float(((out.double() - wanted) / (wanted.abs() + 0.05)).abs().max()) < off
