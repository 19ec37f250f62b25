"""The linear layers of a mixture of experts in plain torch: each row of the input times the matrices of the experts chosen for it.

Nothing here tells the host on an accelerator which experts were chosen, so that every call can be captured there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 512  # that every expert is multiplied with at a time: what that gives lies in memory

SCHEMA = "(Tensor x, Tensor weight, Tensor experts, Tensor? bias=None, bool transposed=False) -> Tensor"


def expert_linear(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None, transposed: bool = False) -> Tensor:
    """``out[t, s] = W(e) x[t, s] + bias[e]`` with e = ``experts[t, s]``.

    Shapes: ``x`` [T, S, k], or [T, 1, k] where all S chosen experts read the same row; ``weight`` [E, n, k], or [E, k, n] where it is
    ``transposed``; ``experts`` i64 [T, S], those of one row all different; ``bias`` [E, n]; the result [T, S, n], contiguous.
    """
    matrices = weight.transpose(1, 2) if transposed else weight
    if x.device.type == "cpu":
        return _one_by_one(x, matrices, experts, bias)
    if 2 * experts.numel() <= weight.shape[0]:
        out = _gathered(x, matrices, experts)
    else:
        parts = zip(x.split(MOST_ROWS), experts.split(MOST_ROWS), strict=True)
        out = torch.cat([_all_experts(rows, matrices, chosen) for rows, chosen in parts])
    return out if bias is None else out + bias[experts]


def _one_by_one(x: Tensor, matrices: Tensor, experts: Tensor, bias: Tensor | None) -> Tensor:
    """Each chosen expert once, with all rows that chose it: nothing of the others is read."""
    rows = x.expand(*experts.shape, x.shape[-1])
    out = x.new_empty(*experts.shape, matrices.shape[1])
    for expert in sorted(set(experts.flatten().tolist())):
        chosen = experts == expert
        out[chosen] = F.linear(rows[chosen], matrices[expert], None if bias is None else bias[expert])
    return out


def _gathered(x: Tensor, matrices: Tensor, experts: Tensor) -> Tensor:
    """A copy of the chosen matrices, and one product for each."""
    chosen = matrices[experts.flatten()]
    rows = x.expand(*experts.shape, x.shape[-1]).reshape(-1, x.shape[-1], 1)
    return torch.bmm(chosen, rows).reshape(*experts.shape, matrices.shape[1])


def _all_experts(x: Tensor, matrices: Tensor, experts: Tensor) -> Tensor:
    """Every expert over every row, with zeros where it was not chosen: for many rows, which choose nearly all experts anyway."""
    count, slots = experts.shape
    token = torch.arange(count, device=x.device).unsqueeze(1).expand(count, slots)
    if x.shape[1] == 1:
        return torch.matmul(x[:, 0], matrices.transpose(1, 2))[experts, token]
    dealt = x.new_zeros(matrices.shape[0], count, x.shape[-1])
    dealt[experts, token] = x
    return torch.bmm(dealt, matrices.transpose(1, 2))[experts, token]


def shape_only(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None, transposed: bool = False) -> Tensor:
    """The result without its values, for tensors that have none."""
    columns, inner = (weight.shape[2], weight.shape[1]) if transposed else (weight.shape[1], weight.shape[2])
    torch._check(x.dim() == 3 and x.shape[2] == inner and x.shape[0] == experts.shape[0] and x.shape[1] in (1, experts.shape[1]),
                 lambda: f"rows {tuple(x.shape)} do not fit experts {tuple(experts.shape)} with matrices {tuple(weight.shape)}")
    torch._check(bias is None or tuple(bias.shape) == (weight.shape[0], columns), lambda: "the bias does not fit the matrices")
    torch._check(x.dtype is weight.dtype and not experts.is_floating_point(), lambda: f"rows are {x.dtype} beside {weight.dtype}")
    return x.new_empty(*experts.shape, columns)
