"""torch.compile at its best: a greedy loop of our own over the module's compiled step, with one static cache for all requests.

As gpt-fast does: one token in, one token out, the cache at fixed addresses, the step compiled with ``reduce-overhead`` and so captured in a
CUDA graph, the choice of the token inside, nothing read by the host before the end. Prompts run through the module itself with
its dynamic cache, since a static one attends over its whole capacity, and are copied.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

Step = Callable[[torch.Tensor], torch.Tensor]


def reduce_overhead(step: Step) -> Step:
    """The step compiled for one shape and captured."""
    compiled: Step = torch.compile(step, mode="reduce-overhead", dynamic=False)

    def marked(token: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(token)

    return marked


class StepLoop:
    """Greedy generation of one model with up to ``length`` positions; ``compiler`` makes of the step what runs."""

    def __init__(self, module: Any, length: int, compiler: Callable[[Step], Step] = reduce_overhead) -> None:
        self._module = module
        self._length = length
        self._cache: Any = StaticCache(config=module.config, max_cache_len=length)
        if any(getattr(layer, "is_sliding", False) for layer in self._cache.layers):
            raise ValueError(f"{module.config.model_type} attends within windows, which this loop does not do")
        self._step = compiler(self._next)

    def _next(self, token: torch.Tensor) -> torch.Tensor:
        """int64 [1, 1] behind int64 [1, 1]."""
        return self._module(token, past_key_values=self._cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)

    def __call__(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The ``new_tokens`` that follow int64 [1, n] on the module's device.

        Raises:
            ValueError: they do not fit.
        """
        if ids.shape[1] + new_tokens > self._length:
            raise ValueError(f"{ids.shape[1]} and {new_tokens} tokens do not fit {self._length} positions")
        found = torch.empty(1, new_tokens, dtype=torch.int64, device=ids.device)
        with torch.no_grad():
            token = self._prompt(ids).clone()
            found[:, :1] = token
            for index in range(1, new_tokens):
                token.copy_(self._step(token))  # what the graph wrote is overwritten by its next run
                found[:, index : index + 1] = token
        return found

    def _prompt(self, ids: torch.Tensor) -> torch.Tensor:
        grown: Any = DynamicCache(config=self._module.config)
        logits = self._module(ids, past_key_values=grown, use_cache=True, logits_to_keep=1).logits
        for kept, made in zip(self._cache.layers, grown.layers, strict=True):
            if not kept.is_initialized:
                kept.lazy_initialization(made.keys, made.values)
            kept.keys[:, :, : ids.shape[1]].copy_(made.keys)
            kept.values[:, :, : ids.shape[1]].copy_(made.values)
            kept.cumulative_length.fill_(ids.shape[1])
        return logits[:, -1].argmax(-1, keepdim=True)
