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
    transformers' LogitsProcessorList and StoppingCriteriaList. ``generator`` is None for torch's own random numbers.
    """

    processors: Callable[..., Any]
    stops: Callable[..., Any]
    do_sample: bool = False
    generator: "torch.Generator | None" = None

    def token(self, ids: "torch.Tensor", logits: "torch.Tensor") -> "torch.Tensor":
        """The next token, int64 [1], after ``ids`` [1, n] with ``logits`` [vocabulary]."""
        import torch

        scores = self.processors(ids, logits.to(torch.float32, copy=True).unsqueeze(0))
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(torch.softmax(scores, -1), 1, generator=self.generator).view(1)


def seeded(seed: int | None, device: str) -> "torch.Generator | None":
    """A generator that draws as torch does after ``torch.manual_seed(seed)``, or None for torch's own."""
    import torch

    return None if seed is None else torch.Generator(device=device).manual_seed(seed)
