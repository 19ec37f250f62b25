"""Choosing a token from logits, by HuggingFace's own processors and stopping criteria."""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ..ops.odds import Odds

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class Alone:
    """What lets a device choose by itself, without the host seeing a token in between.

    ``settings``: equal for two requests whose processors say the same of the same scores; ``of_tokens``: they also look at which tokens
    there were, in whatever order and however often. ``eos``: tokens that end the request; nothing else ends it but its length.
    ``odds``: what the processors amount to, where that can be said so.
    """

    settings: Hashable
    eos: frozenset[int] = frozenset()
    of_tokens: bool = False
    odds: Odds | None = None


Draw = Callable[["torch.Tensor", Odds, "torch.Tensor"], "tuple[torch.Tensor, torch.Tensor] | None"]  # Backend.draw


@frozen(kw_only=True)
class Pick:
    """How each token of one request is chosen.

    ``processors`` maps (ids int64 [1, n], scores fp32 [1, vocabulary]) to scores, ``stops`` maps (ids, scores) to bool [1]:
    transformers' LogitsProcessorList and StoppingCriteriaList. Draws are torch's, from its own random numbers, as transformers'
    (docs/decisions/0024). ``alone``: None where the host must choose.
    """

    processors: Callable[..., Any]
    stops: Callable[..., Any]
    do_sample: bool = False
    alone: Alone | None = None

    def token(self, ids: "torch.Tensor", logits: "torch.Tensor") -> "torch.Tensor":
        """The next token, int64 [1], after ``ids`` [1, n] with ``logits`` [vocabulary]."""
        import torch

        scores = self._scores(ids, logits)
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(torch.softmax(scores, -1), 1).view(1)

    def token_unseen(self, ids: "torch.Tensor", logits: "torch.Tensor", draw: Draw | None = None) -> "tuple[torch.Tensor, torch.Tensor]":
        """As ``token``, from the same random numbers, without waiting for the device; and bool [1]: whether ``token`` would have refused.

        torch.multinomial reads its argument on the host before it draws one of several by exponential clocks; that alone is left out.
        ``draw`` does in its own way what the odds say, where they do and it can.
        """
        import torch

        if not self.do_sample:
            scores = self._scores(ids, logits)
            return scores.argmax(-1), torch.zeros(1, dtype=torch.bool, device=scores.device)
        clocks = torch.empty((1, *logits.shape), dtype=torch.float32, device=logits.device).exponential_(1)
        if draw is not None and self.alone is not None and self.alone.odds is not None:
            found = draw(logits, self.alone.odds, clocks[0])
            if found is not None:
                return found
        likely = torch.softmax(self._scores(ids, logits), -1)
        refused = ~((likely.max() < float("inf")) & (likely.min() >= 0) & (likely.sum() != 0))
        return (likely / clocks).argmax(-1), refused.view(1)

    def _scores(self, ids: "torch.Tensor", logits: "torch.Tensor") -> "torch.Tensor":
        import torch

        scores: torch.Tensor = self.processors(ids, logits.to(torch.float32, copy=True).unsqueeze(0))
        return scores
