"""Prompts of more than tokens (images, sounds): HuggingFace's own model reads them, and compiled steps make the tokens behind them.

transformers prepares the request, and the model's own forward fills a cache of its own, which becomes the session's. Whether a step of
the session is what the model would do next is not believed: what transformers would give the model for the next token must be what a
step takes; and for one token behind the first prompt of each kind the logits of both are compared. Else HuggingFace's own loop runs all of
the request.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ...errors import UsageError
from ...ir.graph import OFFSET
from ..device import at_any_length
from ..imported import import_cache, stand_behind, without_offset
from ..module_changes import version_of
from .framework_loop import by_framework, of_request, refusing
from .request import Request, count_tokens, of_the_prompt
from .settings import OF_THE_CACHE

if TYPE_CHECKING:
    import torch

    from ..bound_program import BoundProgram
    from ..session import Session
    from .step_model import StepModel


class Unlike(UsageError):
    """The session cannot go on behind a prompt; why, in one clause."""


def by_module_prompt(module: Any, session: "Session", wanted: Request, *, seed: int | None, streamer: Any,
                     say: Callable[[str], None]) -> Any:
    """transformers' ``generate`` of one prompt that the session cannot read; somebody holds the session exclusively.

    Raises:
        UsageError: transformers refuses the request.
    """
    assert wanted.prompts is not None
    ids, keywords = wanted.prompts.ids.to(session.device), of_request(wanted)
    session.ready(ids.shape[1], wanted.count)
    by_steps = {**keywords, **dict.fromkeys(OF_THE_CACHE), "custom_generate": _loop(session, _idle(wanted), streamer, say)}
    try:
        with session.module_runs():
            found = by_framework(module, ids, wanted.count, by_steps, seed=seed, streamer=None,
                                 callers=(streamer, *keywords.values()))
    except Unlike as unlike:
        say(f"transformers' own loop runs this request, without kernels: {wanted.why}, and {unlike}")
        with at_any_length(session.backend), session.module_runs():
            return by_framework(module, ids, wanted.count, keywords, seed=seed, streamer=streamer)
    finally:
        without_offset(session)
    say(f"HuggingFace's own model reads the prompt of this request, and compiled steps make its tokens: {wanted.why}")
    return found


def as_tokens(module: Any, session: "Session", wanted: Request) -> Request | None:
    """The same request of tokens alone, where all else is known to say nothing; None: it is not."""
    idle = _idle(wanted)
    if not idle or (idle, _written(module)) not in session.agreed:
        return None
    return evolve(wanted, arguments={name: one for name, one in wanted.arguments.items() if name not in idle}, runs="session", why="")


def _idle(wanted: Request) -> frozenset[str]:
    """Names of what the prompt holds beside its tokens, if none of it looks as if it said anything: kinds of tokens that are all 0, as
    processors give them with text, and positions that count from 0."""
    import torch

    assert wanted.prompts is not None
    shape = wanted.prompts.ids.shape

    def is_idle(name: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.shape != shape or shape[1] < 2:
            return False
        return count_tokens(value, torch.ones_like(value)) if name == "position_ids" else not bool(value.any())

    names = of_the_prompt(wanted.arguments)
    return frozenset(names if all(is_idle(name, wanted.arguments[name]) for name in names) else ())


def _written(module: Any) -> int:
    """Grows with every write to the weights."""
    return sum(map(version_of, (*module.parameters(), *module.buffers())))


def _loop(session: "Session", idle: frozenset[str], streamer: Any, say: Callable[[str], None]) -> Callable[..., Any]:
    """For ``custom_generate`` of HuggingFace's own model. ``idle``: what might as well not have been given, see ``_idle``."""

    def loop(model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **given: Any) -> Any:
        step = behind_prompt(model, session, input_ids, generation_config, given, say, idle)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        return step.run(input_ids, logits_processor, stopping_criteria, given.get("attention_mask"), streamer)

    return loop


def behind_prompt(model: Any, session: "Session", input_ids: "torch.Tensor", config: Any, given: Mapping[str, Any],
                  say: Callable[[str], None], idle: frozenset[str] = frozenset()) -> "StepModel":
    """What makes the tokens behind a prompt [1, n] that the model itself reads with all that transformers has ``given``.

    Raises:
        Unlike: the session cannot.
        UsageError: the model refuses the prompt.
    """
    from .step_model import StepModel

    if why := StepModel.beyond_the_session(input_ids, config, given.get("attention_mask")):
        raise Unlike(why)
    with refusing(model):
        logits = _read(model, session, input_ids, idle, dict(given))

    def read(prompt: "torch.Tensor", count: int) -> "BoundProgram":
        session.ready(prompt.shape[1], count)
        return stand_behind(session, prompt, logits)

    return StepModel(model, session, config, say, read)


