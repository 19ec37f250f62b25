"""A session behind a prompt that it did not read itself: what HuggingFace's own model cached becomes the session's K, V and states."""

from typing import TYPE_CHECKING, Any

from ..ir.graph import OFFSET, STATE_PREFIX

if TYPE_CHECKING:
    import torch

    from .bound_program import BoundProgram
    from .session import Session


def import_cache(session: "Session", cache: Any, length: int, config: Any) -> str:
    """Copy a cache of transformers behind ``length`` tokens of one sequence; one clause on why it cannot be, and nothing has changed then.

    ``cache.layers[i].keys`` [1, heads, T, channels] and ``.values``: T is ``length``, or what a sliding window keeps of it. States of fixed
    size: ``conv_states[j]`` and ``recurrent_states[j]``. The session holds memory for ``length`` positions already. ``config``, the
    model's, says which layers attend to what others cached; here each has its own.
    """
    layers = list(getattr(cache, "layers", ()))
    attending = _with_shared([layer for layer in layers if getattr(layer, "keys", None) is not None], len(session.kv.keys), config)
    if len(attending) != len(session.kv.keys):
        return f"{len(attending)} layers cached K and V, and the session has them of {len(session.kv.keys)}"
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer, keys, values in zip(attending, session.kv.keys, session.kv.values, strict=True):
        for theirs, ours in ((layer.keys.transpose(1, 2), keys), (layer.values.transpose(1, 2), values)):
            count = theirs.shape[1]
            whole = count == length or (0 < count < length and getattr(layer, "is_sliding", False))
            if not whole or theirs.dtype != ours.dtype or (theirs.shape[0], *theirs.shape[2:]) != (1, *ours.shape[2:]):
                return (f"a layer cached {tuple(theirs.shape)} {theirs.dtype} behind {length} tokens, where the session has "
                        f"{tuple(ours.shape)} {ours.dtype}")
            copies.append((ours[:, length - count : length], theirs))
    for source in session.graphs.states:
        kept, state = session.states[source], _state(layers, source)
        if state is None or state.shape != kept.shape or state.dtype != kept.dtype:
            return f"it holds no {source.removeprefix(STATE_PREFIX)} of {tuple(kept.shape)} {kept.dtype}"
        copies.append((kept, state))
    session.forget()
    for ours, theirs in copies:
        ours.copy_(theirs)
    return ""


def _with_shared(attending: list[Any], count: int, config: Any) -> list[Any]:
    """What each of ``count`` layers attends to, where the last ones share it (``num_kv_shared_layers`` of Gemma 3n and 4): with the last
    layer of their own kind that caches."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    kinds, own = getattr(text, "layer_types", None) or (), len(attending)
    if not getattr(text, "num_kv_shared_layers", 0) or len(kinds) != count or own >= count:
        return attending
    last = dict(zip(kinds, attending, strict=False))
    return [*attending, *(last[kind] for kind in kinds[own:] if kind in last)]


def _state(layers: list[Any], source: str) -> "torch.Tensor | None":
    part, layer, index = source.removeprefix(STATE_PREFIX).split(".")
    found = getattr(layers[int(layer)], f"{part}_states", {}) if int(layer) < len(layers) else {}
    state: torch.Tensor | None = found.get(int(index))
    return state


def stand_behind(session: "Session", prompt: "torch.Tensor", logits: "torch.Tensor") -> "BoundProgram":
    """Ids, position, history and logits as ``Session.prefill`` leaves them behind ``prompt`` [1, n]; ``logits`` [vocabulary] are given."""
    length = prompt.shape[1]
    program = session.bound(session.decode_program(length))
    program.output(0)[0, -1].copy_(logits)
    token = program.output(0)[0, -1].argmax()
    session.ids.fill_(token)
    session.position.fill_(length)
    session.history[length] = token
    return program


def without_offset(session: "Session") -> None:
    """Behind a request: the next one begins with tokens that are where they are cached."""
    import torch

    if OFFSET in session.graphs.zeroed:
        with torch.inference_mode():
            session.states[OFFSET].zero_()
