"""What tests take for a device's library of attention."""

from collections.abc import Sequence

import torch
from torch import Tensor


def library(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor] | None:
    """What a library of a device serves: equal widths, groups of heads; written out."""
    if q.shape[3] != v.shape[3]:
        return None
    assert not causal or q.shape[2] == k.shape[2]
    rows, sums = _attended(q, k, v, causal, scale)
    return torch.empty_like(q).copy_(rows), sums.float()


def over_all(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, scale: float, window: int = 0, softcap: float = 0.0,
             sinks: Tensor | None = None, slopes: Sequence[float] | None = None) -> bool:
    """What a kernel of a device serves that attends over everything cached at once: groups of heads; written out."""
    if sinks is None:
        out.copy_(_attended(q, k, v, True, scale, window, softcap, slopes)[0])
        return True
    rows, sums = _attended(q, k, v, True, scale, window, softcap, slopes)
    out.copy_(rows * torch.sigmoid(sums.double() - sinks.double()[:, None])[..., None])
    return True


def _attended(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int = 0, softcap: float = 0.0,
              slopes: Sequence[float] | None = None) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(group, 1).transpose(2, 3) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if slopes is not None:
        ahead = torch.arange(k.shape[2])[None, :] - torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        scores = scores + torch.tensor(slopes, dtype=torch.float64)[:, None, None] * ahead
    if causal:
        before = k.shape[2] - q.shape[2]
        seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril(before)
        scores = scores.masked_fill(~(seen.triu(before - window + 1) if window else seen), float("-inf"))
    return scores.softmax(-1) @ v.double().repeat_interleave(group, 1), scores.logsumexp(-1)
