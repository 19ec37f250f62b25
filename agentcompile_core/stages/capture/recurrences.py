"""Recurrences over tokens, seen during capture: operators of ours in place of what a model writes out.

transformers calls scans, delta rules and their short convolutions by the names under which packages and hubs publish kernels of them,
each with its own body for who has none. A trace of ours puts an operator there, with what is computed token by token around it as it is.
"""

import inspect
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
from .replaced import modules_of, replaced

Arguments = Mapping[str, Any]


@contextmanager
def semantic_recurrences(model: nn.Module) -> Iterator[None]:
    """During the block, functions with a kernel's name that the code of ``model`` calls are ours, where one of ours is known by it."""
    found = [(module, name, value, kernel_name(value)) for module in modules_of(model) for name, value in vars(module).items()]
    with replaced([(module, name, _either(_OURS[kernel], value)) for module, name, value, kernel in found if kernel in _OURS]):
        yield


def kernel_name(value: Any) -> str:
    """The name under which kernels of transformers' function ``value`` are published; empty where it has none."""
    if not isinstance(value, FunctionType) or not is_library_function(value) or "func_name" not in value.__code__.co_freevars:
        return ""
    name = inspect.getclosurevars(value).nonlocals.get("func_name")
    return name if isinstance(name, str) else ""


def _either(ours: "Callable[[Arguments], Any]", theirs: FunctionType) -> Callable[..., Any]:
    """``ours`` where it understands what it is given; else ``theirs``."""
    signature = inspect.signature(theirs)

    def run(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        bound.apply_defaults()
        try:
            found = ours(bound.arguments)
        except KeyError:  # it has other parameters than those that are known
            found = None
        return theirs(*args, **keywords) if found is None else found

    return run


def _selective_scan(given: Arguments) -> Any:
    """``selective_scan_fn`` (Mamba): hidden_states and dt [1, D, T], A [D, N], B and C [1, N, T].

    It begins with zeros: ``continued.py``.
    """
    x, dt, b, c = (given[name] for name in ("hidden_states", "dt", "B", "C"))
    if x.dim() != 3 or x.shape[2] == 1 or x.shape[0] != 1 or b.dim() != 3 or given.get("use_mambapy"):
        return None
    dt = dt if given["delta_bias"] is None else dt + given["delta_bias"].to(dt.dtype)[..., None]
    dt = (F.softplus(dt) if given["delta_softplus"] else dt).float().transpose(1, 2)
    keys, queries = (one.float().transpose(1, 2).unsqueeze(2) for one in (b, c))
    rows, state = _recurrence(None, dt, x.transpose(1, 2).unsqueeze(-1), keys, queries, given["A"].float(), skip=given["D"], scaled=True)
    out = rows.squeeze(-1).transpose(1, 2)
    out = out.to(x.dtype) if given["D"] is None else out
    out = out if given["z"] is None else out * F.silu(given["z"])
    return (out, state.squeeze(2)) if given["return_last_state"] else out


def _chunk_scan(given: Arguments) -> Any:
    """``mamba_chunk_scan_combined`` (Mamba-2): hidden_states [1, T, H, P], dt [1, T, H], A and D [H], B and C [1, T, G, N]."""
    x, dt, state = given["hidden_states"], given["dt"], given["initial_states"]
    if x.dim() != 4 or x.shape[0] != 1 or given["A"].dim() != 1 or (given["D"] is not None and given["D"].dim() != 1):
        return None
    dt = dt if given["dt_bias"] is None else dt + given["dt_bias"].to(dt.dtype)
    dt = torch.clamp(F.softplus(dt) if given["dt_softplus"] else dt, min=given["dt_limit"][0], max=given["dt_limit"][1]).float()
    found = _recurrence(state, dt, x, given["B"].float(), given["C"].float(), given["A"].float()[:, None], skip=given["D"], scaled=True)
    return found if given["return_final_states"] else found[0]


def _state_update(given: Arguments) -> Any:
    """``selective_state_update``, one token of a scan, whose state it writes in place.

    Mamba: state [1, D, N], hidden_states and dt [1, D], A [D, N], B and C [1, N], D and dt_bias [D]. Mamba-2: state [1, H, P, N],
    hidden_states [1, H, P], B and C [1, G, N], and the others expanded from one number of a head.
    """
    state, x, dt, rates, bias, skip = (given[name] for name in ("state", "hidden_states", "dt", "A", "dt_bias", "D"))
    if x.shape[0] != 1 or x.dim() not in (2, 3):
        return None
    if x.dim() == 3:
        spread = [(dt, 2), (rates, 1), *((one, 1) for one in (bias, skip) if one is not None)]
        if any(stride for one, first in spread for stride in one.stride()[first:]):
            return None
        dt, rates = dt[..., 0], rates[:, 0, :1]
        bias, skip = (None if one is None else one[:, 0] for one in (bias, skip))
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = (F.softplus(dt) if given["dt_softplus"] else dt).float()
    keys, queries = (given[name].float().reshape(1, 1, -1, state.shape[-1]) for name in ("B", "C"))
    rows = x.reshape(1, 1, *(x.shape[1:] if x.dim() == 3 else (x.shape[1], 1)))
    kept = state if x.dim() == 3 else state.unsqueeze(2)
    y, last = _recurrence(kept, dt.unsqueeze(1), rows, keys, queries, rates.float(), skip=skip, scaled=True)
    state.copy_(last.reshape(state.shape))
    out = y.reshape(x.shape)
    out = out if given["z"] is None else out * F.silu(given["z"])
    return out.to(x.dtype)


def _delta_rule(given: Arguments) -> Any:
    """``chunk_gated_delta_rule``, ``chunk_kda`` and what both are called for one token.

    query and key [1, T, G, K], value [1, T, H, V], g [1, T, H] or of every term [1, T, H, K], beta [1, T, H]; the state is [1, H, K, V].
    """
    query, key, state = given["query"], given["key"], given["initial_state"]
    if query.dim() != 4 or query.shape[0] != 1:
        return None
    queries, keys = (one.float() for one in (query, key))
    if given["use_qk_l2norm_in_kernel"]:
        queries, keys = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + _TINY) for one in (queries, keys))
    queries = queries * query.shape[-1] ** -0.5
    state = None if state is None else state.transpose(-1, -2)
    rows, last = _recurrence(state, given["g"].float(), given["value"], keys, queries, strength=given["beta"].float())
    return rows.to(query.dtype), last.transpose(-1, -2) if given["output_final_state"] else None


