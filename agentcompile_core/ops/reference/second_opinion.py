"""A second opinion on the reference: the framework's own operators in float64 on the same nodes and inputs.

The rules of the reference are ours, and a rule that reads an operator wrongly may agree with a kernel that reads it wrongly
too. The framework runs the original overloads with the original arguments, so the two share nothing but the graph.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import AgentCompileError
from ...ir.graph import Graph
from ..interpreter import compile_nodes
from ..operator_names import ATTENTION
from ..schema import argument
from .bounded import Bounded
from .comparison import chosen_well, same

HOST = "cpu"
RELATIVE = 1e-9  # of the element and of the largest one: far above float64's roundoff, far below every budget
OF_BUDGET = 1e-4  # a sum that cancels may differ by this share of its budget, which grows with the magnitudes summed


class Disagreement(AgentCompileError):
    """The reference and the framework give different answers for one match: what is judged by it proves nothing."""

    def __init__(self, subject: str, seen: str) -> None:
        super().__init__(f"the reference and the framework disagree on {subject}: {seen}; it stays on the framework")


def in_float64(graph: Graph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs and final states of ``graph``, by value name, computed by the framework in float64.

    ``values`` are not changed. Integers stay integers.
    """
    device = next((tensor.device for tensor in values.values()), torch.device("cpu"))
    env = dict(values)
    for name in {name for node in graph.nodes for name in node.mutates if name in env}:
        env[name] = env[name].to(torch.float64, copy=True) if env[name].is_floating_point() else env[name].clone()
    rest = _hide_unattended(graph, env)
    found = compile_nodes(graph, device=device, dtype_override=torch.float64).run(env)
    for name, hidden in rest.items():
        for where, held in hidden:
            found[name][:, where] = held
    return found


def _hide_unattended(graph: Graph, env: dict[str, Tensor]) -> dict[str, tuple[tuple[slice, Tensor], ...]]:
    """Zero what lies outside the positions that attention may look at; (positions, what was there) by cache.

    Where the live length is on the device, the framework multiplies the whole capacity with probabilities of zero, and zero
    times NaN is NaN.
    """
    rest: dict[str, tuple[tuple[slice, Tensor], ...]] = {}
    for node in graph.nodes:
        position = argument(node, "position") if node.op == ATTENTION else None
        if position is None or position.value not in env:  # type: ignore[union-attr]
            continue
        at = int(env[position.value])  # type: ignore[union-attr]
        window, chunk = argument(node, "window"), argument(node, "chunk")
        outside = [slice(at + graph.spec(node.inputs[0]).shape[2], None)]
        if isinstance(window, int) and 0 < window <= at:  # the first row attends to itself and window - 1 positions before it
            outside.append(slice(0, at - window + 1))
        if isinstance(chunk, int) and 0 < chunk <= at:
            outside.append(slice(0, at - at % chunk))
        for name in node.mutates:
            rest[name] = tuple((where, env[name][:, where].clone()) for where in outside)
            for where in outside:
                env[name][:, where] = 0
    return rest


def disagreement(graph: Graph, values: Mapping[str, Tensor], expected: Mapping[str, Bounded]) -> str:
    """Where the framework in float64 differs from the reference ``expected`` of the same graph and values; empty: nowhere.

    A device's libraries may treat infinities in ways of their own, so where they differ the processor's operators are asked.
    """
    seen = _differing(graph, values, expected)
    if not seen or all(tensor.device.type == HOST for tensor in values.values()):
        return seen
    return _differing(graph, {name: tensor.to(HOST) for name, tensor in values.items()},
                      {name: _moved(bound, HOST) for name, bound in expected.items()})


def _differing(graph: Graph, values: Mapping[str, Tensor], expected: Mapping[str, Bounded]) -> str:
    found = in_float64(graph, values)
    for name, bound in expected.items():
        seen = _difference(bound, found[name])
        if seen:
            return f"{name}: {seen}"
    return ""


def _difference(bound: Bounded, other: Tensor) -> str:
    value, other = bound.value.reshape(-1), other.reshape(-1)
    if value.numel() != other.numel():
        return f"{value.numel()} elements against {other.numel()}"
    if value.is_floating_point() != other.is_floating_point():
        return f"{value.dtype} against {other.dtype}"
    wrong = _wrong(bound, value, other)
    if wrong.numel() == 0:
        return ""
    worst = int(wrong[0])
    return f"element {worst} is {value[worst].item():.12g} in the reference and {other[worst].item():.12g} in the framework"


def _wrong(bound: Bounded, value: Tensor, other: Tensor) -> Tensor:
    """Indices of the elements that the two cannot both be right about."""
    if not value.is_floating_point():
        wrong = value != other
        if bound.choices is not None:  # sums that are equal but for float64's roundoff may tie
            wrong &= ~chosen_well(other, bound.choices)
        return wrong.nonzero().reshape(-1)
    rest = (~same(value, other)).nonzero().reshape(-1)
    if rest.numel() == 0:
        return rest
    largest = value.abs().nan_to_num(nan=0.0, posinf=0.0).max()
    value, other, error = value[rest], other[rest], bound.error.reshape(-1)[rest]
    allowed = RELATIVE * (value.abs().nan_to_num(nan=0.0, posinf=0.0) + largest) + OF_BUDGET * error.nan_to_num(nan=0.0, posinf=0.0)
    unknown = value.isfinite() & ~error.isfinite()  # nothing is demanded of it, so nothing can be wrong with it
    return rest[~(unknown | ((value - other).abs() <= allowed))]


def _moved(bound: Bounded, device: str) -> Bounded:
    choices, rest, before = (None if tensor is None else tensor.to(device) for tensor in (bound.choices, bound.rest, bound.before))
    return Bounded(bound.value.to(device), bound.error.to(device), choices, bound.read_from, rest, before)
