"""The error rule of the linear layers of a mixture of experts: each row is one linear layer of the expert chosen for it; where more than
one may have been chosen, nothing is known of the row."""

import torch

from ...errors import AgentCompileError
from .bounded import Bounded
from .calls import Call
from .reductions import linear


def expert_linear(call: Call) -> tuple[Bounded, ...]:
    """Row by row, so that each keeps the bound of a single row; only the chosen matrices are looked at."""
    x, weight, experts, bias = call.bounded("x"), call.bounded("weight"), call.bounded("experts").value, call["bias"]
    if not weight.is_exact:
        raise AgentCompileError(f"the reference has no error rule for {call.node.op} with computed weights; they stay on the framework")
    rows = [_row(call, x, weight, bias, (token, slot)) for token in range(experts.shape[0]) for slot in range(experts.shape[1])]
    shape = (*experts.shape, rows[0].value.shape[-1])
    return (Bounded(torch.stack([row.value for row in rows]).reshape(shape), torch.stack([row.error for row in rows]).reshape(shape)),)


def _row(call: Call, x: Bounded, weight: Bounded, bias: Bounded | None, place: tuple[int, int]) -> Bounded:
    """The row of a slot; of one whose expert is in doubt, nothing is known: errors as large as from one expert to another are none that
    rules of further operators, which take them for small and independent, could carry on."""
    token, slot = place
    chosen = call.bounded("experts")
    expert = int(chosen.value[place])
    given = (token, slot if x.value.shape[1] > 1 else 0)
    matrix = weight.value[expert].t() if call["transposed"] else weight.value[expert]
    added = None if bias is None else Bounded(bias.value[expert], bias.error[expert])
    row = linear(Bounded(x.value[given], x.error[given]), matrix, added, call.length(matrix.shape[-1]), weight.read_from)
    in_doubt = chosen.choices is not None and int(chosen.choices.reshape(*chosen.value.shape, -1)[place].sum()) > 1
    return Bounded(row.value, torch.full_like(row.error, torch.inf)) if in_doubt else row
