"""Short causal convolutions over the tokens of a prompt in plain torch, and the last columns that the next tokens read."""

import torch
import torch.nn.functional as F
from torch import Tensor

SCHEMA = "(Tensor state, Tensor x, Tensor weight, Tensor? bias=None, Tensor? valid=None, bool silu=False) -> (Tensor, Tensor)"


def causal_convolution(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, valid: Tensor | None = None,
                       silu: bool = False) -> tuple[Tensor, Tensor]:
    """``out[c, t] = sum over k of weight[c, k] column[c, t + 1 + k] + bias[c]`` over the columns of ``state`` and ``x`` side by side.

    Shapes: ``state`` [1, C, K], the last columns before ``x`` [1, C, T]; ``weight`` [C, K]; ``bias`` [C]; ``valid`` i64 [1], columns of x
    that are no padding. With ``silu`` behind the sum, which is rounded to the type of the weight first. The results are out [1, C, T] of
    the type of x, which lies token by token (strides .., 1, C), and the last K columns that are no padding [1, C, K], contiguous.
    """
    joined, kept = torch.cat([state, x], dim=-1), state.shape[-1]
    out = F.conv1d(joined[..., 1:].to(weight.dtype), weight.unsqueeze(1), bias, groups=weight.shape[0])
    out = (F.silu(out) if silu else out).to(x.dtype)
    columns = torch.arange(kept, device=x.device)
    last = joined[..., x.shape[-1]:] if valid is None else joined.index_select(-1, valid + columns)
    return out.transpose(1, 2).contiguous().transpose(1, 2), last.to(state.dtype).contiguous()


def shape_only(state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, valid: Tensor | None = None,
               silu: bool = False) -> tuple[Tensor, Tensor]:
    """The results without their values, for tensors that have none."""
    batch, channels, tokens = x.shape
    fits = batch == 1 and tuple(weight.shape) == (channels, state.shape[2]) and tuple(state.shape[:2]) == (1, channels)
    fits = fits and (bias is None or bias.shape == (channels,)) and (valid is None or valid.shape == (1,))
    torch._check(fits, lambda: f"columns {tuple(x.shape)} behind {tuple(state.shape)} do not fit a convolution {tuple(weight.shape)}")
    return x.new_empty(1, tokens, channels).transpose(1, 2), state.new_empty(state.shape)
