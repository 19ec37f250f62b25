"""A cache that grows against one that is all there, over a reservation that sees what is written too far."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from agentcompile_runtime_flashkv import FlashKVCacheManager, FlashKVRuntime, growing
from agentcompile_runtime_flashkv.growing import GrowingKVCacheManager
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcompile_core.plugin_api import DType, KVSpec, Reject, UsageError
from agentcompile_core.testing.reserving import HostReserved

SIZES: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 4, "value_dim": 2, "dtype": torch.float16, "device": "cpu"}
KEY_ROW, VALUE_ROW = 16, 8  # bytes
POSITION = 2 * (KEY_ROW + VALUE_ROW)
WORDS = st.sampled_from(["hold", "append", "give back", "reallocate"])


class Reserving:
    """``Backend.reserve`` of a host; keeps what it gave."""

    def __init__(self, piece_bytes: int = 32, limit_bytes: int | None = None, refuses: str = "") -> None:
        self.piece_bytes, self.limit_bytes, self.refuses = piece_bytes, limit_bytes, refuses
        self.given: list[HostReserved] = []
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, nbytes: Sequence[int]) -> HostReserved | Reject:
        self.asked.append(tuple(nbytes))
        if self.refuses:
            return Reject(self.refuses)
        self.given.append(HostReserved(nbytes, self.piece_bytes, self.limit_bytes))
        return self.given[-1]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "STEP", 4)


def rows(dim: int, count: int, seed: int) -> torch.Tensor:
    return torch.randn(1, 2, count, dim, generator=torch.Generator().manual_seed(seed)).half()


def addresses(cache: FlashKVCacheManager) -> list[int]:
    return [t.data_ptr() for t in (*cache.keys, *cache.values)]


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(capacity=st.integers(1, 30), piece=st.sampled_from([16, 40, 64]), deeds=st.lists(st.tuples(WORDS, st.integers(0, 34)), max_size=9))
def test_it_holds_what_a_whole_cache_holds(capacity: int, piece: int, deeds: list[tuple[str, int]]) -> None:
    reserving = Reserving(piece)
    cache, whole = GrowingKVCacheManager(reserving, capacity=capacity, **SIZES), FlashKVCacheManager(capacity=capacity, **SIZES)
    places, generation = addresses(cache), 0
    for seed, (word, count) in enumerate(deeds):
        before, bytes_before = cache.held, cache.held_bytes
        if word == "hold":
            if count > cache.capacity:
                with pytest.raises(UsageError, match=f"has {cache.capacity} positions, and {count} were asked for"):
                    cache.hold(count)
            else:
                cache.hold(count)
            assert cache.held >= before and cache.held_bytes >= bytes_before and cache.held >= min(count, cache.capacity, before or count)
            assert cache.held >= count or count > cache.capacity
        elif word == "append" and whole.length + count <= whole.capacity:
            for layer in range(2):
                key, value = rows(4, count, seed + layer), rows(2, count, seed + layer + 100)
                cache.append(layer, key, value)
                whole.append(layer, key, value)
            cache.advance(count)
            whole.advance(count)
        elif word == "give back":
            cache.give_back(count)
            assert min(before, max(count, cache.length)) <= cache.held <= before
        elif word == "reallocate" and count >= max(1, whole.length):
            cache.reallocate(count)
            whole.reallocate(count)
            places, generation = addresses(cache), generation + 1
        reserving.given[-1].check()
        assert (cache.length, cache.capacity, cache.generation) == (whole.length, whole.capacity, generation)
        assert addresses(cache) == places and cache.nbytes == whole.nbytes and cache.length <= cache.held <= cache.capacity
        for mine, theirs in zip((*cache.keys, *cache.values), (*whole.keys, *whole.values), strict=True):
            assert mine.shape == theirs.shape and mine.is_contiguous() and torch.equal(mine, theirs)


def test_it_grows_by_steps_and_by_less_where_a_step_is_not_free() -> None:
    reserving = Reserving(8, limit_bytes=10 * POSITION)
    cache = GrowingKVCacheManager(reserving, capacity=40, **SIZES)
    assert cache.held == 4 and cache.held_bytes == 4 * POSITION and cache.nbytes == 40 * POSITION
    cache.hold(5)
    assert cache.held == 8
    cache.hold(9)
    assert cache.held == 9, "12 positions are more than what is free, and 9 were asked for"
    asked = len(reserving.given[0].asked)
    cache.hold(9)
    assert len(reserving.given[0].asked) == asked


def test_too_little_memory_is_one_sentence_and_changes_nothing() -> None:
    cache = GrowingKVCacheManager(Reserving(8, limit_bytes=10 * POSITION), capacity=40_000, **SIZES)
    cache.append(0, rows(4, 3, 1), rows(2, 3, 2))
    before, places = [t.clone() for t in (*cache.keys, *cache.values)], addresses(cache)
    wanted = (r"^40000 positions of the KV cache need 1\.8 MiB more than it holds, and 288 bytes are free; "
              r"use a shorter prompt and fewer new tokens, or free memory of cpu$")
    with pytest.raises(UsageError, match=wanted):
        cache.hold(40_000)
    assert cache.held == 4 and addresses(cache) == places and cache.held_bytes == 4 * POSITION
    assert all(torch.equal(a, b) for a, b in zip(before, (*cache.keys, *cache.values), strict=True))
    cache.hold(10)
    assert cache.held == 10


def test_not_even_the_beginning_fits() -> None:
    with pytest.raises(UsageError, match=r"^1 positions of the KV cache need 0\.0 MiB more"):
        GrowingKVCacheManager(Reserving(8, limit_bytes=POSITION - 8), capacity=40, **SIZES)


def test_what_cannot_be_reserved_is_allocated() -> None:
    cache = GrowingKVCacheManager(Reserving(refuses="no such thing here"), capacity=40, **SIZES)
    assert cache.held == cache.capacity == 40 and cache.held_bytes == cache.nbytes
    cache.hold(40)
    cache.give_back(0)
    assert cache.held == 40
    assert len({t.untyped_storage().data_ptr() for t in cache.keys}) == 1


def test_a_hugging_face_cache_is_imported_into_memory() -> None:
    from transformers import DynamicCache

    reserving, theirs = Reserving(8), DynamicCache()
    for layer in range(2):
        theirs.update(rows(4, 11, layer), rows(2, 11, layer + 5), layer)
    cache = GrowingKVCacheManager(reserving, capacity=40, **SIZES)
    assert cache.import_dynamic_cache(theirs) == 11 and cache.held == 12
    reserving.given[0].check()
    assert torch.equal(cache.keys[1][:, :11].transpose(1, 2), theirs.layers[1].keys)


def test_layers_with_heads_of_their_own_grow_alike() -> None:
    """Each range holds as many positions as the others, in rows of its own size."""
    reserving = Reserving(16)
    cache = GrowingKVCacheManager(reserving, capacity=20, layers=2, kv_heads=(2, 1), head_dim=(4, 24), value_dim=(2, 24),
                                  dtype=torch.float16, device="cpu")
    assert reserving.asked == [(20 * 16, 20 * 48, 20 * 8, 20 * 48)]
    assert [tuple(t.shape) for t in (*cache.keys, *cache.values)] == [(1, 20, 2, 4), (1, 20, 1, 24), (1, 20, 2, 2), (1, 20, 1, 24)]
    cache.hold(9)
    for tensor in (*cache.keys, *cache.values):
        tensor[:, :9] = 1.0
    reserving.given[0].check()
    assert 9 <= cache.held < 20


@pytest.mark.parametrize(("layers", "capacity", "grows"), [
    (28, 40_960, True), (28, 8192, True), (28, 2048, False), (64, 4096, False), (1, 40_960, False), (0, 40_960, False)])
def test_only_large_caches_are_reserved(layers: int, capacity: int, grows: bool) -> None:
    """Nothing is allocated here: the spec decides, and what is asked for is refused."""
    spec, asked = KVSpec(layers=layers, kv_heads=8, head_dim=128, capacity=capacity, dtype=DType.F16), []

    def reserve(nbytes: Sequence[int]) -> Reject:
        asked.append(tuple(nbytes))
        raise InterruptedError

    class Other(FlashKVRuntime):
        def allocate(self, kv: KVSpec, device: str) -> Any:
            return None

    if grows:
        with pytest.raises(InterruptedError):
            Other().allocate_growing(spec, "cpu", reserve)
        assert asked == [(capacity * 2048,) * 2 * layers]
    else:
        assert Other().allocate_growing(spec, "cpu", reserve) is None and not asked
