"""Choosing a token from logits on the host's side of the loop: temperature, top-k, top-p."""

from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs import validators as v

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class Sampling:
    """Parameters with transformers' meaning; ``top_k`` 0 and ``top_p`` 1.0 switch that filter off."""

    temperature: float = field(default=1.0, validator=v.gt(0.0))
    top_k: int = field(default=0, validator=v.ge(0))
    top_p: float = field(default=1.0, validator=[v.gt(0.0), v.le(1.0)])
    seed: int | None = None

    def generator(self, device: str) -> "torch.Generator | None":
        """A seeded generator, or None for torch's own."""
        import torch

        return None if self.seed is None else torch.Generator(device=device).manual_seed(self.seed)


def sample(logits: "torch.Tensor", sampling: Sampling, generator: "torch.Generator | None" = None) -> "torch.Tensor":
    """Draw one token id (int64 [1]) from logits [vocabulary]."""
    import torch

    scores = logits.float() / sampling.temperature
    if sampling.top_k:
        kept = torch.topk(scores, min(sampling.top_k, scores.shape[-1])).values[-1]
        scores = scores.masked_fill(scores < kept, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = torch.sort(scores, descending=True)
        before = torch.softmax(ordered, -1).cumsum(-1) - torch.softmax(ordered, -1)
        scores = scores.index_fill(0, order[before >= sampling.top_p], float("-inf"))
    return torch.multinomial(torch.softmax(scores, -1), 1, generator=generator)
