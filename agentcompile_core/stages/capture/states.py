"""What a model hands from step to step besides K and V: the states of short convolutions and recurrences, of one size for any position.

They are tensors of the session that every step reads and writes in place, zero before a prompt: declared as values called
``state.<part>.<layer>.<index>``. transformers keeps them in the layers of its cache; in a trace these layers hold the declared tensors.
"""

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from attrs import field, frozen
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ...ir.graph import STATE_PREFIX, DType, Graph, KVSpec, TensorSpec
from ...ops.aliasing import memory_roots
from ...ops.operator_names import ATTENTION
from ...ops.schema import named
from .describe import text_config
from .unsupported import Unasked, Unsupported

PARTS = ("conv", "recurrent")
OWN = "own"  # the part of states that no cache of transformers holds: own_states.py
CACHE_KEYWORDS = ("past_key_values", "cache_params", "cache")  # the last one from transformers 5.24 on, for both


@frozen(kw_only=True)
class StateSpec:
    """One state of one layer. ``part``: conv (the last columns of what a convolution reads [1, C, K]), recurrent or own (any shape).

    ``place``: where the model itself keeps it, of part own.
    """

    layer: int
    part: str
    index: int  # of several of the same part in one layer
    spec: TensorSpec
    place: Any = None

    @property
    def source(self) -> str:
        """Its name in every graph."""
        return f"{STATE_PREFIX}{self.part}.{self.layer}.{self.index}"


@frozen(kw_only=True)
class Held:
    """What the cache of a model holds. ``attending``: the layers with K and V, in order; None: all. ``states``: of the others.

    ``own_cache``: one of a class of the model's own. ``kept``: how many of the last positions each layer keeps, 0: all. ``padded``: a
    chunk's recurrences are told how many of its rows are tokens. ``offset``: positions need not be those of the cache, since the tokens of
    an image share some.
    """

    attending: tuple[int, ...] | None = None
    states: tuple[StateSpec, ...] = ()
    own_cache: Any = field(default=None, eq=False)
    kept: tuple[int, ...] = ()
    padded: bool = False
    offset: bool = False

    @property
    def whole_chunks(self) -> bool:
        """Whether every row of a prompt chunk must be a token: a recurrence would take padding for more of the prompt."""
        return not self.padded and self.is_recurrent

    @property
    def is_recurrent(self) -> bool:
        """Whether one of the states is a recurrence's, or may be."""
        return any(state.part != "conv" for state in self.states)

    def slot(self, layer: int, caches: int) -> int:
        """Which of ``caches`` pairs of K and V a layer has; one behind them where a configuration does not say how many there are.

        Raises:
            Unsupported: none.
        """
        if self.attending is None:
            return layer
        if layer not in self.attending[:caches]:
            raise Unsupported(f"layer {layer} caches K and V, but its configuration says {caches} layers with attention")
        return self.attending.index(layer)


def cache_keyword(model: nn.Module) -> str:
    """The argument by which the forward of ``model`` takes its cache.

    Raises:
        Unsupported: none.
    """
    parameters = inspect.signature(model.forward).parameters
    found = next((name for name in CACHE_KEYWORDS if name in parameters), "")
    if not found:
        raise Unsupported(f"its forward takes no {CACHE_KEYWORDS[0]}")
    return found


def held_by(model: nn.Module) -> Held:
    """What the model's own cache holds after two tokens; they are run only where its configuration says that there are states.

    Raises:
        Unsupported: its forward takes no cache, or a state is of an element type that is not one of ours.
    """
    keyword, offset = cache_keyword(model), any(hasattr(part, "rope_deltas") for part in model.modules())
    try:
        cache: Any = DynamicCache(config=text_config(model))
    except Exception:  # a configuration that transformers' own cache cannot read; whether the model runs is seen where it is traced
        return Held(offset=offset)
    kept = kept_by(cache.layers)
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        return Held(kept=kept, offset=offset)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{keyword: cache})
    attending = tuple(i for i, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None)
    states = tuple(one for i, layer in enumerate(cache.layers) for one in _states_of(layer, i))
    return Held(attending=attending, states=states, kept=kept, offset=offset)


def kept_by(layers: Iterable[Any]) -> tuple[int, ...]:
    """How many of the last positions each layer of a cache keeps; 0: all."""
    return tuple(int(layer.sliding_window) if getattr(layer, "is_sliding", False) else 0 for layer in layers)


def _states_of(layer: Any, number: int) -> list[StateSpec]:
    found = []
    for part in PARTS:
        for index, tensor in getattr(layer, f"{part}_states", {}).items():
            if tensor is not None:
                found.append(StateSpec(layer=number, part=part, index=index, spec=spec_of_state(tensor)))
    return found


