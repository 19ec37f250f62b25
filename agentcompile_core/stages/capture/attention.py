"""HuggingFace's attention and cache, seen during capture: one opaque ``agentcompile.attention`` call per layer.

The cache hands new K and V through, since the operator owns the append. Everything a model says about its attention
(mask, window, soft cap, sinks) either becomes an argument of the operator or raises ``Unsupported``.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from attrs import define, field, frozen
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from ...ir.graph import LayerHeads
from ...ops import operators as operators
from .known import known
from .mask_pattern import Pattern, pattern_of
from .states import Held, Window, cache_layers
from .unsupported import Unasked
from .unsupported import Unsupported as Unsupported

IMPLEMENTATION = "agentcompile"
# Keywords that models hand through to attention functions and that say nothing about what is computed.
_SILENT = {"position_ids", "use_cache", "cache_position", "logits_to_keep", "return_dict", "num_items_in_batch", "layer_idx"}
_ADDITIONS = ("add", "__add__", "__radd__")
# Keywords that become arguments of the operator, or refuse it.
_UNDERSTOOD = {"dropout", "sliding_window", "softcap", "s_aux", "sinks", "is_causal"}


LOWEST = -65504.0  # what a model writes for a hidden score is this or below: float16's lowest finite number


class DifferentHeads(Unsupported):
    """The heads that some layers cache, ``found``, are not those that were assumed."""

    def __init__(self, found: Iterable[LayerHeads]) -> None:
        self.found = tuple(found)
        one = self.found[0]
        super().__init__(f"layer {one.layer} caches {one.kv_heads} heads of {one.head_dim} channels, and other ones in another step")


class DifferentCalls(Unsupported):
    """Attention is called another number of times than there are layers."""

    def __init__(self, calls: int) -> None:
        super().__init__(f"it attends {calls} times, which is not once per layer")
        self.calls = calls


class DerivedStates(Unsupported):
    """The model attends to K and V that it computes from what it caches: the trace that marks what is cached may understand it."""

    def __init__(self) -> None:
        super().__init__("its attention reads other K and V than it caches")


class OwnAttention(Unsupported):
    """The model adds its mask to scores of its own: the trace that marks what it does may understand it."""

    def __init__(self) -> None:
        super().__init__("it computes attention itself, outside transformers' attention interface")


@frozen
class CausalMask:
    """Stands for the mask tensor of a model: causal, and at most ``window`` positions back (0: all), of ``length`` keys.

    ``chunk``: positions are cut into chunks of so many, and a query sees those of its own alone (0: no chunks).
    """

    window: int = 0
    tokens: int = 1
    length: int = field(default=0, eq=False)
    chunk: int = 0

    ndim: ClassVar[int] = 4  # as of a mask that is drawn already

    def size(self) -> tuple[int, int, int, int]:
        """What a model that checks its mask expects: as many keys as the cache hands on."""
        return (1, 1, self.tokens, self.length or self.tokens)

    def to(self, *_: Any, **__: Any) -> "CausalMask":
        """The same mask in whatever type: lowest numbers and zeros, or whether a score is hidden."""
        return self

    def _added(self, scores: Any) -> Any:
        if not _active or _active[-1].tracing is not Tracing.OWN:
            raise OwnAttention
        if self.chunk:
            raise Unsupported("it computes attention itself, in chunks")
        return torch.ops.agentcompile.masked.default(scores, self.window)

    def __getattr__(self, name: str) -> NoReturn:
        raise Unasked(f"it makes an attention mask of its own from a causal one ({name!r})")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """What is called with the mask: it may be added to scores, or hide them."""
        name, (scores, mask, *rest) = getattr(func, "__name__", ""), (*args, None)
        if isinstance(scores, cls):
            scores, mask = mask, scores
        fills = name == "masked_fill" and isinstance(rest[0], int | float) and rest[0] <= LOWEST
        if isinstance(mask, cls) and isinstance(scores, Tensor) and (fills or name in _ADDITIONS) and not kwargs:
            return mask._added(scores)
        return mask._computed_with() if isinstance(mask, cls) else NotImplemented

    def _computed_with(self, *_: Any) -> Any:
        raise Unsupported("it computes attention itself, outside transformers' attention interface")

    __add__ = __radd__ = _added
    __mul__ = __rmul__ = __getitem__ = __invert__ = __and__ = __rand__ = _computed_with


@frozen
class OtherMask:
    """Stands for a mask that is not understood, which matters only where it is used."""

    reason: str

    ndim: ClassVar[int] = 4

    def _computed_with(self, *_: Any) -> Any:
        raise Unsupported(self.reason)

    __add__ = __radd__ = __mul__ = __rmul__ = __getitem__ = __invert__ = __and__ = __rand__ = _computed_with


class Tracing(enum.Enum):
    """What is marked in a trace: nothing; what a model that computes attention itself adds up; what it computes K and V from."""

    PLAIN = "plain"
    OWN = "own"  # own_attention.py
    DERIVED = "derived"  # derived.py; then every call of attention has its own cache


@define
class Recorder:
    """What one capture has seen so far: the session's state, and how attention calls pair up with cache updates."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    position: Tensor
    capacity: int
    tokens: int = 1
    held: Held = field(factory=Held)
    states: tuple[Tensor, ...] = ()  # in the order of ``held``
    valid: Tensor | None = None  # i64 [1]: tokens of the chunk that are no padding; None: all
    fresh: bool = False
    tracing: Tracing = Tracing.PLAIN
    pending: dict[int, tuple[Tensor, Tensor]] = field(factory=dict)
    attended: list[int] = field(factory=list)
    windows: list[Window] = field(factory=list)  # of convolutions whose state is not written yet
    different: dict[int, LayerHeads] = field(factory=dict)

    def cached(self, layer: int, key: Tensor, value: Tensor) -> None:
        """A layer caches such K and V [1, KV, T, D]: whether its caches have room for them is said at the end, of all layers at once."""
        if layer >= len(self.keys):
            return
        kept = (self.keys[layer], self.values[layer])
        if any((new.shape[1], new.shape[3]) != tuple(cache.shape[2:]) for new, cache in zip((key, value), kept, strict=True)):
            self.different[layer] = LayerHeads(layer=layer, kv_heads=key.shape[1], head_dim=key.shape[3], value_dim=value.shape[3])

    def finish(self) -> None:
        """Check that every layer's cached K and V were attended to once; of what is marked the graph shows it.

        Raises:
            Unsupported: a layer keeps attention to itself, so the cache would never be read; or caches other heads than were assumed.
        """
        for window in self.windows:
            window.write()
        calls = len(self.attended)
        if calls != len(self.keys) and (self.tracing is Tracing.DERIVED or max(self.attended, default=0) >= len(self.keys)):
            raise DifferentCalls(calls)
        if self.different:
            raise DifferentHeads(self.different.values())
        if self.tracing is not Tracing.PLAIN:
            return
        if self.pending or sorted(self.attended) != list(range(len(self.keys))):
            raise Unsupported(f"only {len(set(self.attended))} of {len(self.keys)} layers attend through transformers' interface")


