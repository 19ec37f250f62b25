"""HuggingFace's own ``generate`` of HuggingFace's own model: for what no compiled step can serve, and what was never captured."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...errors import UsageError
from ..device import forked_rng
from .request import Request, on_device
from .settings import one_line


def by_framework(module: Any, inputs: Any, count: int, keywords: Mapping[str, Any], *, seed: int | None, streamer: Any) -> Any:
    """What ``module.generate(inputs, ...)`` returns; tensors stay on the device of ``module``.

    Raises:
        UsageError: transformers refused or failed; the message says what it said.
    """
    device = inputs.device if inputs is not None else module.device
    keywords = on_device({name: value for name, value in keywords.items() if name != "max_length"}, device)
    own = keywords.get("generation_config")
    if own is None:
        keywords["max_new_tokens"] = count
    else:  # transformers wants one or the other
        keywords["generation_config"] = own = copy.deepcopy(own)
        own.max_new_tokens, own.max_length = count, None
    with drawing(seed, device), refusing(module):
        return module.generate(inputs, streamer=streamer, **keywords)


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
def refusing(module: Any) -> Iterator[None]:
    """What transformers raises, of any kind, becomes one sentence; what says itself what is wrong passes.

    Raises:
        UsageError: something was raised.
    """
    import torch

    try:
        yield
    except (UsageError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as exc:
        raise UsageError(f"{type(module).__name__}.generate of transformers refused this request: {one_line(exc)}") from exc
