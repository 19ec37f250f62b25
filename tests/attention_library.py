"""What tests take for a device's library of attention."""

import torch
from torch import Tensor


def library(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
    """What a library of a device serves: equal widths, groups of heads; written out."""
    if q.shape[3] != v.shape[3]:
        return None
    assert not causal or q.shape[2] == k.shape[2]
    rows, sums = _attended(q, k, v, causal, scale)
    return torch.empty_like(q).copy_(rows), sums


def over_all(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, scale: float) -> bool:
    """What a kernel of a device serves that attends over everything cached at once: equal widths, groups of heads; written out."""
    if q.shape[3] != v.shape[3]:
        return False
    out.copy_(_attended(q, k, v, True, scale)[0])
    return True


def _attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3) * scale
    if causal:
        before = k.shape[2] - q.shape[2]
        scores = scores.masked_fill(~torch.ones_like(scores[0, 0], dtype=torch.bool).tril(before), float("-inf"))
    return scores.softmax(-1) @ v.double().repeat_interleave(group, 1), scores.logsumexp(-1).float()
