"""Inputs of a trial, made from the case's seed on the device they are used on. Nothing is stored or sent."""

import math

import torch
from torch import Tensor

from ..ir.graph import Graph, TensorSpec
from ..ir.match_kinds import ATTENTION, GATHER, NORM
from ..ir.region import Match, Operand, Role
from ..ir.verdict import Case, InputFamily
from ..ops.reference.bounded import torch_dtype

SCALE = {InputFamily.NORMAL_SMALL: 2.0**-6, InputFamily.NORMAL_LARGE: 16.0}
SPIKES = 0.005  # share of outliers in the spiky family
SPIKE = 50.0
ROPE_BASE = 1e6
_NORM_WEIGHTS = ("norm_weight", "q_norm", "k_norm")


def make_inputs(match: Match, case: Case, device: str, into: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Values of every operand that is not an output, by operand name, in the operand's shape and dtype.

    Weights have the scale of trained ones (deviation 1/sqrt(k)); KV caches hold data below the position and NaN from
    it on; ``into`` gives tensors to fill instead of new ones.
    """
    made: dict[str, Tensor] = {}
    for index, operand in enumerate(match.operands):
        if operand.role in (Role.OUTPUT, Role.WORKSPACE):
            continue
        generator = torch.Generator(device=device)
        generator.manual_seed(case.seed * 1009 + index)
        tensor = _values(match, operand, case, generator, device)
        made[operand.name] = into[operand.name].copy_(tensor) if into is not None else tensor
    return made


def _values(match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor:
    spec = operand.spec
    if not spec.dtype.is_float:
        return _integers(match, operand, case, generator, device)
    dtype = torch_dtype(spec.dtype)
    if operand.name in ("cos", "sin"):
        return _rotation(operand.name, spec, case, device).to(dtype)
    if operand.name == "inv_freq":
        return (ROPE_BASE ** (-torch.arange(spec.numel, device=device) / spec.numel)).reshape(spec.shape).to(dtype)
    tensor = _draw(spec, case, generator, device, is_input=operand.role is Role.INPUT)
    if case.family is not InputFamily.INTEGERS:
        tensor = _like_a_weight(match, operand, tensor)
    tensor = tensor.to(dtype)
    if operand.role is Role.STATE and match.kind == ATTENTION:
        tensor[:, case.position :] = float("nan")
    return tensor


def _draw(spec: TensorSpec, case: Case, generator: torch.Generator, device: str, *, is_input: bool) -> Tensor:
    family, shape = case.family, spec.shape
    if family is InputFamily.INTEGERS:
        drawn = torch.randint(0, 4, shape, generator=generator, device=device, dtype=torch.int8)
        return torch.tensor([-2, -1, 1, 2], dtype=torch_dtype(spec.dtype), device=device)[drawn.int()]
    if family is InputFamily.ONE_HOT and is_input:
        tensor = torch.zeros(spec.numel, device=device)
        tensor[torch.randint(0, spec.numel, (1,), generator=generator, device=device)] = 1.0
        return tensor.reshape(shape)
    # Large tensors are drawn in their own type: half the memory and twice the speed.
    dtype = torch_dtype(spec.dtype) if device != "cpu" and spec.numel > 1 << 24 else torch.float32
    tensor = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    if not is_input:
        return tensor
    if family is InputFamily.SPIKY:
        spikes = torch.rand(shape, generator=generator, device=device) < SPIKES
        tensor = torch.where(spikes, tensor * SPIKE, tensor)
    return tensor * SCALE.get(family, 1.0)


def _like_a_weight(match: Match, operand: Operand, tensor: Tensor) -> Tensor:
    if operand.role not in (Role.WEIGHT, Role.CONSTANT):
        return tensor
    name = operand.name
    if name in _NORM_WEIGHTS or (name == "weight" and match.kind == NORM):
        one_plus = match.attribute("norm", "") == "rms_one_plus"
        return tensor * 0.1 + (0.0 if one_plus else 1.0)
    if tensor.dim() < 2:
        return tensor * 0.1
    return tensor if match.kind == GATHER else tensor.mul_(1.0 / math.sqrt(tensor.shape[-1]))


def _rotation(name: str, spec: TensorSpec, case: Case, device: str) -> Tensor:
    """cos or sin as HuggingFace makes them: the angles of a position, twice behind each other."""
    half = spec.shape[-1] // 2
    angles = float(case.position) * ROPE_BASE ** (-torch.arange(half, device=device) / max(half, 1)) + case.seed % 7
    table = torch.cat((angles, angles))
    return (table.cos() if name == "cos" else table.sin()).expand(spec.shape).clone()


def _integers(match: Match, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor:
    spec = operand.spec
    dtype = torch_dtype(spec.dtype)
    if operand.name == "position":
        return torch.full(spec.shape, case.position, dtype=dtype, device=device)
    table = match.operand("table")
    if operand.name == "ids" and table is not None:
        return torch.randint(0, table.spec.shape[0], spec.shape, generator=generator, device=device).to(dtype)
    return torch.zeros(spec.shape, dtype=dtype, device=device)


def split_values(operand: Operand, tensor: Tensor, graph: Graph) -> dict[str, Tensor]:
    """The values that lie behind each other in an operand's memory, each in its own shape."""
    flat, offset, found = tensor.reshape(-1), 0, {}
    for name in operand.values:
        spec = graph.spec(name)
        part = flat[offset : offset + spec.numel]
        found[name] = part.as_strided(spec.shape, spec.strides, part.storage_offset()) if spec.strides else part.view(spec.shape)
        offset += spec.numel
    return found


def graph_values(match: Match, graph: Graph, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of the match's graph, from tensors by operand name."""
    found: dict[str, Tensor] = {}
    for operand in match.operands:
        if operand.name in tensors:
            found.update(split_values(operand, tensors[operand.name], graph))
    return found
