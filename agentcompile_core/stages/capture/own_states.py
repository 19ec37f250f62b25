"""States that a model keeps where transformers' caches have no place for them: in its modules, or in a cache of a class of its own.

What changes from token to token and keeps its size is a state like any other (``states.py``): declared as ``state.own.<layer>.<index>``,
zero before a prompt. While the model is traced the declared tensors lie where it looks for its own, and what lies there afterwards is
written to them. RecurrentGemma keeps its recurrences in its modules, MiniMax its linear attention in a cache of its own.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import Cache

from .attention import PassThroughCache
from .describe import text_config
from .left_behind import ParametersKept, undisturbed
from .states import OWN, Held, StateSpec, cache_keyword, kept_by, spec_of_state
from .unsupported import Unsupported

_MOST_DEEP = 4  # lists, dictionaries and objects in one another
_PLAIN = (bool, int, float, str)
Path = tuple[Any, ...]


@frozen
class Place:
    """Where a state lies: in an attribute of the module at ``module``; where that is None, in the cache.

    ``path``: names of attributes, keys of dictionaries and indices of lists.
    """

    module: str | None
    path: Path


@frozen(eq=False)
class OwnCache:
    """A cache of a class of the model's own, as it is behind two tokens: every session's is a copy with other tensors."""

    sample: Any

    def made(self, through: PassThroughCache, states: dict[Path, Tensor]) -> Any:
        """One whose K and V go through ``through``, and whose tensors at the paths of ``states`` are these."""
        own = {name: value for name, value in vars(self.sample).items() if name not in vars(through)}
        replaced = {name: _replaced(value, (name,), states) for name, value in own.items()}
        if not isinstance(self.sample, Cache):
            found = copy.copy(self.sample)
        else:
            kind = type(self.sample)
            found = object.__new__(type(kind.__name__, (PassThroughCache, kind), {}))
            found.__dict__.update(vars(through))
        for name, value in replaced.items():
            setattr(found, name, value)
        return found


def with_own_states(model: nn.Module, held: Held) -> Held:
    """``held`` with what the model keeps for itself, found by running three tokens; ``held`` itself where that is nothing.

    Raises:
        Unsupported: it counts, or what it keeps grows, or it writes to its parameters. Whatever the model raises is raised, too.
    """
    keyword, device = cache_keyword(model), next(model.parameters()).device
    counts = "position_ids" in inspect.signature(model.forward).parameters
    seen = []
    with undisturbed(model), ParametersKept(model), torch.no_grad():
        cache = begun(model, torch.zeros(1, 1, dtype=torch.int64, device=device))
        for at, count in ((0, 2), (2, 1)):
            ids = torch.zeros(1, count, dtype=torch.int64, device=device)
            positions = {"position_ids": torch.arange(at, at + count, device=device)[None]} if counts else {}
            cache = getattr(model(input_ids=ids, use_cache=True, **{keyword: cache}, **positions), keyword, cache)
            is_own = cache is not None and not hasattr(cache_utils, type(cache).__name__)
            in_cache = {Place(None, path): value for path, value in _leaves(vars(cache) if is_own else {}, cache)}
            found = {**in_cache, **_attributes(model)}
            seen.append(({place: (value, _mark(value)) for place, value in found.items()}, copy.copy(cache)))
    (before, _), (after, last) = seen
    changed = {place: value for place, (value, mark) in after.items() if place not in before or before[place][1] != mark}
    tensors = {place: value for place, value in changed.items() if place in before and isinstance(value, Tensor)}
    if any(place not in tensors for place in changed if place.module is None):
        raise Unsupported("its cache counts, or grows by more than K and V")
    if not tensors:
        return held
    if any(before[place][0].shape != value.shape for place, value in tensors.items()):
        raise Unsupported("it keeps more from token to token than K, V and states of one size")
    layers = getattr(last, "layers", ()) if isinstance(last, Cache) else ()
    attending = tuple(i for i, layer in enumerate(layers) if getattr(layer, "keys", None) is not None)
    return evolve(held, attending=attending, states=(*held.states, *_specs(tensors)),
                  kept=kept_by(layers),
                  own_cache=OwnCache(last) if is_own else None)


def _specs(tensors: dict[Place, Tensor]) -> Iterator[StateSpec]:
    of_layer: dict[int, int] = {}
    for place, tensor in tensors.items():
        steps = place.path if place.module is None else place.module.split(".")
        layer = next((int(step) for step in steps if str(step).isdigit()), 0)
        of_layer[layer] = index = of_layer.get(layer, -1) + 1
        yield StateSpec(layer=layer, part=OWN, index=index, spec=spec_of_state(tensor), place=place)


def _mark(value: Any) -> Any:
    """What tells whether another value is at a place later, or the same tensor was written."""
    return (id(value), None if value.is_inference() else value._version) if isinstance(value, Tensor) else value


def _attributes(model: nn.Module) -> dict[Place, Tensor]:
    return {Place(path, (name,)): value for path, part in model.named_modules() for name, value in vars(part).items()
            if isinstance(value, Tensor)}


def _leaves(value: Any, whole: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every tensor and plain value in dictionaries and lists; of a cache of transformers' kind nothing of its layers."""
    if isinstance(value, (Tensor, *_PLAIN)):
        yield path, value
    elif isinstance(value, dict | list | tuple) and len(path) < _MOST_DEEP:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if path or key != "layers" or not isinstance(whole, Cache):
                yield from _leaves(one, whole, (*path, key))


