"""Recurrences over the tokens of a prompt, seen during capture: ``agentcompile.recurrence`` in place of what a model writes out.

transformers calls scans and delta rules by the names under which packages and hubs publish kernels of them, each with its own body for
who has none. A trace of ours puts the operator there, with what is computed token by token around it as it is.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import operators as operators  # registers the operators of namespace agentcompile
from .attention import active_recorder
from .libraries import is_library_function

Arguments = Mapping[str, Any]


@contextmanager
def semantic_recurrences(model: nn.Module) -> Iterator[None]:
    """During the block, functions with a kernel's name that the code of ``model`` calls are ours, where one of ours is known by it."""
    modules = [sys.modules[name] for name in dict.fromkeys(type(part).__module__ for part in model.modules()) if name in sys.modules]
    found = [(module, name, value) for module in modules for name, value in vars(module).items() if kernel_name(value) in _OURS]
    try:
        for module, name, value in found:
            setattr(module, name, _either(_OURS[kernel_name(value)], value))
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)


def kernel_name(value: Any) -> str:
    """The name under which kernels of transformers' function ``value`` are published; empty where it has none."""
    if not isinstance(value, FunctionType) or not is_library_function(value) or "func_name" not in value.__code__.co_freevars:
        return ""
    name = inspect.getclosurevars(value).nonlocals.get("func_name")
    return name if isinstance(name, str) else ""


def _either(ours: "Callable[[Arguments], Any]", theirs: FunctionType) -> Callable[..., Any]:
    """``ours`` for more than one token of one request, where it understands what it is given; else ``theirs``."""
    signature = inspect.signature(theirs)

    def run(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        bound.apply_defaults()
        found = ours(bound.arguments)
        return theirs(*args, **keywords) if found is None else found

    return run


def _selective_scan(given: Arguments) -> Any:
    """``selective_scan_fn`` (Mamba): hidden_states and dt [1, D, T], A [D, N], B and C [1, N, T]. It begins with zeros: ``continued.py``."""
    x, dt, b, c = (given[name] for name in ("hidden_states", "dt", "B", "C"))
    if x.dim() != 3 or x.shape[2] == 1 or x.shape[0] != 1 or b.dim() != 3 or given.get("use_mambapy"):
        return None
    dt = dt if given["delta_bias"] is None else dt + given["delta_bias"].to(dt.dtype)[..., None]
    dt = (F.softplus(dt) if given["delta_softplus"] else dt).float().transpose(1, 2)
    keys, queries = (one.float().transpose(1, 2).unsqueeze(2) for one in (b, c))
    rows, state = _recurrence(None, dt, (dt * x.float().transpose(1, 2)).unsqueeze(-1), keys, queries, given["A"].float())
    out = rows.squeeze(-1).transpose(1, 2).to(x.dtype)
    out = out if given["D"] is None else out + x * given["D"][None, :, None]
    out = out if given["z"] is None else out * F.silu(given["z"])
    return (out, state.squeeze(2)) if given["return_last_state"] else out


def _chunk_scan(given: Arguments) -> Any:
    """``mamba_chunk_scan_combined`` (Mamba-2): hidden_states [1, T, H, P], dt [1, T, H], A and D [H], B and C [1, T, G, N]."""
    x, dt, state = given["hidden_states"], given["dt"], given["initial_states"]
    if x.dim() != 4 or x.shape[1] == 1 or x.shape[0] != 1 or given["A"].dim() != 1:
        return None
    dt = dt if given["dt_bias"] is None else dt + given["dt_bias"].to(dt.dtype)
    dt = torch.clamp(F.softplus(dt) if given["dt_softplus"] else dt, min=given["dt_limit"][0], max=given["dt_limit"][1]).float()
    wide = x.float()
    rows, last = _recurrence(state, dt, wide * dt[..., None], given["B"].float(), given["C"].float(), given["A"].float()[:, None])
    rows = rows if given["D"] is None else rows + given["D"][..., None] * wide
    return (rows, last) if given["return_final_states"] else rows


def _delta_rule(given: Arguments) -> Any:
    """``chunk_gated_delta_rule`` and ``chunk_kda``: query and key [1, T, G, K], value [1, T, H, V], g [1, T, H] or of every term
    [1, T, H, K], beta [1, T, H]; the state is [1, H, K, V]."""
    query, key, value, state = given["query"], given["key"], given["value"], given["initial_state"]
    if query.dim() != 4 or query.shape[1] == 1 or query.shape[0] != 1:
        return None
    queries, keys = (one.float() for one in (query, key))
    if given["use_qk_l2norm_in_kernel"]:
        queries, keys = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + _TINY) for one in (queries, keys))
    queries = queries * query.shape[-1] ** -0.5
    state = None if state is None else state.transpose(-1, -2)
    rows, last = _recurrence(state, given["g"].float(), value.float(), keys, queries, strength=given["beta"].float())
    return rows.to(query.dtype), last.transpose(-1, -2) if given["output_final_state"] else None


def _recurrence(state: Tensor | None, *rest: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    recorder = active_recorder()
    state = None if state is None else state.float()
    valid = None if recorder is None else recorder.valid
    found: tuple[Tensor, Tensor] = torch.ops.agentcompile.recurrence.default(state, *rest, **keywords, valid=valid)
    return found


_TINY = 1e-6  # what transformers adds to the squares of queries and keys
_OURS: dict[str, Callable[[Arguments], Any]] = {
    "selective_scan_fn": _selective_scan, "mamba_chunk_scan_combined": _chunk_scan, "chunk_gated_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule,
}
