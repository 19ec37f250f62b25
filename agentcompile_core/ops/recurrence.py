"""Linear recurrences over the tokens of a prompt in plain torch: selective scans (Mamba, Mamba-2) and gated delta rules, in one operator.

Every token decays a state, adds an outer product to it and reads it. Sources: Gu and Dao 2023 (arXiv 2312.00752) and Dao and Gu 2024
(2405.21060) for scans; Yang, Kautz and Hatamizadeh 2024 (2412.06464) for the gated delta rule.
"""

import torch
from torch import Tensor

SCHEMA = (
    "(Tensor? state, Tensor decay, Tensor x, Tensor keys, Tensor queries, Tensor? rates=None, Tensor? strength=None,"
    " Tensor? valid=None) -> (Tensor, Tensor)"
)


def recurrence(state: Tensor | None, decay: Tensor, x: Tensor, keys: Tensor, queries: Tensor, rates: Tensor | None = None,
               strength: Tensor | None = None, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """For each token t and head h: ``S = exp(decay_t rates) S``; ``S += w_t keys_t^T``; ``y_t = S queries_t``.

    ``w_t`` is ``x_t``, or with ``strength`` (delta rule) ``strength_t (x_t - S keys_t)`` of the decayed S. All in float32, or float64.

    Shapes: ``state`` [1, H, P, N], any strides, None: zeros; ``decay`` [1, T, H], or [1, T, H, N] of every term; ``x`` [1, T, H, P];
    ``keys`` and ``queries`` [1, T, G, N], of which H / G neighbouring heads share one; ``rates`` [H, N] or [H, 1]; ``strength``
    [1, T, H]; ``valid`` i64 [1], tokens that are no padding: those behind leave the state alone and read zeros. The results are y
    [1, T, H, P] and the state behind the last token [1, H, P, N], both contiguous.
    """
    tokens, shared = x.shape[1], x.shape[2] // keys.shape[2]
    kept = x.new_zeros(_state_shape(x, keys)) if state is None else state.to(x.dtype)
    keys, queries = (one.repeat_interleave(shared, dim=2) for one in (keys, queries))
    steps = decay if decay.dim() == 4 else decay.unsqueeze(-1)
    factors = (steps if rates is None else steps * rates).exp()
    out, live = torch.zeros_like(x, memory_format=torch.contiguous_format), _live(valid, tokens)
    for t in range(tokens if live is None else live):
        new, added = factors[:, t].unsqueeze(2) * kept, x[:, t]
        if strength is not None:
            added = strength[:, t].unsqueeze(-1) * (added - (new @ keys[:, t].unsqueeze(-1)).squeeze(-1))
        new = new + added.unsqueeze(-1) * keys[:, t].unsqueeze(2)
        row = (new @ queries[:, t].unsqueeze(-1)).squeeze(-1)
        if live is None and valid is not None:
            new, row = torch.where(t < valid, new, kept), torch.where(t < valid, row, 0.0)
        kept = new
        out[:, t] = row
    return out, kept.clone(memory_format=torch.contiguous_format)


def _live(valid: Tensor | None, tokens: int) -> int | None:
    """How many tokens are no padding; None where nobody may ask, since a graph of the device is being captured."""
    if valid is None:
        return tokens
    is_asked = valid.device.type == "cpu" or (valid.device.type == "cuda" and not torch.cuda.is_current_stream_capturing())
    return min(int(valid), tokens) if is_asked else None


def shape_only(state: Tensor | None, decay: Tensor, x: Tensor, keys: Tensor, queries: Tensor, rates: Tensor | None = None,
               strength: Tensor | None = None, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The results without their values, for tensors that have none."""
    batch, tokens, heads, _ = x.shape
    shape, terms = _state_shape(x, keys), keys.shape[3]
    fits = batch == 1 and keys.shape == queries.shape and keys.shape[:2] == x.shape[:2] and heads % keys.shape[2] == 0
    fits = fits and decay.shape in ((1, tokens, heads), (1, tokens, heads, terms)) and (state is None or tuple(state.shape) == shape)
    fits = fits and (rates is None or (decay.dim() == 3 and rates.shape in ((heads, terms), (heads, 1))))
    fits = fits and (strength is None or strength.shape == (1, tokens, heads)) and (valid is None or valid.shape == (1,))
    torch._check(fits, lambda: f"a recurrence of {tuple(x.shape)} with keys {tuple(keys.shape)}: the others do not fit")
    alike = all(one is None or one.dtype is x.dtype for one in (decay, keys, queries, rates, strength))
    torch._check(alike and x.dtype in (torch.float32, torch.float64), lambda: "a recurrence is computed in float32 or float64, all of it")
    return x.new_empty(x.shape), x.new_empty(shape)


def _state_shape(x: Tensor, keys: Tensor) -> tuple[int, int, int, int]:
    return x.shape[0], x.shape[2], x.shape[3], keys.shape[3]
