"""How a result compares with its reference, element by element, whatever is finite or not."""

import torch
from attrs import frozen
from torch import Tensor

from ..bits import same_bits
from .bounded import Bounded, overflow_limit


@frozen(kw_only=True)
class Comparison:
    """How a result compares with its reference. ``worst`` is the flat index of the element that uses most of its budget."""

    ok: bool
    max_abs: float
    max_rel: float
    budget_use: float  # largest error over budget; more than 1 fails
    wrong: int = 0  # number of elements beyond their budget
    worst: int = -1
    detail: str = ""


def compare(actual: Tensor, expected: Bounded) -> Comparison:
    """Compare ``actual`` (any shape with as many elements, on the device of ``expected``) element by element.

    Where the reference is NaN, only NaN is right; where it is an infinity, only that infinity. Where it is finite, what
    lies within its error is right, and the infinity of the side on which its error leaves the dtype's range. Where it is
    finite and its error is not, anything is.
    """
    value, error = expected.value.reshape(-1), expected.error.reshape(-1)
    flat = actual.reshape(-1)
    first = 0 if expected.before is None else expected.before.numel()
    end = first + value.numel()
    if flat.numel() != end + (0 if expected.rest is None else expected.rest.numel()):
        return _failed("wrong number of elements")
    if expected.before is not None and not same_bits(flat[:first], expected.before):
        return _failed(f"elements below {first} may not be written, and some were")
    if expected.rest is not None and not same_bits(flat[end:], expected.rest):
        return _failed(f"elements from {end} on may not be written, and some were")
    flat = flat[first:end]
    if not flat.is_floating_point():
        return _compare_indices(flat, value, expected.choices)
    if flat.numel() == 0:
        return Comparison(ok=True, max_abs=0.0, max_rel=0.0, budget_use=0.0)
    out = flat.double()
    rest = (~same(out, value)).nonzero().reshape(-1)  # few: most of a large result is a cache that was not written
    if rest.numel() == 0:
        return Comparison(ok=True, max_abs=0.0, max_rel=0.0, budget_use=0.0, worst=0)
    return _compare_unequal(rest, out[rest], value, error[rest], overflow_limit(flat.dtype), first)


def _compare_unequal(rest: Tensor, out: Tensor, whole: Tensor, error: Tensor, limit: float, first: int) -> Comparison:
    """What compare says of the elements ``rest`` of the reference ``whole``, which begins at element ``first``; the others are equal."""
    value = whole[rest]
    off = torch.where(_is_right(out, value, error, limit), 0.0, (out - value).abs())
    off = off.nan_to_num(nan=torch.inf, posinf=torch.inf)
    use = torch.where(off == 0, 0.0, off / error.nan_to_num(nan=0.0, posinf=0.0))
    at = use.argmax()
    scale = whole.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()
    facts = (use[at], off.max(), scale, (use > 1.0).sum(), rest[at])
    seen, biggest, largest, wrong, worst = torch.stack([fact.double() for fact in facts]).tolist()  # the device is waited for once
    worst += first
    detail = ""
    if wrong:
        detail = f"{int(wrong)} of {whole.numel()} elements beyond the budget; element {int(worst)} is {float(out[at]):.6g}, "
        detail += f"reference {float(value[at]):.6g} +- {float(error[at].nan_to_num(nan=0.0)):.3g}"
    return Comparison(ok=not wrong, max_abs=biggest, max_rel=biggest / largest if largest else 0.0, budget_use=seen, wrong=int(wrong),
                      worst=int(worst), detail=detail)


def _failed(why: str) -> Comparison:
    return Comparison(ok=False, max_abs=float("inf"), max_rel=float("inf"), budget_use=float("inf"), detail=why)


def same(out: Tensor, value: Tensor) -> Tensor:
    """Where two results are the same number, or both none."""
    return (out == value) | ((out != out) & (value != value))


def _is_right(out: Tensor, value: Tensor, error: Tensor, limit: float) -> Tensor:
    """Where ``out``, which is not the same, is right without a look at how far it is off: overflow to the right side, or unknown."""
    unknown = value.isfinite() & ~error.isfinite()
    up = (out == torch.inf) & (value + error >= limit)
    down = (out == -torch.inf) & (value - error <= -limit)
    return unknown | ((up | down) & value.isfinite())


def _compare_indices(flat: Tensor, value: Tensor, choices: Tensor | None) -> Comparison:
    good = (flat == value) | chosen_well(flat, choices)
    if choices is not None and choices.dim() == 2:
        good &= _different(flat)
    wrong = int((~good).sum())
    if not wrong:
        return Comparison(ok=True, max_abs=0.0, max_rel=0.0, budget_use=0.0)
    worst = int((~good).long().argmax())
    off = float((flat - value).abs().max())
    detail = f"{wrong} of {flat.numel()} integers differ; element {worst} is {int(flat[worst])}, reference {int(value[worst])}"
    return Comparison(ok=False, max_abs=off, max_rel=off, budget_use=float("inf"), wrong=wrong, worst=worst, detail=detail)


def chosen_well(flat: Tensor, choices: Tensor | None) -> Tensor:
    """Which of the indices ``flat`` are among their choices: those of all [n], or of each [indices, n]."""
    if choices is None:
        return torch.zeros_like(flat, dtype=torch.bool)
    count = choices.shape[-1]
    allowed = choices.reshape(-1, count).expand(flat.numel(), count)
    return (flat >= 0) & (flat < count) & allowed.gather(1, flat.clamp(0, count - 1).long()[:, None])[:, 0]


def _different(flat: Tensor) -> Tensor:
    """Which indices are no repetition of one before them."""
    return ~(flat[:, None] == flat[None, :]).tril(-1).any(1)
