"""When what a compiled model or module gives counts as what the original gives."""

from typing import Any

import torch
from torch import Tensor

from agentcompile_core.ops.agreement import disagreement


def tokens_differ(found: Tensor, wanted: Tensor) -> str:
    """One clause on where two results of ``generate`` differ; empty where they are equal."""
    found, wanted = found.cpu(), wanted.cpu()
    if found.shape != wanted.shape:
        return f"tokens of shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    places = (found != wanted).nonzero()
    return f"token {int(places[0, -1])} is {int(found[0, places[0, -1]])} instead of {int(wanted[0, places[0, -1]])}" if len(places) else ""


def results_differ(found: Any, wanted: Any, where: str = "the result") -> str:
    """One clause on how two results of a call differ in structure, types or values (fp32: 1e-4 of rms and element); empty: not."""
    if isinstance(wanted, Tensor) and isinstance(found, Tensor):
        if type(found) is not type(wanted) or found.device.type != wanted.device.type:
            return f"{where} is a {type(found).__name__} on {found.device} instead of a {type(wanted).__name__} on {wanted.device}"
        why = disagreement([found], [wanted])
        return f"{where}: {why}" if why else ""
    if type(found) is not type(wanted):
        return f"{where} is a {type(found).__name__} instead of a {type(wanted).__name__}"
    if isinstance(wanted, dict):
        if list(found) != list(wanted):
            return f"{where} has the keys {list(found)} instead of {list(wanted)}"
        return next((why for key in wanted if (why := results_differ(found[key], wanted[key], f"{where}[{key!r}]"))), "")
    if isinstance(wanted, tuple | list):
        if len(found) != len(wanted):
            return f"{where} has {len(found)} items instead of {len(wanted)}"
        pairs = enumerate(zip(found, wanted, strict=True))
        return next((why for i, (one, other) in pairs if (why := results_differ(one, other, f"{where}[{i}]"))), "")
    return "" if found == wanted else f"{where} is {found!r} instead of {wanted!r}"


def relative_rms(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of ``wanted``."""
    one, other = found.double().cpu(), wanted.double().cpu()
    scale = float(other.square().mean().sqrt()) or 1.0
    return float((one - other).square().mean().sqrt()) / scale


def moved(value: Any, device: str) -> Any:
    """``value`` with its tensors copied to ``device``, strides kept."""
    if isinstance(value, Tensor):
        place = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return value.to(device) if 0 in value.stride() else place.copy_(value)
    if isinstance(value, tuple | list):
        items = [moved(item, device) for item in value]
        return type(value)(items)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return value
