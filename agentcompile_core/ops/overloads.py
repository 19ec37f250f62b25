"""Operators by their names in graphs, and what torch says of them.

They are looked up once, only in ``torch.ops`` aten, prims and agentcompile, and only those of the closed list in ``allowed``,
so a stored Graph cannot name anything else.
"""

from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from .allowed import refusal

NAMESPACES = ("aten", "prims", "agentcompile")
_operators: dict[str, Callable[..., Any]] = {}


def operator_of(op: str) -> Callable[..., Any]:
    """The operator overload called ``op``, such as ``aten.linear.default``.

    Raises:
        UsageError: it is not an operator of aten, prims or agentcompile, or none that a graph may call.
    """
    found = _operators.get(op)
    if found is None:
        found = _operators[op] = _resolve(op)
    return found


def _resolve(op: str) -> Callable[..., Any]:
    import torch

    from . import operators as operators  # importing it registers the operators of namespace agentcompile

    namespace, _, rest = op.partition(".")
    packet, _, overload = rest.partition(".")
    if namespace not in NAMESPACES:
        raise UsageError(f"operator {op!r} is outside {', '.join(NAMESPACES)}; the graph was not written by this version")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, torch._ops.OpOverload):
        raise UsageError(f"operator {op!r} is unknown to torch {torch.__version__}; recompile with this version")
    why = refusal(found)
    if why:
        raise UsageError(f"operator {op!r} {why}; a graph may only compute on its own tensors")
    return found


def is_pointwise(op: str) -> bool:
    """Whether an operator computes every element by itself, by torch's own word; changing the type is that too."""
    import torch

    return torch.Tag.pointwise in operator_of(op).tags or op in ("aten._to_copy.default", "aten.to.dtype")  # type: ignore[attr-defined]