def _recurrence(state: Tensor | None, *rest: Any, skip: Tensor | None = None, **keywords: Any) -> tuple[Tensor, Tensor]:
    recorder = active_recorder()
    state, skip = (None if one is None else one.float() for one in (state, skip))
    valid = None if recorder is None else recorder.valid
    found: tuple[Tensor, Tensor] = torch.ops.agentcompile.recurrence.default(state, *rest, **keywords, valid=valid, skip=skip)
    return found


def _convolution(given: Arguments) -> Any:
    """``causal_conv1d_fn``: hidden_states [1, C, K + T], of which the first are the state, weight [C, K], bias [C]."""
    recorder, weight = active_recorder(), given["weight"]
    window = next((one for one in recorder.windows if one.joined is given["hidden_states"]), None) if recorder is not None else None
    if recorder is None or window is None or given["activation"] not in (None, "silu", "swish"):
        return None
    if weight.dim() != 2 or weight.shape[1] != window.state.shape[2] or window.x.shape[0] != 1:
        return None
    recorder.windows.remove(window)
    out, last = torch.ops.agentcompile.causal_convolution.default(
        window.state, window.x, weight, given["bias"], window.valid, given["activation"] is not None)
    window.state.copy_(last)
    return out


def _convolution_update(given: Arguments) -> Any:
    """``causal_conv1d_update``, one token of a convolution: hidden_states [1, C, 1], conv_state [1, C, K], which it writes in place."""
    x, state, weight = given["hidden_states"], given["conv_state"], given["weight"]
    if x.shape[0] != 1 or x.dim() != 3 or x.shape[2] != 1 or given["activation"] not in (None, "silu", "swish"):
        return None
    if weight.dim() != 2 or weight.shape[1] != state.shape[2]:
        return None
    out, last = torch.ops.agentcompile.causal_convolution.default(state, x, weight, given["bias"], None, given["activation"] is not None)
    state.copy_(last)
    return out


_TINY = 1e-6  # what transformers adds to the squares of queries and keys
_OURS: dict[str, Callable[[Arguments], Any]] = {
    "selective_scan_fn": _selective_scan, "mamba_chunk_scan_combined": _chunk_scan, "chunk_gated_delta_rule": _delta_rule,
    "chunk_kda": _delta_rule, "causal_conv1d_fn": _convolution, "causal_conv1d_update": _convolution_update,
    "selective_state_update": _state_update, "fused_recurrent_gated_delta_rule": _delta_rule, "fused_recurrent_kda": _delta_rule,
}
