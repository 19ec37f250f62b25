"""Choosing a token from logits on the host's side of the loop, by HuggingFace's own processors and stopping criteria."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class Pick:
    """How each token of one request is chosen.

    ``processors`` maps (ids int64 [1, n], scores fp32 [1, vocabulary]) to scores, ``stops`` maps (ids, scores) to bool [1]:
    transformers' LogitsProcessorList and StoppingCriteriaList. Draws are torch's, from its own random numbers, as transformers'
    (docs/decisions/0024).
    """

    processors: Callable[..., Any]
    stops: Callable[..., Any]
    do_sample: bool = False

    def token(self, ids: "torch.Tensor", logits: "torch.Tensor") -> "torch.Tensor":
        """The next token, int64 [1], after ``ids`` [1, n] with ``logits`` [vocabulary]."""
        import torch

        scores = self.processors(ids, logits.to(torch.float32, copy=True).unsqueeze(0))
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(torch.softmax(scores, -1), 1).view(1)
