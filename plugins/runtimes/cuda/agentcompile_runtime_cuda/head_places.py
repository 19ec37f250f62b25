"""What ``place_heads`` of ``rows.cu`` is given for the queries, keys and values of a prompt chunk, or that it does not serve them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from agentcompile_core.plugin_api import Heads

from .row_vectors import is_aligned, is_weight

if TYPE_CHECKING:
    import torch

    # Element type, tensors in the kernel's order, and the grid and scalars of one launch.
    Placing = tuple[torch.dtype, tuple[torch.Tensor | None, ...], int, tuple[Any, ...]]

THREADS = 256
VECTOR = 8  # elements of 16 bits
WIDEST = 512  # channels of a head: a warp's, two vectors each
MOST = 2**31 - 1
MOST_TOKENS, MANY_THREADS = 4, 1 << 18  # of a thread, where so many threads remain: two rounds of a GPU of 132 SMs, or more
RMS, RMS_ONE_PLUS, RMS_ONCE = 1, 2, 4  # ac::Norm of row.cuh
INTERLEAVED, UNROUNDED = 1, 2  # bits of a rotation's style: neighbours turn with each other; products are not rounded


@frozen(kw_only=True)
class Turn:
    """A rotation as the kernel takes it: tables of ``rotary`` channels, and bits of its style. ``rotary`` 0: none."""

    cos: "torch.Tensor | None" = None
    sin: "torch.Tensor | None" = None
    rotary: int = 0
    style: int = 0


def norm_kind(one_plus: bool, once: bool) -> int:
    """The norm as row.cuh counts them."""
    return RMS_ONE_PLUS if one_plus else RMS_ONCE if once else RMS


def placed(one: Heads) -> "torch.Tensor":
    """By the framework: rows as they are written."""
    import torch

    rows = one.rows
    if one.norm:
        rows = torch.ops.agentcompile.rms_norm.default(rows, *one.norm)
    if not one.turn:
        return rows
    given = rows.float() if one.wide else rows
    return torch.ops.agentcompile.rope.default(given, *one.turn).to(rows.dtype)


def placing(heads: Sequence[Heads]) -> "Placing | None":
    """One launch for all three; None where the kernel does not serve them."""
    first = heads[0].rows
    (_, _, tokens, dim), dtype = first.shape, first.dtype
    if first.element_size() != 2 or not dtype.is_floating_point or dim % (2 * VECTOR) or dim > WIDEST:
        return None
    if not all(_rows_fit(one.rows, dtype, tokens, dim) and _rows_fit(one.out, dtype, None, dim) for one in heads):
        return None
    norm, turn, at = _norm_of(heads), _turn_of(heads, tokens), [one.at for one in heads if one.at is not None]
    lanes = 1 << (dim // (2 * VECTOR) - 1).bit_length()
    threads_each = sum(one.rows.shape[1] for one in heads) * lanes  # of one token
    each = MOST_TOKENS if tokens * threads_each >= MOST_TOKENS * MANY_THREADS else 1
    items = -(-tokens // each) * threads_each
    if norm is None or turn is None or items > MOST - THREADS or any(one.data_ptr() != at[0].data_ptr() for one in at):
        return None
    if heads[0].at is not None or any(one.numel() != 1 or one.element_size() != 8 for one in at):
        return None
    eps, kind = norm
    normed, turned, moved = (sum(bool(has) << i for i, has in enumerate(which)) for which in (
        [one.norm for one in heads], [one.turn for one in heads], [one.at is not None for one in heads]))
    sides = [(one.rows.shape[1], *_strides(one.rows), *_strides(one.out)) for one in heads]
    scalars = (*(side[i] for i in range(5) for side in sides), tokens, min(one.out.shape[2] for one in heads[1:]), each, dim,
               turn.rotary, lanes, normed, turned, moved, turn.style, eps, kind)
    tensors = (*(one.rows for one in heads), *(one.norm[0] if one.norm else None for one in heads), turn.cos, turn.sin,
               at[0] if at else None, *(one.out for one in heads))
    return dtype, tensors, -(-items // THREADS), scalars


def _rows_fit(x: "torch.Tensor", dtype: "torch.dtype", tokens: int | None, dim: int) -> bool:
    """Whether rows [1, H, T, D] lie so that vectors of them can be moved."""
    batch, _, count, width = x.shape
    sizes = batch == 1 and width == dim and (tokens is None or count == tokens) and x.dtype is dtype
    return sizes and x.stride(3) == 1 and is_aligned(x) and all(0 <= s <= MOST and s % VECTOR == 0 for s in _strides(x))


def _strides(x: "torch.Tensor") -> tuple[int, int]:
    """From token to token and from head to head; of an axis of one row any would do."""
    return (x.stride(2) if x.shape[2] > 1 else 0), (x.stride(1) if x.shape[1] > 1 else 0)


def _norm_of(heads: Sequence[Heads]) -> tuple[float, int] | None:
    """The eps and the kind that all norms among them share; None where they differ, or a weight is not as the kernel reads it."""
    found = {(float(eps), norm_kind(one_plus, once)) for _, eps, one_plus, once in (one.norm for one in heads if one.norm)}
    fit = all(is_weight(one.norm[0], one.rows, one.norm[2] or one.norm[3]) for one in heads if one.norm)
    return next(iter(found or {(0.0, RMS)})) if fit and len(found) < 2 else None


def _turn_of(heads: Sequence[Heads], tokens: int) -> Turn | None:
    """The rotation that all that are turned share; None where they differ, or tables are not as the kernel reads them."""
    turned = [one for one in heads if one.turn]
    if not turned:
        return Turn()
    cos, sin, interleaved = turned[0].turn
    first, rotary, style = heads[0].rows, cos.shape[-1], INTERLEAVED * interleaved + UNROUNDED * turned[0].wide
    same = {(one.turn[0].data_ptr(), one.turn[1].data_ptr(), one.turn[2], one.wide) for one in turned}
    fit = all(t.dtype is first.dtype and tuple(t.shape) == (1, tokens, rotary) and t.is_contiguous() and is_aligned(t) for t in (cos, sin))
    whole = rotary % (VECTOR if interleaved else 2 * VECTOR) == 0 and rotary <= first.shape[3]
    return Turn(cos=cos, sin=sin, rotary=rotary, style=style) if len(same) == 1 and fit and whole else None