def _replaced(value: Any, path: Path, states: dict[Path, Tensor]) -> Any:
    """A copy of ``value`` and of what lies in it, with ``states`` at their paths."""
    if path in states:
        return states[path]
    if isinstance(value, dict):
        return {key: _replaced(one, (*path, key), states) for key, one in value.items()}
    return type(value)(_replaced(one, (*path, i), states) for i, one in enumerate(value)) if type(value) in (list, tuple) else value


class OwnStates:
    """The states of one traced step in their places: ``tensors`` are those of ``held.states``, in order."""

    def __init__(self, model: nn.Module, held: Held, tensors: Sequence[Tensor]) -> None:
        self._model, self._held = model, held
        self._placed = {state.place: tensor for state, tensor in zip(held.states, tensors, strict=True) if state.place is not None}

    def cache(self, through: PassThroughCache) -> Any:
        """What the model gets as its cache."""
        in_cache = {place.path: tensor for place, tensor in self._placed.items() if place.module is None}
        return through if self._held.own_cache is None else self._held.own_cache.made(through, in_cache)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A block in which attributes of modules hold their states; afterwards they hold what they held."""
        places = [(self._model.get_submodule(place.module), place.path[0], tensor)
                  for place, tensor in self._placed.items() if place.module is not None]
        before = [(part, name, vars(part).get(name)) for part, name, _ in places]
        try:
            for part, name, tensor in places:
                vars(part)[name] = tensor
            yield
        finally:
            for part, name, value in before:
                vars(part)[name] = value

    def write(self, cache: Any) -> None:
        """Keep what the step left in the places, before they hold something else again.

        Raises:
            Unsupported: that is no tensor of the same size.
        """
        for place, state in self._placed.items():
            value: Any = vars(self._model.get_submodule(place.module) if place.module is not None else cache)
            for step in place.path:
                value = value[step]
            if not isinstance(value, Tensor) or (value.shape, value.dtype) != (state.shape, state.dtype):
                raise Unsupported("what it keeps from token to token changes its size")
            if value is not state:  # the model wrote it in place
                state.copy_(value)


def begun(model: nn.Module, token: Tensor) -> Any:
    """The cache for the first token of a prompt, as generation has it; None where the model makes its own.

    What it keeps in attributes from step to step is zero afterwards. That is found by running ``token`` i64 [1, 1].
    """
    before = _attributes(model)
    answer = model(input_ids=token, use_cache=True)
    for place, value in _attributes(model).items():
        if place.module is not None and value is not before.get(place):
            vars(model.get_submodule(place.module))[place.path[0]] = torch.zeros_like(value)
    return None if getattr(answer, cache_keyword(model), None) is not None else DynamicCache(config=text_config(model))
