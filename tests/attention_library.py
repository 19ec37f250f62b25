"""What tests take for a device's library of attention."""

import torch
from torch import Tensor


def library(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
    """What a library of a device serves: equal widths, groups of heads; written out."""
    if q.shape[3] != v.shape[3]:
        return None
    group = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3) * scale
    if causal:
        assert scores.shape[-1] == scores.shape[-2]
        scores = scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(), float("-inf"))
    out = torch.empty_like(q).copy_(scores.softmax(-1) @ v.double().repeat_interleave(group, 1))
    return out, scores.logsumexp(-1).float()
