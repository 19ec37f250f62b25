"""Whether a KV cache that a runtime allocated is the one that was asked for: kernels write where it should lie, and do not look."""

import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..ir.graph import KVSpec
from ..ops.dtypes import torch_dtype
from ..runtime.moving import ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch

Named = tuple[str, "torch.Tensor"]
# K and V of the caches that were taken and still live: a runtime may hand out the memory of another session, or of another row, again.
_taken: "list[tuple[str, weakref.ref[torch.Tensor]]]" = []


def take(state: Any, runtime: str) -> None:
    """Remember the tensors of a cache that ``wrong_with`` found right, as long as they live: no other cache may lie there."""
    _taken[:] = [one for one in _taken if one[1]() is not None]
    _taken.extend((f"{name} of another cache of {runtime}", weakref.ref(tensor)) for name, tensor in _named(state))


def wrong_with(state: Any, kv: KVSpec, device: str) -> str:
    """One clause on what is wrong with ``state`` as the cache of ``kv`` on ``device``; empty: nothing is."""
    import torch

    absent = [name for name in ("keys", "values") if not isinstance(getattr(state, name, None), tuple | list)]
    if absent:
        return f"allocates a {type(state).__name__} without {' and '.join(absent)}, where a KVState has tuples of tensors"
    kept, shapes, dtype = _named(state), (*kv.key_shapes, *kv.value_shapes), torch_dtype(kv.dtype)
    fits = [isinstance(t, torch.Tensor) and tuple(t.shape) == shape and t.dtype is dtype and t.is_contiguous()
            and t.data_ptr() % ALIGNMENT_BYTES == 0 for (_, t), shape in zip(kept, shapes, strict=False)]
    if not (len(state.keys) == len(kv.key_shapes) and len(kept) == len(shapes) and all(fits)):
        wrong = f"{fits.count(False)} tensors" if len(kept) == len(shapes) else f"{len(kept)} tensors instead of {len(shapes)}"
        return f"allocates other K and V than the model caches, or elsewhere than at multiples of {ALIGNMENT_BYTES} bytes, in {wrong}"
    wanted = torch.empty(0, device=device).device
    elsewhere = [(name, t.device) for name, t in kept if t.device != wanted]
    if elsewhere:
        name, found = elsewhere[0]
        return f"allocates {name} on the device {found} instead of {wanted}, as {len(elsewhere)} of {len(kept)} tensors"
    if getattr(state, "capacity", None) != kv.capacity:
        return f"allocates a cache whose capacity is {getattr(state, 'capacity', None)!r} instead of {kv.capacity} positions"
    if not callable(getattr(state, "reset", None)):
        return f"allocates a {type(state).__name__} without reset(), which begins every request"
    return _shared(kept)


def _named(state: Any) -> "list[Named]":
    return [(f"{part}[{i}]", one) for part in ("keys", "values") for i, one in enumerate(getattr(state, part))]


def _shared(kept: "list[Named]") -> str:
    """Which two tensors have memory in common: of the cache itself, or with one that was taken before and is still in use."""
    device = kept[0][1].device if kept else None
    others = [(name, tensor) for name, one in _taken if (tensor := one()) is not None and tensor.device == device]
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in (*kept, *others) if t.nbytes)
    for (_, end, first), (begin, _, second) in pairwise(ranges):
        if begin < end:
            return f"allocates tensors that share memory, {first} and {second}: what one layer or request writes, another would read"
    return ""
