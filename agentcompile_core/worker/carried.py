"""NaN in the one operand of a case that carries it, in elements that are read; and weights with a few that are large."""

import torch
from torch import Tensor

from ..ir.region import Match, Operand, Role
from ..ir.verdict import Case
from ..plugin.match_kind import WEIGHTS, MatchKind

MOST_ROWS = 8  # of an input that hold a NaN: what depends on the others alone must stay a number
SHARE = 8  # of a vector of weights one in so many elements is changed, of a matrix one in each of so many rows
# Beside sums that stay finite in fp16: the largest input is some 200, of a row with a norm less. Some near each other, so that order tells.
OUTLIERS = (8.0, -50.0, 300.0, 6.0, -8.0, 50.0, -300.0, 7.0, 1.0, -1.0)
MATRIX_OUTLIERS = (8.0, -8.0)
POSITIVE_OUTLIERS = (8.0, 50.0, 1.0)  # of what is around 1: weights of norms, which multiply, and variances
_SALT = 7919  # so that places do not follow from the values: weights that cases share are drawn once


def with_nan(tensor: Tensor, match: Match, kind: MatchKind, operand: Operand, case: Case) -> Tensor:
    """A copy of ``tensor`` with NaN in elements of ``operand`` that are read.

    Weights have one in every row, since it may depend on other inputs which rows are read; a state one at its last position; inputs one
    in each of a few rows. What has an element for each column of a result has one in ``SHARE`` of them and in the last.
    At addresses that promise nothing it is the last of a row: what is read alone, and not as part of a vector.
    """
    made, generator = tensor.clone(memory_format=torch.contiguous_format), _generator(case, tensor.device)
    said = kind.operand(operand.name)
    axis = said.filled_along if said is not None else None
    part = kind.part_read(match, operand)
    if axis is not None:
        if not 0 < case.position <= made.shape[axis]:
            return made
        view = made.select(axis, case.position - 1)
    else:
        view = made.view(-1) if part is None else made.view(-1).as_strided(part[1], part[2], part[0])
        view = view.view(operand.spec.shape) if part is None else view
    if not view.numel():
        return made
    view = view.reshape(1) if view.dim() == 0 else view
    last, rows = view.shape[-1], view.numel() // view.shape[-1]
    if rows == 1 and axis is None and _by_column(match, operand, last):
        columns = torch.randperm(last, generator=generator, device=tensor.device)[: max(1, last // SHARE)]
        columns = torch.cat((columns, columns.new_tensor([last - 1])))
        chosen = torch.zeros_like(columns)
    else:
        most = rows if operand.role in WEIGHTS else 1 if axis is not None else max(1, min(rows // 2, MOST_ROWS))
        chosen = torch.randperm(rows, generator=generator, device=tensor.device)[:most]
        columns = torch.randint(0, last, (most,), generator=generator, device=tensor.device)
        columns = torch.full_like(columns, last - 1) if case.misaligned else columns
    steps = zip((*_digits(chosen, view.shape[:-1]), columns), view.stride(), strict=True)  # where strides are 0, places lie upon each other
    made.view(-1)[view.storage_offset() + sum(digit * step for digit, step in steps)] = float("nan")
    return made


def _by_column(match: Match, operand: Operand, columns: int) -> bool:
    """Whether a single row is most likely added to a result or multiplied with it: only the main operand is summed up as a rule."""
    results = (each.spec.shape[-1:] for each in match.operands if each.role is Role.OUTPUT)
    return (columns,) in results and operand.name != match.operands[0].name


def with_outliers(tensor: Tensor, mean: float, generator: torch.Generator) -> Tensor:
    """``tensor``, weights of that mean, with a few large ones: of a vector one in ``SHARE`` of its elements, of a matrix one in each of
    as many of its rows."""
    if not tensor.numel() or not tensor.dim():
        return tensor
    last, rows = tensor.shape[-1], tensor.numel() // tensor.shape[-1]
    several = last if rows == 1 else rows
    chosen = torch.randperm(several, generator=generator, device=tensor.device)[: -(-several // SHARE)]
    columns = chosen if rows == 1 else torch.randint(0, last, chosen.shape, generator=generator, device=tensor.device)
    sizes = POSITIVE_OUTLIERS if mean else OUTLIERS if rows == 1 else MATRIX_OUTLIERS
    values = tensor.new_tensor(sizes).repeat(-(-len(chosen) // len(sizes)))[: len(chosen)]
    tensor.view(rows, last)[chosen * 0 if rows == 1 else chosen, columns] = values
    return tensor


def _generator(case: Case, device: torch.device) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(case.seed * 1009 + _SALT)
    return generator


def _digits(numbers: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """The index along each axis of ``shape`` of elements by number."""
    found: list[Tensor] = []
    for extent in reversed(shape):
        found.insert(0, numbers % extent)
        numbers = numbers // extent
    return tuple(found)