def _read(model: Any, session: "Session", input_ids: "torch.Tensor", idle: frozenset[str], given: dict[str, Any]) -> "torch.Tensor":
    """Logits [vocabulary] behind the prompt [1, n], as the model itself reads it with what else is ``given``; the session stands behind it.

    Raises:
        Unlike: the session cannot go on there.
    """
    import torch

    from ...ops.agreement import beyond, program_bound
    from .cache_name import CACHE_NAME

    length = input_ids.shape[1]
    session.ready(length, 1)
    with at_any_length(session.backend):
        read = model(**model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **given), return_dict=True)
    given = model._update_model_kwargs_for_generation(read, given, is_encoder_decoder=False)
    cache, logits = given.get(CACHE_NAME), read.logits[0, -1].clone()
    if cache is None or cache.get_seq_length() != length:
        raise Unlike(f"the model cached {0 if cache is None else cache.get_seq_length()} positions of {length} tokens")
    token = logits.argmax().view(1, 1)
    following = model.prepare_inputs_for_generation(torch.cat([input_ids, token], dim=1), next_sequence_length=1, **given)
    said = {name: value for name, value in following.items() if name != CACHE_NAME}
    offset = _offset(following.get("position_ids"), length) if OFFSET in session.graphs.zeroed else 0
    if why := _unlike_a_step(said, length, offset):
        raise Unlike(why)
    bound, written = program_bound(session.bound("decode").graph), _written(model)
    with torch.inference_mode():
        if idle and (idle, written) not in session.agreed and not beyond(session.read(input_ids.cpu()), logits, bound):
            session.agreed.add((idle, written))  # the session reads the next such prompt
        if why := import_cache(session, cache, length, model.config):
            raise Unlike(why)
        if offset:
            session.states[OFFSET].fill_(offset)
        states = {source: session.states[source].clone() for source in session.graphs.states}
    kind = (_known(said), _cut(cache, length), offset != 0, written)
    if kind not in session.agreed:
        with at_any_length(session.backend):
            wanted = model(**following, return_dict=True).logits[0, -1]
        with torch.inference_mode():
            if why := beyond(session.read_next(int(token), length), wanted, bound, "the model's own step"):
                raise Unlike(f"a compiled step behind it computes something else: {why}")
            for source, state in states.items():
                session.states[source].copy_(state)
        session.agreed.add(kind)
    return logits


def _known(said: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a step of the model is told beside its token, its position and what it attends to; the same for every step of a request."""
    import torch

    def value_of(value: Any) -> Any:
        return (tuple(value.shape), tuple(value.flatten().tolist())) if isinstance(value, torch.Tensor) else value

    own = ("input_ids", "attention_mask", "position_ids")
    return tuple((name, value_of(value)) for name, value in sorted(said.items()) if name not in own)


def _cut(cache: Any, length: int) -> tuple[bool, ...]:
    """Of each layer whether it keeps less than the whole prompt."""
    return tuple(getattr(layer, "keys", None) is not None and layer.keys.shape[-2] < length for layer in cache.layers)


def _offset(positions: Any, length: int) -> int:
    """How much further than ``length`` the position is that all but the first of several ``positions`` [3 or 4, 1, 1] name; 0: they are no
    such positions. The first of four is where the token is cached."""
    import torch

    if not isinstance(positions, torch.Tensor) or positions.dim() != 3 or positions.numel() not in (3, 4):
        return 0
    return int(positions.flatten()[-1]) - length


def _unlike_a_step(inputs: Mapping[str, Any], length: int, offset: int) -> str:
    """One clause on what ``inputs`` of the model's forward for one token behind ``length``, whose position is ``offset`` further, say that
    no step of a session knows."""
    import torch

    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            known = value is None or isinstance(value, bool | int | str)
        elif name == "input_ids":
            known = value.shape == (1, 1)
        elif name == "attention_mask":
            known = value.shape == (1, length + 1) and bool((value == 1).all())
        elif name == "position_ids":
            turned = value.flatten()[1:] if value.dim() == 3 and value.numel() == 4 else value
            known = bool((turned == length + offset).all()) and int(value.flatten()[0]) in (length, length + offset)
        else:  # kinds of tokens and sizes of images, the same for every step: what they say to one, the comparison of their kind shows
            known = not value.is_floating_point()
        if not known:
            return f"{name} of the tokens behind it is not what a compiled step knows"
    return ""
