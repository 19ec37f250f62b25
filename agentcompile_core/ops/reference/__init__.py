"""The oracle: a graph in float64 with, for every element, the largest error that a correct kernel may have.

Budget of one element of a dot product: ``1.001 u_out |ref| + tiny + 2 sqrt(d) u_acc (|A||B|)``, d the declared
reduction depth. A graph composes it node by node: what a node's operands may be off by is propagated, and every value
that the framework stores adds the rounding of its element type. A kernel that keeps an intermediate in float32 errs
less; the framework itself always passes (tested).
"""

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from ...errors import AgentCompileError
from ...ir.graph import Graph, Node
from ..dtypes import torch_dtype
from .bounded import Bounded, exact, rounded
from .calls import resolved
from .rules import apply

__all__ = ["Bounded", "Comparison", "compare", "exact", "oracle", "torch_dtype"]


def oracle(graph: Graph, values: Mapping[str, Tensor], depth: int = 0) -> dict[str, Bounded]:
    """Run ``graph`` in float64 on the device of ``values``, with error budgets.

    Args:
        graph: nodes that have rules (``rules``); its inputs, weights, constants and states must be in ``values``.
        values: tensors by value name in their own dtypes; they are not changed.
        depth: reduction depth of the kernel on trial; 0 charges the full length of each reduction (the framework).

    Returns:
        Every output of the graph, and every state in its final condition, by value name.

    Raises:
        AgentCompileError: an operator has no rule, or a value is missing.
    """
    missing = [v.name for v in graph.values if v.name not in values and v.name not in graph.producer]
    if missing:
        raise AgentCompileError(f"the reference of graph {graph.name} needs values for {', '.join(missing)}")
    env = {name: exact(tensor) for name, tensor in values.items()}
    with torch.no_grad():
        for node in graph.nodes:
            _run(graph, node, env, depth)
    touched = {name for node in graph.nodes for name in node.mutates}
    return {name: env[name] for name in dict.fromkeys((*graph.outputs, *sorted(touched)))}


def _run(graph: Graph, node: Node, env: dict[str, Bounded], depth: int) -> None:
    results = apply(resolved(graph, node, depth, env))
    for name, result in zip(node.outputs, results, strict=True):
        spec = graph.spec(name)
        done = rounded(result.value, result.error, spec.dtype)
        if tuple(done.value.shape) != spec.shape:
            raise AgentCompileError(f"the reference of {node.op} made {tuple(done.value.shape)} for {name}, which is {spec.shape}")
        env[name] = Bounded(done.value, done.error, result.choices)


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

    NaN is right only where the reference is NaN; an infinity where the reference or its budget leaves the dtype's range.
    """
    value, error = expected.value.reshape(-1), expected.error.reshape(-1)
    flat = actual.reshape(-1)
    if flat.numel() != value.numel():
        return Comparison(ok=False, max_abs=float("inf"), max_rel=float("inf"), budget_use=float("inf"), detail="wrong number of elements")
    if not flat.is_floating_point():
        return _compare_indices(flat, value, expected.choices)
    limit = torch.finfo(flat.dtype).max
    out = flat.double()
    may_overflow = value.abs() + error >= limit
    off = (out - value).abs()
    off = torch.where((out == value) | (out.isnan() & value.isnan()) | (may_overflow & out.isinf()), 0.0, off)
    off = torch.where(out.isnan() != value.isnan(), torch.inf, off).nan_to_num(nan=torch.inf, posinf=torch.inf)
    use = torch.where(off == 0, 0.0, off / error.nan_to_num(nan=0.0))
    if use.numel() == 0:
        return Comparison(ok=True, max_abs=0.0, max_rel=0.0, budget_use=0.0)
    worst = int(use.argmax())
    wrong = int((use > 1.0).sum())
    seen = float(use[worst])
    scale = float(value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max())
    detail = ""
    if wrong:
        detail = f"{wrong} of {use.numel()} elements beyond the budget; element {worst} is {float(out[worst]):.6g}, "
        detail += f"reference {float(value[worst]):.6g} +- {float(error[worst]):.3g}"
    biggest = float(off.max())
    return Comparison(ok=not wrong, max_abs=biggest, max_rel=biggest / scale if scale else 0.0, budget_use=seen, wrong=wrong,
                      worst=worst, detail=detail)


def _compare_indices(flat: Tensor, value: Tensor, choices: Tensor | None) -> Comparison:
    good = flat == value
    if choices is not None:
        inside = (flat >= 0) & (flat < choices.numel())
        good = good | (inside & choices[flat.clamp(0, choices.numel() - 1)])
    wrong = int((~good).sum())
    if not wrong:
        return Comparison(ok=True, max_abs=0.0, max_rel=0.0, budget_use=0.0)
    worst = int((~good).long().argmax())
    off = float((flat - value).abs().max())
    detail = f"{wrong} of {flat.numel()} integers differ; element {worst} is {int(flat[worst])}, reference {int(value[worst])}"
    return Comparison(ok=False, max_abs=off, max_rel=off, budget_use=float("inf"), wrong=wrong, worst=worst, detail=detail)
