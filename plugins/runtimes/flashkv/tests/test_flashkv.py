"""FlashKVCacheManager against a model made of lists, and against HuggingFace's own cache."""

from types import SimpleNamespace

import pytest
import torch
from agentcompile_runtime_flashkv import FlashKVCacheManager, FlashKVRuntime, agentcompile_runtimes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentcompile_core.plugin_api import DType, KVSpec, LayerHeads, UsageError

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def manager(capacity: int = 8, layers: int = 3, device: str = "cpu", dtype: torch.dtype = torch.float32) -> FlashKVCacheManager:
    return FlashKVCacheManager(layers=layers, kv_heads=2, head_dim=4, capacity=capacity, dtype=dtype, device=device)


def rows(seed: int, count: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 2, count, 4, generator=generator).to(device, dtype)


class AgainstLists(RuleBasedStateMachine):
    """Every operation, in any order, on the cache and on lists of rows."""

    device = "cpu"

    @initialize(capacity=st.integers(1, 9), layers=st.integers(1, 3))
    def start(self, capacity: int, layers: int) -> None:
        self.cache = manager(capacity, layers, self.device)
        self.model: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in range(layers)]
        self.capacity, self.length, self.generation = capacity, 0, 0
        self.addresses = self._addresses()

    def _addresses(self) -> list[int]:
        return [t.data_ptr() for t in (*self.cache.keys, *self.cache.values, *self.cache.lengths, self.cache.cache_seqlens)]

    @rule(count=st.integers(0, 4), seed=st.integers(0, 10_000))
    def append_to_all_layers(self, count: int, seed: int) -> None:
        if count and self.length + count > self.capacity:
            with pytest.raises(UsageError, match="do not fit"):
                self.cache.append(0, rows(seed, count, self.device), rows(seed, count, self.device))
            with pytest.raises(UsageError, match=f"holds {self.capacity} positions, {self.length} are in use"):
                self.cache.advance(count)
            return
        for layer, (keys, values) in enumerate(self.model):
            key, value = rows(seed + layer, count, self.device), rows(seed + 7 * layer + 1, count, self.device)
            self.cache.append(layer, key, value)
            keys.extend(key[0].unbind(1))
            values.extend(value[0].unbind(1))
        self.cache.advance(count)
        self.length += count

    @rule(count=st.integers(1, 12), seed=st.integers(0, 10_000))
    def import_dynamic(self, count: int, seed: int) -> None:
        from transformers import DynamicCache

        cache, model = DynamicCache(), []
        for layer in range(len(self.model)):
            key, value = rows(seed + layer, count, self.device), rows(seed + 5 * layer + 2, count, self.device)
            cache.update(key, value, layer)
            model.append((list(key[0].unbind(1)), list(value[0].unbind(1))))
        if count > self.capacity:
            with pytest.raises(UsageError, match=f"of {count} positions; this KV cache holds {self.capacity}"):
                self.cache.import_dynamic_cache(cache)
            return
        assert self.cache.import_dynamic_cache(cache) == count
        self.model, self.length = model, count

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.length = 0
        for keys, values in self.model:
            keys.clear()
            values.clear()

    @precondition(lambda self: self.capacity < 20)
    @rule(capacity=st.integers(0, 14))
    def reallocate(self, capacity: int) -> None:
        if capacity < max(1, self.length):
            with pytest.raises(UsageError, match="it must be at least"):
                self.cache.reallocate(capacity)
            return
        self.cache.reallocate(capacity)
        self.capacity, self.generation = capacity, self.generation + 1
        self.addresses = self._addresses()

    @invariant()
    def same_as_the_lists(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert (self.cache.length, self.cache.capacity, self.cache.generation) == (self.length, self.capacity, self.generation)
        assert [int(length) for length in self.cache.lengths] == [self.length] * len(self.model)
        assert self.cache.cache_seqlens.tolist() == [self.length]
        assert self._addresses() == self.addresses, "addresses moved within a generation"
        for layer, (keys, values) in enumerate(self.model):
            for tensor, wanted in ((self.cache.keys[layer], keys), (self.cache.values[layer], values)):
                assert tensor.shape == (1, self.capacity, 2, 4) and tensor.is_contiguous()
                for position, row in enumerate(wanted):
                    assert torch.equal(tensor[0, position], row)


TestAgainstLists = AgainstLists.TestCase
TestAgainstLists.settings = settings(derandomize=True, database=None, deadline=None, max_examples=25, stateful_step_count=15)


class OnTheDevice(AgainstLists):
    device = "cuda"


@pytest.mark.device
class TestOnTheDevice(OnTheDevice.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(derandomize=True, database=None, deadline=None, max_examples=5, stateful_step_count=10)


@pytest.mark.parametrize("device", DEVICES)
def test_one_allocation_holds_all_layers_and_one_number_all_lengths(device: str) -> None:
    cache = manager(device=device, dtype=torch.float16)
    for tensors in (cache.keys, cache.values):
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
        assert len({t.data_ptr() for t in tensors}) == 3
    assert len({t.data_ptr() for t in cache.lengths}) == 1 and cache.lengths[0].dtype == torch.int64
    assert cache.cache_seqlens.dtype == torch.int32
    cache.lengths[2].fill_(5)
    assert cache.lengths[0].tolist() == [5]
    assert cache.nbytes == sum(t.nbytes for t in (*cache.keys, *cache.values))


def test_a_model_decodes_the_same_from_an_imported_cache() -> None:
    """Prefill with HuggingFace, import, and attend over our layout: the same attention output as over HuggingFace's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        filled = model(torch.arange(11)[None], use_cache=True).past_key_values
    cache = FlashKVCacheManager(layers=2, kv_heads=2, head_dim=8, capacity=16, dtype=torch.float32, device="cpu")
    assert cache.import_dynamic_cache(filled) == 11
    query = torch.randn(1, 4, 1, 8)
    for layer in range(2):
        theirs = torch.nn.functional.scaled_dot_product_attention(
            query, filled.layers[layer].keys, filled.layers[layer].values, enable_gqa=True)
        used = int(cache.lengths[layer])
        ours = torch.nn.functional.scaled_dot_product_attention(
            query, cache.keys[layer][:, :used].transpose(1, 2), cache.values[layer][:, :used].transpose(1, 2), enable_gqa=True)
        assert torch.equal(theirs, ours)


def test_a_cache_with_a_sliding_window_is_refused_and_nothing_changes() -> None:
    from transformers import DynamicCache

    cache, mixed = manager(layers=2), DynamicCache()
    mixed.update(rows(1, 6), rows(2, 6), 0)
    mixed.update(rows(1, 4), rows(2, 4), 1)
    with pytest.raises(UsageError, match=r"hold 4 and 6 positions; only caches without sliding windows"):
        cache.import_dynamic_cache(mixed)
    assert cache.length == 0 and torch.count_nonzero(cache.keys[0]) == 0


def test_an_empty_or_foreign_cache_is_refused() -> None:
    from transformers import DynamicCache

    cache = manager(layers=1)
    for foreign in (DynamicCache(), object(), [1, 2]):
        with pytest.raises(UsageError, match=r"of 0 layers; this KV cache has 1"):
            cache.import_dynamic_cache(foreign)


@pytest.mark.parametrize(("layer", "key", "value", "message"), [
    (3, rows(0, 1), rows(0, 1), "layers are 0 to 2"),
    (-1, rows(0, 1), rows(0, 1), "layers are 0 to 2"),
    (0, rows(0, 1)[0], rows(0, 1), r"keys of layer 0 have shape \(2, 1, 4\)"),
    (0, rows(0, 1), rows(0, 2), r"values of layer 0 have shape \(1, 2, 2, 4\)"),
    (0, rows(0, 1).expand(2, 2, 1, 4), rows(0, 1), r"keys of layer 0 have shape \(2, 2, 1, 4\)"),
    (0, rows(0, 1).half(), rows(0, 1), r"torch.float16; this KV cache takes \[1, 2, T, 4\] of torch.float32"),
])
def test_wrong_rows_are_refused(layer: int, key: torch.Tensor, value: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        manager().append(layer, key, value)


def test_a_model_without_attention_has_a_cache_of_no_layers() -> None:
    spec = KVSpec(layers=0, kv_heads=1, head_dim=1, capacity=5, dtype=DType.F32)
    cache = FlashKVRuntime().allocate(spec, "cpu")
    assert (cache.keys, cache.values, cache.capacity) == ((), (), 5)
    cache.reset()
    with pytest.raises(UsageError, match="of 0 layers"):
        cache.import_dynamic_cache(SimpleNamespace(layers=()))
    with pytest.raises(UsageError, match="layers=-1; it must be at least 0"):
        FlashKVCacheManager(layers=-1, kv_heads=1, head_dim=1, capacity=5, dtype=torch.float32, device="cpu")


def test_a_negative_count_and_an_empty_cache_are_refused() -> None:
    with pytest.raises(UsageError, match="must not be negative"):
        manager().advance(-1)
    with pytest.raises(UsageError, match="capacity=0; it must be at least 1"):
        manager(capacity=0)


def test_the_runtime_allocates_what_the_spec_says() -> None:
    (runtime,) = agentcompile_runtimes()
    assert isinstance(runtime, FlashKVRuntime) and (runtime.name, runtime.role) == ("flashkv", "kv_cache")
    spec = KVSpec(layers=2, kv_heads=3, head_dim=8, capacity=5, dtype=DType.BF16)
    state = runtime.allocate(spec, "cpu")
    assert state.capacity == 5 and len(state.keys) == len(state.values) == 2
    assert all(t.shape == (1, 5, 3, 8) and t.dtype == torch.bfloat16 for t in (*state.keys, *state.values))
    assert isinstance(state, FlashKVCacheManager) and state.nbytes == spec.nbytes


HEADS = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(heads=st.lists(HEADS, min_size=1, max_size=5), usual=HEADS, capacity=st.integers(1, 7))
def test_layers_may_have_heads_of_their_own(heads: list[tuple[int, int, int]], usual: tuple[int, int, int], capacity: int) -> None:
    """Each tensor has the shape that is said, memory of its own, and takes rows of that shape alone."""
    others = tuple(LayerHeads(layer, *one) for layer, one in enumerate(heads) if one != usual)
    spec = KVSpec(layers=len(heads), kv_heads=usual[0], head_dim=usual[1], value_dim=usual[2], capacity=capacity, dtype=DType.F32,
                  others=others)
    state = FlashKVRuntime().allocate(spec, "cpu")
    assert isinstance(state, FlashKVCacheManager) and state.nbytes == spec.nbytes == sum(t.nbytes for t in (*state.keys, *state.values))
    for number, (layer, (count, wide, value_wide)) in enumerate(enumerate(heads)):
        key, value = torch.full((1, count, 1, wide), 1.0 + number), torch.full((1, count, 1, value_wide), -1.0 - number)
        state.append(layer, key, value)
        with pytest.raises(UsageError, match=rf"takes \[1, {count}, T, {wide}\]"):
            state.append(layer, torch.zeros(1, count, 1, wide + 1), value)
    for number, (count, wide, value_wide) in enumerate(heads):
        for tensor, width, sign in ((state.keys[number], wide, 1.0), (state.values[number], value_wide, -1.0)):
            assert tensor.shape == (1, capacity, count, width) and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
            assert bool((tensor[:, 0] == sign * (1 + number)).all()) and not bool(tensor[:, 1:].any())
    with pytest.raises(UsageError, match="one number, or one for every layer"):
        FlashKVCacheManager(layers=2, kv_heads=1, head_dim=(8, 8, 8), capacity=5, dtype=torch.float32, device="cpu")
    with pytest.raises(UsageError, match=r"head_dim=\(8, 0\); it must be at least 1"):
        FlashKVCacheManager(layers=2, kv_heads=1, head_dim=(8, 0), capacity=5, dtype=torch.float32, device="cpu")


@pytest.mark.device
def test_a_cache_that_does_not_fit_says_how_much_it_needs() -> None:
    with pytest.raises(UsageError, match=r"needs \d+\.\d GiB, more than cuda has free; use a shorter context"):
        FlashKVCacheManager(layers=100, kv_heads=8, head_dim=128, capacity=10_000_000, dtype=torch.float16, device="cuda")
