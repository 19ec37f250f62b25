"""Which of transformers' processors say the same of the same scores, so that a device may run them without the host."""

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from transformers.generation import logits_process

from ...ops.odds import Odds
from ..sampling import Alone

# Those that look at nothing but scores. Who reads a number on the host (top_h, eta_cutoff), counts or looks at the order of tokens is none.
_OF_SCORES = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
              "EpsilonLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization", "SuppressTokensLogitsProcessor")
# Those that also look at which tokens there were, in any order and any number.
_OF_TOKENS = ("RepetitionPenaltyLogitsProcessor",)
# Those that say together how likely a token is, in transformers' order, with the name of what they say.
_OF_ODDS = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p", "MinPLogitsWarper": "min_p"}


def alone(processors: Sequence[Any], eos: frozenset[int]) -> Alone | None:
    """What a device must know to choose by ``processors`` itself; None where one of them is of another kind.

    Only transformers' own classes are known; one that is derived from them may do anything.
    """
    settings: list[Hashable] = []
    of_tokens = False
    for one in processors:
        counts = _is_one(one, _OF_TOKENS) and getattr(one, "prompt_ignore_length", None) is None
        if not counts and not _is_one(one, _OF_SCORES):
            return None
        of_tokens = of_tokens or counts
        settings.append((type(one).__name__, *((name, _value(value)) for name, value in sorted(vars(one).items()))))
    return Alone(settings=tuple(settings), eos=eos, of_tokens=of_tokens, odds=odds_of(processors))


def odds_of(processors: Iterable[Any]) -> Odds | None:
    """What transformers' processors of temperature, top-k, top-p and min-p, in this order, amount to; None where there are others."""
    said: dict[str, Any] = {}
    left = list(_OF_ODDS)
    for one in processors:
        name = next((name for name in left if _is_one(one, (name,))), None)
        if name is None or getattr(one, "min_tokens_to_keep", 1) != 1 or getattr(one, "filter_value", -math.inf) != -math.inf:
            return None
        left = left[left.index(name) + 1 :]
        said[_OF_ODDS[name]] = getattr(one, _OF_ODDS[name])
    return Odds(**said)


def _is_one(processor: Any, names: Iterable[str]) -> bool:
    return any(type(processor) is getattr(logits_process, name, None) for name in names)


def _value(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), str(value.device), tuple(value.shape), tuple(value.flatten().tolist()))
    return value if isinstance(value, Hashable) else repr(value)