def spec_of_state(tensor: Tensor) -> TensorSpec:
    """Shape and type of a state."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in {dtype.value for dtype in DType}:
        raise Unsupported(f"it keeps a state of {tensor.dtype}")
    return TensorSpec(shape=tuple(tensor.shape), dtype=DType(name))


class Stateless:
    """A layer of the cache in a trace that has no state; K and V are those of ``cache``, which it asks for sizes, too."""

    record_past = False

    def __init__(self, cache: Any) -> None:
        self.get_seq_length, self.get_mask_sizes = partial(type(cache).get_seq_length, cache), partial(type(cache).get_mask_sizes, cache)

    def __getattr__(self, name: str) -> NoReturn:
        raise Unasked(f"it keeps {name!r} in its cache, which is neither K and V nor a state of one size")


@frozen(eq=False)
class Window:
    """What a convolution reads of a chunk: its ``state`` [1, C, K] and the new columns ``x`` [1, C, T], both in ``joined``.

    ``valid`` i64 [1]: how many of the new ones are no padding; None: all.
    """

    state: Tensor
    x: Tensor
    joined: Tensor
    valid: Tensor | None

    def write(self) -> None:
        """Keep the last K columns that are no padding."""
        kept = self.state.shape[-1]
        self.state.copy_(self.joined[..., -kept:] if self.valid is None else self.joined.index_select(-1, _columns(self.valid, kept)))


class StateLayer(LinearAttentionLayer):
    """A layer of the cache in a trace: its states are the declared tensors, and there always are earlier ones, zero at the start.

    ``valid`` i64 [1]: how many columns of what is appended are no padding; None: all. ``windows`` collects what convolutions of chunks
    read; whoever takes one out writes its state.
    """

    def __init__(self, states: dict[StateSpec, Tensor], valid: Tensor | None, windows: list[Window]) -> None:
        super().__init__(number_of_states=1 + max(state.index for state in states))
        self.valid, self.windows = valid, windows
        for part in PARTS:
            tensors = {state.index: tensor for state, tensor in states.items() if state.part == part}
            getattr(self, f"{part}_states").update(tensors)
            getattr(self, f"is_{part}_states_initialized").update(dict.fromkeys(tensors, True))
        self.has_previous_state = dict.fromkeys(self.has_previous_state, True)

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """The state [1, C, K] and behind it the new columns [1, C, T]; kept are the last K columns that are no padding: see ``Window``."""
        state = self.conv_states[state_idx]
        if state is None or conv_kernel_size not in (None, state.shape[-1]):
            raise Unsupported(f"a convolution reads {conv_kernel_size} columns and keeps another number")
        window = Window(state, conv_states, torch.cat([state, conv_states], dim=-1), self.valid)
        if conv_states.shape[-1] == 1:
            window.write()
        else:
            self.windows.append(window)
        return window.joined

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        """Write the state."""
        state = self.recurrent_states[state_idx]
        if state is None or state.shape != recurrent_states.shape:
            raise Unsupported(f"a recurrence keeps a state of another shape than {tuple(recurrent_states.shape)}")
        if state is not recurrent_states:  # the model wrote it in place
            state.copy_(recurrent_states)
        return state


def _columns(first: Tensor, count: int) -> Tensor:
    return first + torch.arange(count, device=first.device)


class Layers(list[Any]):
    """The layers of ``cache`` up to the last one with a state. Any other that is asked for has none, and answers for the cache."""

    def __init__(self, cache: Any, layers: dict[int, StateLayer]) -> None:
        super().__init__(layers.get(i) or Stateless(cache) for i in range(1 + max(layers, default=-1)))
        self._cache = cache

    def __getitem__(self, index: Any) -> Any:
        """The layer."""
        return Stateless(self._cache) if isinstance(index, int) and index >= len(self) else super().__getitem__(index)


def cache_layers(cache: Any, held: Held, tensors: tuple[Tensor, ...], valid: Tensor | None, windows: list[Window]) -> Layers:
    """The layers of ``cache``, whose states are ``tensors`` in the order of ``held.states``; ``windows``: see ``StateLayer``."""
    of_layer: dict[int, dict[StateSpec, Tensor]] = {}
    for state, tensor in zip(held.states, tensors, strict=True):
        if state.part != OWN:
            of_layer.setdefault(state.layer, {})[state] = tensor
    return Layers(cache, {layer: StateLayer(states, valid, windows) for layer, states in of_layer.items()})


def check_states(graph: Graph, held: Held) -> Graph:
    """Return ``graph``, in which one node writes each state.

    Raises:
        Unsupported: none does, or several do.
    """
    roots = memory_roots(graph)
    for state in held.states:
        writers = [node for node in graph.nodes if any(roots[name] == roots[state.source] for name in node.mutates)]
        if len(writers) != 1:
            raise Unsupported(f"it writes the {state.part} state of layer {state.layer} {len(writers)} times in a step")
    return graph


def check_kept(graph: Graph, held: Held, kv: KVSpec) -> Graph:
    """Return ``graph``, which attends to nothing that the model's own cache has dropped.

    A prompt that the model reads at once shows it all of itself, and no few tokens tell that later ones do not see the first.

    Raises:
        Unsupported: it would.
    """
    layers = held.attending if held.attending is not None else range(len(held.kept))
    slots = {f"kv.key.{slot}": held.kept[layer] for slot, layer in enumerate(layers)}
    for node in graph.nodes:
        call = named(node.op, node.args, dict(node.kwargs)) if node.op == ATTENTION else {}
        kept = max((slots.get(name, 0) for name in node.mutates), default=0)
        seen = int(call.get("window") or 0) or int(call.get("chunk") or 0) or kv.capacity
        if call and 0 < kept < min(seen, kv.capacity):
            raise Unsupported(f"its cache keeps the last {kept} positions of a layer, and its mask hides none of the others")
    return graph
