"""A cache that grows in reserved addresses of a GPU against one that is all there."""

import gc
from typing import Any

import pytest
import torch
from agentcompile_runtime_flashkv import FlashKVCacheManager
from agentcompile_runtime_flashkv.growing import STEP, GrowingKVCacheManager

from agentcompile_core.plugin.discovery import load_catalog
from agentcompile_core.plugin_api import Reject, UsageError

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES: dict[str, Any] = {"layers": 3, "kv_heads": 8, "head_dim": 128, "value_dim": 64, "dtype": torch.float16, "device": "cuda"}
POSITION = 3 * 8 * (128 + 64) * 2  # bytes


@pytest.fixture
def reserve() -> Any:
    torch.cuda.init()
    found = load_catalog(only=("cuda",)).find("agentcompile_backends", "cuda").reserve
    assert not isinstance(found((1 << 20,)), Reject)
    return found


def rows(dim: int, count: int, seed: int) -> torch.Tensor:
    return torch.randn(1, 8, count, dim, generator=torch.Generator(device="cuda").manual_seed(seed), device="cuda").half()


def test_it_holds_what_a_whole_cache_holds(reserve: Any) -> None:
    grown, whole = GrowingKVCacheManager(reserve, capacity=20_000, **SIZES), FlashKVCacheManager(capacity=20_000, **SIZES)
    places = [t.data_ptr() for t in (*grown.keys, *grown.values)]
    assert STEP <= grown.held < 20_000 and grown.held_bytes < whole.nbytes / 4
    for turn, count in enumerate((1, 700, 1500, 3, 9000)):
        for layer in range(3):
            key, value = rows(128, count, turn * 10 + layer), rows(64, count, turn * 10 + layer + 5)
            grown.append(layer, key, value)
            whole.append(layer, key, value)
        grown.advance(count)
        whole.advance(count)
        for mine, theirs in zip((*grown.keys, *grown.values), (*whole.keys, *whole.values), strict=True):
            assert mine.is_contiguous() and torch.equal(mine, theirs)
        assert [t.data_ptr() for t in (*grown.keys, *grown.values)] == places and grown.held >= grown.length
    query = rows(128, 1, 99).expand(1, 8, 1, 128)
    mask = torch.arange(20_000, device="cuda").view(1, 1, 1, -1) < grown.length
    wanted, found = (torch.nn.functional.scaled_dot_product_attention(query, cache.keys[1].transpose(1, 2), cache.values[1].transpose(1, 2),
                                                                      attn_mask=mask) for cache in (whole, grown))
    assert torch.equal(found, wanted), "the framework reads all of it under a mask"
    grown.reallocate(40_000)
    whole.reallocate(40_000)
    assert grown.generation == 1 and all(torch.equal(a, b) for a, b in zip(grown.keys, whole.keys, strict=True))


def test_a_cache_larger_than_the_device_serves_as_much_as_there_is(reserve: Any) -> None:
    cache = GrowingKVCacheManager(reserve, capacity=(2 << 30) // POSITION, **SIZES)
    torch.cuda.empty_cache()
    rest = torch.empty(torch.cuda.mem_get_info()[0] - (1 << 30), dtype=torch.uint8, device="cuda")  # a device of which 1 GiB is free
    cache.hold(3000)
    before, bytes_before = cache.held, cache.held_bytes
    with pytest.raises(UsageError, match=r"^\d+ positions of the KV cache need \S+ MiB more than it holds, and \S+ MiB of the device are "):
        cache.hold(cache.capacity)
    assert (cache.held, cache.held_bytes) == (before, bytes_before)
    cache.hold(5000)
    assert cache.held >= 5000
    cache.give_back(1000)
    assert 1000 <= cache.held <= before
    del cache, rest
    gc.collect()
    torch.cuda.empty_cache()
