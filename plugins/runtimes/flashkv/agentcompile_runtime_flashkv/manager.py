"""The KV cache itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentcompile_core.plugin_api import UsageError

Numbers = int | Sequence[int]
ALIGNMENT_BYTES = 256  # of each layer's K and V: kernels read 16 bytes at a time, whatever the layers in front of it hold


class FlashKVCacheManager:
    """K and V of every layer, allocated once; a KVState. One request at a time.

    ``keys[i]``: [1, capacity, kv_heads, head_dim], ``values[i]`` the same with value_dim (by default head_dim), contiguous
    views of one allocation for all keys and one for all values. Each of the three is a number, or one for every layer.
    ``lengths[i]``: int64 [1] on the device, all views of one number, as a kernel reads it; ``cache_seqlens``: the same as
    int32 [1], as flash-attn wants it. Addresses stay while ``generation`` does.

    ``length`` is what was imported, or advanced over, through this object. A Session that keeps its own position only
    uses ``reset``.
    """

    def __init__(self, *, layers: int, kv_heads: Numbers, head_dim: Numbers, capacity: int, dtype: torch.dtype,
                 device: str | torch.device, value_dim: Numbers | None = None) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        if layers < 0:
            raise UsageError(f"a KV cache with layers={layers}; it must be at least 0: none where no layer attends")
        given = (("kv_heads", kv_heads), ("head_dim", head_dim), ("value_dim", value_dim))
        for name, number in (*given, ("capacity", capacity)):
            numbers = [number] if isinstance(number, int) else number
            if min(numbers, default=1) < 1:
                raise UsageError(f"a KV cache with {name}={number}; it must be at least 1")
            if not isinstance(number, int) and len(numbers) != layers:
                raise UsageError(f"a KV cache of {layers} layers with {name}={number}; it must be one number, or one for every layer")
        self.layers, self.kv_heads, self.head_dim, self.value_dim = layers, kv_heads, head_dim, value_dim
        heads, *widths = ([number] * layers if isinstance(number, int) else list(number) for _, number in given)
        self._heads = tuple((count, dim) for dims in widths for count, dim in zip(heads, dims, strict=True))  # K of all layers, then V
        self.dtype, self.device = dtype, torch.device(device)
        self.generation = 0
        self._length = 0
        self._device_length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.cache_seqlens = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.lengths: tuple[Tensor, ...] = tuple(self._device_length.view(1) for _ in range(layers))
        self.capacity = 0
        self.keys: tuple[Tensor, ...] = ()
        self.values: tuple[Tensor, ...] = ()
        self._allocate(capacity)

    @property
    def length(self) -> int:
        """Positions in use."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all layers, all positions."""
        return self.capacity * sum(heads * dim for heads, dim in self._heads) * self.dtype.itemsize

    def hold(self, positions: int) -> None:
        """Nothing to do: all positions are memory."""

    def reset(self) -> None:
        """Forget everything: the length becomes 0. Contents and addresses stay."""
        self._set_length(0)

    def advance(self, count: int) -> None:
        """Add ``count`` positions to the length, after every layer has written them.

        Raises:
            UsageError: ``count`` is negative, or more than the free positions; nothing has changed then.
        """
        self.require(count)
        self._set_length(self._length + count)

    def require(self, count: int) -> None:
        """Check that ``count`` more positions fit.

        Raises:
            UsageError: they do not.
        """
        if count < 0:
            raise UsageError(f"{count} positions for the KV cache; the number must not be negative")
        if self._length + count > self.capacity:
            raise UsageError(f"the KV cache holds {self.capacity} positions, {self._length} are in use and {count} more do "
                             f"not fit; shorten the prompt or use a context of at least {self._length + count}")

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write K and V of the next T positions of one layer, [1, kv_heads, T, head_dim] and [.., value_dim]. The length stays.

        Raises:
            UsageError: a shape or type is wrong, or T positions do not fit, the memory of a cache that grows among it.
        """
        self._check(layer, key, value)
        self.require(key.shape[2])
        self.hold(self._length + key.shape[2])
        self._write(layer, self._length, key, value)

    def import_dynamic_cache(self, cache: Any) -> int:
        """Replace the contents by those of a HuggingFace cache after a prefill, and return the new length.

        ``cache.layers[i].keys`` and ``.values``: [1, kv_heads, T, head_dim] and [.., value_dim], the same T everywhere.

        Raises:
            UsageError: the cache is of another shape, type or number of layers, longer than the capacity, or its layers
                differ in length (sliding windows); nothing has changed then.
        """
        pairs = [(layer.keys, layer.values) for layer in getattr(cache, "layers", ())]
        if len(pairs) != self.layers or not pairs:
            raise UsageError(f"a {type(cache).__name__} of {len(pairs)} layers; this KV cache has {self.layers}")
        for index, (key, value) in enumerate(pairs):
            if key is None or value is None:
                raise UsageError(f"layer {index} of the {type(cache).__name__} is empty; run the prefill first")
            self._check(index, key, value)
        found = sorted({int(key.shape[2]) for key, _ in pairs})
        if len(found) > 1:
            raise UsageError(f"layers of the {type(cache).__name__} hold {found[0]} and {found[-1]} positions; only caches "
                             f"without sliding windows can be imported")
        count = found[0]
        if count > self.capacity:
            raise UsageError(f"a {type(cache).__name__} of {count} positions; this KV cache holds {self.capacity}; use a "
                             f"context of at least {count}")
        self.hold(count)
        for index, (key, value) in enumerate(pairs):
            self._write(index, 0, key, value)
        self._set_length(count)
        return count

    def reallocate(self, capacity: int) -> None:
        """Change the capacity, keeping the contents. Addresses change: ``generation`` grows, captured graphs are void.

        Raises:
            UsageError: the positions in use do not fit.
        """
        if capacity < max(1, self._length):
            raise UsageError(f"a capacity of {capacity} for a KV cache with {self._length} positions in use; "
                             f"it must be at least {max(1, self._length)}")
        keys, values, used = self.keys, self.values, self._length
        self._allocate(capacity)  # with memory for what is in use
        for old, new in zip((*keys, *values), (*self.keys, *self.values), strict=True):
            new[:, :used].copy_(old[:, :used])
        self.generation += 1

    def _allocate(self, capacity: int) -> None:
        step = ALIGNMENT_BYTES // self.dtype.itemsize
        sizes = [-(-capacity * heads * dim // step) * step for heads, dim in self._heads]
        parts, needed = (sizes[: self.layers], sizes[self.layers :]), sum(sizes) * self.dtype.itemsize
        try:
            whole = [torch.zeros(sum(part), dtype=self.dtype, device=self.device).split(part) for part in parts]
        except torch.OutOfMemoryError:
            raise UsageError(f"a KV cache of {capacity} positions needs {needed / 2**30:.1f} GiB, more than {self.device} "
                             f"has free; use a shorter context") from None
        self._take((*whole[0], *whole[1]), capacity)

    def _take(self, ranges: Sequence[Tensor], capacity: int) -> None:
        """Elements of K of all layers, then of V, become the tensors; what a range holds beyond them is padding."""
        tensors = tuple(flat[: capacity * heads * dim].view(1, capacity, heads, dim)
                        for flat, (heads, dim) in zip(ranges, self._heads, strict=True))
        self.capacity, self.keys, self.values = capacity, tensors[: self.layers], tensors[self.layers :]

    def _set_length(self, length: int) -> None:
        self._length = length
        self._device_length.fill_(length)
        self.cache_seqlens.fill_(length)

    def _write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        rows = slice(start, start + key.shape[2])
        self.keys[layer][:, rows].copy_(key.transpose(1, 2))
        self.values[layer][:, rows].copy_(value.transpose(1, 2))

    def _check(self, layer: int, key: Tensor, value: Tensor) -> None:
        if not 0 <= layer < self.layers:
            raise UsageError(f"layer {layer} of a KV cache with {self.layers} layers; layers are 0 to {self.layers - 1}")
        for name, tensor, (heads, dim) in (("keys", key, self._heads[layer]), ("values", value, self._heads[self.layers + layer])):
            wanted = (1, heads, key.shape[2] if key.dim() == 4 else -1, dim)
            if tensor.dim() != 4 or tuple(tensor.shape) != wanted or tensor.dtype != self.dtype:
                raise UsageError(f"{name} of layer {layer} have shape {tuple(tensor.shape)} and type {tensor.dtype}; this KV "
                                 f"cache takes [1, {heads}, T, {dim}] of {self.dtype}")
