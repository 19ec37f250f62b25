"""The error rule of the linear layers of a mixture of experts: each row is one linear layer of the expert chosen for it, or of any that may
have been chosen where that is in doubt."""

import torch

from ...errors import AgentCompileError
from .bounded import Bounded
from .calls import Call
from .reductions import linear

MOST_IN_DOUBT = 8  # experts of a slot; of more, nothing is known of the row


def expert_linear(call: Call) -> tuple[Bounded, ...]:
    """Row by row, so that each keeps the bound of a single row; only the matrices that may have been chosen are looked at."""
    x, weight, experts, bias = call.bounded("x"), call.bounded("weight"), call.bounded("experts").value, call["bias"]
    if not weight.is_exact:
        raise AgentCompileError(f"the reference has no error rule for {call.node.op} with computed weights; they stay on the framework")
    rows = [_row(call, x, weight, bias, (token, slot)) for token in range(experts.shape[0]) for slot in range(experts.shape[1])]
    shape = (*experts.shape, rows[0].value.shape[-1])
    return (Bounded(torch.stack([row.value for row in rows]).reshape(shape), torch.stack([row.error for row in rows]).reshape(shape)),)


def _row(call: Call, x: Bounded, weight: Bounded, bias: Bounded | None, place: tuple[int, int]) -> Bounded:
    """The row of a slot; where its expert is in doubt, the errors reach the rows of the others that it may be."""
    chosen = call.bounded("experts")
    expert = int(chosen.value[place])
    row = _row_of(call, x, weight, bias, place, expert)
    if chosen.choices is None:
        return row
    others = [e for e in chosen.choices.reshape(*chosen.value.shape, -1)[place].nonzero().flatten().tolist() if e != expert]
    if len(others) > MOST_IN_DOUBT:
        return Bounded(row.value, torch.full_like(row.error, torch.inf))
    error = row.error
    for other in others:
        away = _row_of(call, x, weight, bias, place, other)
        error = torch.maximum(error, (away.value - row.value).abs() + away.error)
    return Bounded(row.value, error.nan_to_num(nan=torch.inf, posinf=torch.inf) if others else error)


def _row_of(call: Call, x: Bounded, weight: Bounded, bias: Bounded | None, place: tuple[int, int], expert: int) -> Bounded:
    token, slot = place
    given = (token, slot if x.value.shape[1] > 1 else 0)
    matrix = weight.value[expert].t() if call["transposed"] else weight.value[expert]
    added = None if bias is None else Bounded(bias.value[expert], bias.error[expert])
    return linear(Bounded(x.value[given], x.error[given]), matrix, added, call.length(matrix.shape[-1]), weight.read_from)
