"""Error rule of cross entropies by class: the log-softmax of each row at its class, and a sum or a mean of them."""

import torch

from ...errors import AgentCompileError
from ...ir.graph import DType
from . import pointwise
from .bounded import STORED, TINY, UNIT_ROUNDOFF, Bounded
from .calls import Call
from .reductions import log_softmax

NONE, MEAN = 0, 1


def cross_entropy(call: Call) -> tuple[Bounded, ...]:
    """Rows of the ignored class are 0 and are not counted. In half precision the framework stores the log-softmax.

    On processors torch adds the rows up in half precision as well there, and is outside.
    """
    x, classes = call.bounded("self"), call.bounded("target").value
    if call["weight"] is not None or call["label_smoothing"] or classes.is_floating_point() or x.value.dim() > 2:
        raise AgentCompileError(f"the reference has no error rule for {call.node.op} with weights, smoothing, probabilities or more axes;"
                                " it stays on the framework")
    rows = Bounded(x.value.double().reshape(classes.numel(), -1), x.error.reshape(classes.numel(), -1))
    flat, ignored = classes.reshape(-1), classes.reshape(-1) == call["ignore_index"]
    logarithms = log_softmax(rows, 1, call.length(rows.value.shape[1]), call.dtype)
    at = torch.where(ignored, 0, flat)[:, None]
    value, error = (torch.where(ignored, 0.0, each.gather(1, at)[:, 0]) for each in (-logarithms.value, logarithms.error))
    if call.dtype in (DType.F16, DType.BF16):
        error = error + torch.where(ignored, 0.0, STORED * UNIT_ROUNDOFF[call.dtype] * value.abs() + TINY[call.dtype])
    if call["reduction"] == NONE:
        return (Bounded(value.reshape(classes.shape), error.reshape(classes.shape)),)
    total = pointwise.mean(Bounded(value, error), [0], False, call.length(len(value)), divide=False)
    if call["reduction"] != MEAN:
        return (total,)
    count = float((~ignored).sum())
    divided = total.value / count
    return (Bounded(divided, total.error / count + 2.0 * 2.0**-24 * divided.abs()),)
