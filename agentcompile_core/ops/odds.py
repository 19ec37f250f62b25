"""How likely each token is by scores alone: temperature, the largest few, the likeliest that add up to a share, a least likelihood."""

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class Odds:
    """Scores over ``temperature``; of these the ``top_k`` largest and all that equal the last of them (0: all); of those the likeliest,
    the later index first among equals, up to the one with which they hold ``top_p`` of the probability (1.0: all), one at the least; of
    those the ones that are at least ``min_p`` times as likely as the likeliest (0.0: all). As transformers' processors in its order."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def scores_of(logits: "torch.Tensor", odds: Odds) -> "torch.Tensor":
    """fp32 [V] of ``logits`` [V]: scores over the temperature, and minus infinity for every token that is left out."""
    import torch

    scores = logits.float() / odds.temperature
    if odds.top_k:
        scores = scores.masked_fill(scores < scores.topk(min(odds.top_k, len(scores))).values[-1], -torch.inf)
    if odds.top_p < 1.0:
        rising, order = scores.sort(stable=True)
        out = rising.softmax(0).cumsum(0) <= 1.0 - odds.top_p
        out[-1] = False
        scores = scores.masked_fill(torch.zeros_like(out).scatter(0, order, out), -torch.inf)
    if odds.min_p > 0.0:
        likely = scores.softmax(0)
        scores = scores.masked_fill((likely < odds.min_p * likely.max()) & (scores < scores.max()), -torch.inf)
    return scores
