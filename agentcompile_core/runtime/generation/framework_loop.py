"""HuggingFace's own ``generate`` of HuggingFace's own model: for what no compiled step can serve, and what was never captured."""

import copy
import inspect
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...errors import UsageError
from ..device import forked_rng
from .request import Request, on_device
from .settings import one_line


def by_framework(module: Any, inputs: Any, count: int | None, keywords: Mapping[str, Any], *, seed: int | None, streamer: Any,
                 callers: Iterable[Any] | None = None) -> Any:
    """What ``module.generate(inputs, ...)`` returns; tensors stay on the device of ``module``. ``count`` None: as long as ``keywords`` say.
    ``callers``: whose errors come through as they are; None: those of ``streamer`` and ``keywords``.

    Raises:
        UsageError: transformers refused or failed; the message says what it said.
    """
    device = inputs.device if inputs is not None else module.device
    keywords = on_device({name: value for name, value in keywords.items() if name != "max_length" or count is None}, device)
    own = keywords.get("generation_config")
    if count is None:
        pass
    elif own is None:
        keywords["max_new_tokens"] = count
    else:  # transformers wants one or the other
        keywords["generation_config"] = own = copy.deepcopy(own)
        own.max_new_tokens, own.max_length = count, None
    first = next(iter(inspect.signature(module.generate).parameters), "")
    given: tuple[Any, ...] = (inputs,)
    if first in keywords:  # a class whose own generate takes something else first, as BLIP takes its image
        given, keywords = (), {**keywords, **({} if inputs is None else {"input_ids": inputs})}
    with drawing(seed, device), refusing(module, *((streamer, *keywords.values()) if callers is None else callers)):
        return module.generate(*given, streamer=streamer, **keywords)


def of_request(wanted: Request) -> dict[str, Any]:
    """The keywords of transformers' ``generate`` for a request."""
    own = {} if wanted.own is None else {"generation_config": wanted.own}
    return {**own, **wanted.fields, **wanted.arguments}


@contextmanager
def drawing(seed: int | None, device: Any) -> Iterator[None]:
    """Random numbers as behind ``torch.manual_seed(seed)``, and the state of before afterwards; None: torch's as they come."""
    import torch

    with forked_rng([device], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@contextmanager
def refusing(module: Any, *callers: Any) -> Iterator[None]:
    """What transformers raises, of any kind, becomes one sentence; what says itself what is wrong passes.

    So does what ``callers`` raise, or what lists of them do: the caller's own streamer, processors and criteria may end a request so.

    Raises:
        UsageError: something was raised.
    """
    import torch

    try:
        yield
    except (UsageError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as exc:
        if raised_by(exc, callers):
            raise
        raise UsageError(f"{type(module).__name__}.generate of transformers refused this request: {one_line(exc)}") from exc


def raised_by(exc: BaseException, callers: Iterable[Any]) -> bool:
    """Whether an error comes out of a function or an object of the caller's: one of ``callers``, or of a list among them.

    Objects of transformers' own classes are none: what they say is about the request.
    """
    flat = [one for each in callers for one in (each if isinstance(each, list | tuple) else [each])]
    codes = {getattr(getattr(one, "func", one), "__code__", None) for one in flat} - {None}
    own = {id(one) for one in flat if type(one).__module__.partition(".")[0] not in ("builtins", "functools", "torch", "transformers")}
    for frame, _ in traceback.walk_tb(exc.__traceback__):
        first = frame.f_code.co_varnames[:1] if frame.f_code.co_argcount else ()
        if frame.f_code in codes or any(id(frame.f_locals.get(name)) in own for name in first):
            return True
    return False
