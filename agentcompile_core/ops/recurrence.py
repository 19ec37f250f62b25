"""Linear recurrences over the tokens of a prompt in plain torch: selective scans (Mamba, Mamba-2) and gated delta rules, in one operator.

Every token decays a state, adds an outer product to it and reads it. Sources: Gu and Dao 2023 (arXiv 2312.00752) and Dao and Gu 2024
(2405.21060) for scans; Yang, Kautz and Hatamizadeh 2024 (2412.06464) for the gated delta rule.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

SCHEMA = (
    "(Tensor? state, Tensor decay, Tensor x, Tensor keys, Tensor queries, Tensor? rates=None, Tensor? strength=None,"
    " Tensor? valid=None, Tensor? skip=None, bool scaled=False) -> (Tensor, Tensor)"
)

_is_asked = ContextVar("_is_asked", default=False)


@contextmanager
def padding_skipped() -> Iterator[None]:
    """A block in which a recurrence asks the device how many rows are no padding, and leaves out the others: nothing is captured there."""
    token = _is_asked.set(True)
    try:
        yield
    finally:
        _is_asked.reset(token)


@frozen
class RecurrenceCall:
    """The arguments of ``agentcompile::recurrence``, in the order and by the names of its schema."""

    state: Tensor | None
    decay: Tensor
    x: Tensor
    keys: Tensor
    queries: Tensor
    rates: Tensor | None = None
    strength: Tensor | None = None
    valid: Tensor | None = None
    skip: Tensor | None = None
    scaled: bool = False

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[1, H, P, N]."""
        return self.x.shape[0], self.x.shape[2], self.x.shape[3], self.keys.shape[3]

    def new_state(self) -> Tensor:
        """Room for the last state, which lies as the first one does, or contiguous."""
        if self.state is None:
            return self.decay.new_empty(self.state_shape)
        return torch.empty_like(self.state, dtype=self.decay.dtype)

    @property
    def wide(self) -> tuple[Tensor, ...]:
        """All operands of the type that it computes in."""
        found = (self.decay, self.keys, self.queries, self.state, self.rates, self.strength, self.skip)
        return tuple(one for one in found if one is not None)


def recurrence(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    """For each token t and head h: ``S = exp(decay_t rates) S``; ``S += w_t keys_t^T``; ``y_t = S queries_t + skip x_t``.

    ``w_t`` is ``x_t``, or with ``strength`` (delta rule) ``strength_t (x_t - S keys_t)`` of the decayed S; where it is ``scaled``, x_t
    times decay_t stands for x_t there (the step of a scan). All in float32, or float64. Arguments: RecurrenceCall.

    Shapes: ``state`` [1, H, P, N], any strides, None: zeros; ``decay`` [1, T, H], or [1, T, H, N] of every term; ``x`` [1, T, H, P], of
    any float type; ``keys`` and ``queries`` [1, T, G, N], of which H / G neighbouring heads share one; ``rates`` [H, N] or [H, 1];
    ``strength`` [1, T, H]; ``valid`` i64 [1], tokens that are no padding: those behind leave the state alone and read zeros; ``skip`` [H].
    The results are y [1, T, H, P], contiguous, and the state behind the last token [1, H, P, N], which lies as the first one does.
    """
    call = RecurrenceCall(*arguments, **keywords)
    decay, strength, valid = call.decay, call.strength, call.valid
    x = call.x.to(decay.dtype)
    tokens, shared = x.shape[1], x.shape[2] // call.keys.shape[2]
    kept = x.new_zeros(call.state_shape) if call.state is None else call.state
    keys, queries = (one.repeat_interleave(shared, dim=2) for one in (call.keys, call.queries))
    steps = decay if decay.dim() == 4 else decay.unsqueeze(-1)
    factors = (steps if call.rates is None else steps * call.rates).exp()
    rows = x * steps if call.scaled else x
    out, live = torch.zeros_like(x, memory_format=torch.contiguous_format), _live(valid, tokens)
    for t in range(tokens if live is None else live):
        new, added = factors[:, t].unsqueeze(2) * kept, rows[:, t]
        if strength is not None:
            added = strength[:, t].unsqueeze(-1) * (added - (new @ keys[:, t].unsqueeze(-1)).squeeze(-1))
        new = new + added.unsqueeze(-1) * keys[:, t].unsqueeze(2)
        row = (new @ queries[:, t].unsqueeze(-1)).squeeze(-1)
        if call.skip is not None:
            row = row + call.skip.unsqueeze(-1) * x[:, t]
        if live is None and valid is not None:
            new, row = torch.where(t < valid, new, kept), torch.where(t < valid, row, 0.0)
        kept = new
        out[:, t] = row
    return out, call.new_state().copy_(kept)


def _live(valid: Tensor | None, tokens: int) -> int | None:
    """How many tokens are no padding; None where nobody may ask, since a graph of the device may be captured."""
    if valid is None:
        return tokens
    return max(0, min(int(valid), tokens)) if valid.device.type == "cpu" or _is_asked.get() else None


def shape_only(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    """The results without their values, for tensors that have none."""
    call = RecurrenceCall(*arguments, **keywords)
    x, decay, keys, rates, strength = call.x, call.decay, call.keys, call.rates, call.strength
    batch, tokens, heads, _ = x.shape
    terms = keys.shape[3]
    fits = batch == 1 and keys.shape == call.queries.shape and keys.shape[:2] == x.shape[:2] and heads % keys.shape[2] == 0
    fits = fits and decay.shape in ((1, tokens, heads), (1, tokens, heads, terms))
    fits = fits and (call.state is None or tuple(call.state.shape) == call.state_shape)
    fits = fits and (rates is None or (decay.dim() == 3 and rates.shape in ((heads, terms), (heads, 1))))
    fits = fits and (strength is None or strength.shape == (1, tokens, heads)) and (call.valid is None or call.valid.shape == (1,))
    fits = fits and (call.skip is None or call.skip.shape == (heads,)) and not (call.scaled and decay.dim() == 4)
    torch._check(fits, lambda: f"a recurrence of {tuple(x.shape)} with keys {tuple(keys.shape)}: the others do not fit")
    alike = x.is_floating_point() and decay.dtype in (torch.float32, torch.float64) and all(one.dtype is decay.dtype for one in call.wide)
    torch._check(alike, lambda: "a recurrence is computed in float32 or float64, all but x are of that type")
    return x.new_empty(x.shape, dtype=decay.dtype), call.new_state()