_active: list[Recorder] = []


def active_recorder() -> Recorder | None:
    """The one that calls report to now; None: nothing is traced."""
    return _active[-1] if _active else None


class recording:
    """Make ``recorder`` the one that attention calls and cache updates report to."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __enter__(self) -> Recorder:
        _active.append(self.recorder)
        return self.recorder

    def __exit__(self, *_: object) -> None:
        _active.pop()


class PassThroughCache(Cache):
    """A cache whose ``update`` returns the new K and V unchanged; the attention operator appends them."""

    is_compileable = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(layers=cache_layers(self, recorder.held, recorder.states, recorder.valid, recorder.windows))
        self.recorder = recorder

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.recorder.tracing is Tracing.DERIVED:  # every call of attention has a cache of its own; layers are only names here
            mark, tokens = torch.ops.agentcompile.cached.default, key_states.shape[2]
            return mark(key_states, layer_idx, False, tokens), mark(value_states, layer_idx, True, tokens)
        layer_idx = self.recorder.held.slot(layer_idx, len(self.recorder.keys))
        if self.recorder.tracing is Tracing.OWN:
            if layer_idx >= len(self.recorder.keys):
                raise Unsupported(f"layer {layer_idx} caches K and V, but its configuration says {len(self.recorder.keys)} layers")
            self.recorder.cached(layer_idx, key_states, value_states)
            mark, length = torch.ops.agentcompile.cached.default, self.recorder.capacity
            return mark(key_states, layer_idx, False, length), mark(value_states, layer_idx, True, length)
        self.recorder.pending[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:  # type: ignore[override]
        position = self.recorder.position[0]
        about = known()
        return position if about is None else about.lies_in(position, 0, self.recorder.capacity - self.recorder.tokens)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.recorder.capacity, 0

    def get_max_length(self, layer_idx: int = 0) -> int:  # type: ignore[override]
        return self.recorder.capacity


def mask_interface(
    *, kv_length: int, q_length: int = 1, mask_function: Callable[..., Any], attention_mask: Any = None, **_: Any
) -> CausalMask | OtherMask:
    """What ``create_*_mask`` calls instead of building a tensor: find out what the mask means by asking it.

    A mask that is neither causal nor causal in a sliding window or in chunks is refused where it is used: some models make one for
    nothing. One that a model made already, and hands to a part of it that makes masks too, stays what it is, as transformers' own does.
    """
    if isinstance(attention_mask, CausalMask | OtherMask):
        return attention_mask
    about = known()
    if attention_mask is not None and not (about is not None and about.is_ones(attention_mask)):
        return OtherMask("a padding mask reaches its attention")
    try:
        found = pattern_of(mask_function, kv_length, about)
    except Unsupported as exc:
        return OtherMask(str(exc))
    all_keys = _active and _active[-1].tracing is Tracing.OWN
    return CausalMask(found.window, q_length, kv_length if all_keys else q_length, found.chunk)


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention function called ``agentcompile``: one operator that appends and attends.

    ``keywords`` are transformers': ``dropout``, ``sliding_window``, ``softcap``, ``s_aux`` or ``sinks``, ``is_causal``.

    Raises:
        Unsupported: a keyword, mask or shape that the operator does not express.
    """
    recorder = _active[-1]
    for name, given in keywords.items():
        if name not in _SILENT | _UNDERSTOOD and given is not None and given is not False:
            raise Unsupported(f"its attention takes {name!r}, which is not understood")
    # Where there is a mask, the mask says what is seen.
    sees_all = attention_mask is None and (keywords.get("is_causal") is False or getattr(module, "is_causal", True) is False)
    if keywords.get("dropout") or sees_all:
        raise Unsupported("its attention is not causal or drops out")
    layer = _layer_of(recorder, key, value)
    own = min(layer, len(recorder.keys) - 1)  # of too many layers the count is told at the end
    keys, values = recorder.keys[own], recorder.values[own]
    if key.shape[:3] != value.shape[:3] or query.shape[3] != key.shape[3] or query.shape[1] % key.shape[1]:
        raise Unsupported(f"its attention has Q {tuple(query.shape)}, K {tuple(key.shape)} and V {tuple(value.shape)}")
    recorder.cached(layer, key, value)
    pattern = _pattern(attention_mask, keywords.get("sliding_window"), keys.shape[1])
    out = torch.ops.agentcompile.attention.default(
        query, key, value, keys, values, recorder.position,
        float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        pattern.window,
        float(keywords.get("softcap") or 0.0),
        keywords["s_aux"] if keywords.get("s_aux") is not None else keywords.get("sinks"),
        recorder.fresh,
        **({"chunk": pattern.chunk} if pattern.chunk else {}),  # what stays at its default is not recorded
    )
    return out, None


def _layer_of(recorder: Recorder, key: Tensor, value: Tensor) -> int:
    if recorder.tracing is Tracing.DERIVED:
        recorder.attended.append(len(recorder.attended))
        return recorder.attended[-1]
    for layer, (cached_key, cached_value) in recorder.pending.items():
        if cached_key is key and cached_value is value:
            del recorder.pending[layer]
            recorder.attended.append(layer)
            return layer
    raise DerivedStates


def _pattern(mask: Any, sliding_window: int | None, capacity: int) -> Pattern:
    said = int(sliding_window or 0)
    said = 0 if said >= capacity else said
    if mask is None:
        return Pattern(window=said)
    if isinstance(mask, OtherMask):
        raise Unsupported(mask.reason)
    if not isinstance(mask, CausalMask):
        raise Unsupported("its attention takes a mask of its own")
    if said not in (0, mask.window):
        raise Unsupported(f"its attention window is {said} by keyword and {mask.window} by mask")
    return Pattern(window=mask.window, chunk=mask.chunk)


AttentionInterface.register(IMPLEMENTATION, attention_function)
AttentionMaskInterface.register(IMPLEMENTATION, mask_interface)
