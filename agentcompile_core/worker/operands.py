"""Inputs of a trial, made from the case's seed on the device they are used on. Nothing is stored or sent."""

import torch
from attrs import evolve
from torch import Tensor

from ..errors import ContractError
from ..ir.graph import Graph, TensorSpec
from ..ir.region import Match, Operand, Role
from ..ir.verdict import Case, InputFamily
from ..ops.dtypes import torch_dtype
from ..plugin.match_kind import WEIGHTS, MatchKind
from .carried import with_nan, with_outliers
from .edges import EDGED, edged
from .shared_weights import SharedWeights

SCALE: dict[str, float] = {InputFamily.NORMAL_SMALL: 2.0**-6, InputFamily.NORMAL_LARGE: 16.0}
OWN_WEIGHTS = (InputFamily.INTEGERS, InputFamily.SPIKY)  # families with other weights than all others have
SPIKES = 0.005  # share of outliers in the spiky family
SPIKE, FEW_SPIKE = 50.0, 8.0


def make_inputs(match: Match, kind: MatchKind, case: Case, device: str, into: dict[str, Tensor] | None = None,
                shared: SharedWeights | None = None) -> dict[str, Tensor]:
    """Values of every operand that is not an output, by operand name, in the operand's shape and dtype.

    What ``kind`` does not make itself is drawn here: weights with the scale of trained ones, integers inside what they
    index. States that are filled step by step hold data below the position and NaN from it on. Where the case says which operand
    carries the NaN of its family, no other has one. Operands that are the same
    values hold the same. ``into`` gives tensors to fill instead of new ones; ``shared`` the weights that cases share, drawn once,
    which nobody may write to then.

    Raises:
        ContractError: the kind made a tensor of another shape.
    """
    made: dict[str, Tensor] = {}
    first: dict[tuple[tuple[str, ...], TensorSpec], str] = {}  # by values: the operand that came first with them
    for index, operand in enumerate(match.operands):
        if operand.role in (Role.OUTPUT, Role.WORKSPACE):
            continue
        generator = torch.Generator(device=device)
        generator.manual_seed((case.weights_seed if operand.role in WEIGHTS and case.weights_seed else case.seed) * 1009 + index)
        same = first.setdefault((operand.values, operand.spec), operand.name)
        tensor = made[same].clone() if same in made else make_operand(match, kind, operand, case, generator, device, shared)
        made[operand.name] = into[operand.name].copy_(tensor) if into is not None else tensor
    return made


def make_operand(match: Match, kind: MatchKind, operand: Operand, case: Case, generator: torch.Generator, device: str,
                 shared: SharedWeights | None = None) -> Tensor:
    """One operand of ``make_inputs``."""
    made = _made(match, kind, operand, case, generator, device, shared)
    return with_nan(made, match, kind, operand, case) if operand.name == case.carrier else made


def _made(match: Match, kind: MatchKind, operand: Operand, case: Case, generator: torch.Generator, device: str,
          shared: SharedWeights | None) -> Tensor:
    """The same without the NaN that it carries."""
    dtype, said = torch_dtype(operand.spec.dtype), kind.operand(operand.name)
    tensor = kind.make(match, operand, case, generator, device)
    own = tensor is not None
    if tensor is None and shared is not None and case.weights_seed and operand.role in WEIGHTS:
        key = (generator.initial_seed(), operand.spec, case.family if case.family in OWN_WEIGHTS else InputFamily.NORMAL)
        return shared.get(key, lambda: _drawn(match, kind, operand, case, generator, device).to(dtype))
    filled = said.filled_along if said is not None and dtype.is_floating_point else None
    if tensor is None and filled is not None:
        return _filled(match, kind, operand, filled, case, generator, device)
    if tensor is None:
        tensor = _drawn(match, kind, operand, case, generator, device)
    elif tuple(tensor.shape) != operand.spec.shape:
        raise ContractError(f"kind {kind.name} made {tuple(tensor.shape)} for operand {operand.name}, which is {operand.spec.shape}")
    tensor = tensor.to(dtype)
    if filled is not None:
        tensor = tensor.clone() if own else tensor
        end = operand.spec.shape[filled]
        tensor.narrow(filled, min(case.position, end), end - min(case.position, end)).fill_(float("nan"))
        _last_is_nan(tensor, filled, case)
    return tensor


def _filled(match: Match, kind: MatchKind, operand: Operand, axis: int, case: Case, generator: torch.Generator, device: str) -> Tensor:
    """A state with drawn data along ``axis`` below the position and NaN from it on."""
    shape = list(operand.spec.shape)
    tensor = torch.full(shape, float("nan"), dtype=torch_dtype(operand.spec.dtype), device=device)
    shape[axis] = min(case.position, shape[axis])
    if shape[axis]:
        spec = evolve(operand.spec, shape=tuple(shape), strides=())
        tensor.narrow(axis, 0, shape[axis]).copy_(_drawn(match, kind, evolve(operand, spec=spec), case, generator, device))
    _last_is_nan(tensor, axis, case)
    return tensor


def _last_is_nan(tensor: Tensor, axis: int, case: Case) -> None:
    if case.family == InputFamily.NAN and not case.carrier and 0 < case.position <= tensor.shape[axis]:
        tensor.select(axis, case.position - 1)[(0,) * (tensor.dim() - 1)] = float("nan")


def _drawn(match: Match, kind: MatchKind, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor:
    if not operand.spec.dtype.is_float:
        return _integers(match, kind, operand, case, generator, device)
    tensor = _draw(operand.spec, case, generator, device, is_input=operand.role is Role.INPUT)
    if case.family == InputFamily.INTEGERS or operand.role not in WEIGHTS:
        return tensor
    mean, deviation = kind.weight_scale(match, operand)
    tensor = tensor.mul_(deviation) if deviation != 1.0 else tensor
    tensor = tensor.add_(mean) if mean else tensor
    return with_outliers(tensor, mean, generator) if case.family == InputFamily.SPIKY else tensor


def _draw(spec: TensorSpec, case: Case, generator: torch.Generator, device: str, *, is_input: bool) -> Tensor:
    family, shape = case.family, spec.shape
    if family == InputFamily.INTEGERS:
        drawn = torch.randint(0, 4, shape, generator=generator, device=device, dtype=torch.int8)
        return torch.tensor([-2, -1, 1, 2], dtype=torch_dtype(spec.dtype), device=device)[drawn.int()]
    if family == InputFamily.ONE_HOT and is_input:
        tensor = torch.zeros(spec.numel, device=device)
        tensor[torch.randint(0, spec.numel, (1,), generator=generator, device=device)] = 1.0
        return tensor.reshape(shape)
    if family == InputFamily.ALL_MINUS_INF and is_input:
        return torch.full(shape, float("-inf"), device=device)
    # Large tensors are drawn in their own type: half the memory and twice the speed.
    dtype = torch_dtype(spec.dtype) if device != "cpu" and spec.numel > 1 << 24 else torch.float32
    tensor = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    if not is_input:
        return tensor
    if family == InputFamily.SPIKY:
        spikes = torch.rand(shape, generator=generator, device=device) < SPIKES
        tensor = torch.where(spikes, tensor * SPIKE, tensor)
        if spec.numel:  # in a short vector, such as the weights of experts, hardly any is drawn
            tensor.view(-1)[case.seed % spec.numel] = FEW_SPIKE
    if case.carrier:
        return tensor
    return edged(tensor, spec, case, generator) if family in EDGED else tensor * SCALE.get(family, 1.0)


def _integers(match: Match, kind: MatchKind, operand: Operand, case: Case, generator: torch.Generator, device: str) -> Tensor:
    shape, dtype, said = operand.spec.shape, torch_dtype(operand.spec.dtype), kind.operand(operand.name)
    if operand.role is Role.LENGTH:
        return torch.full(shape, case.position, dtype=dtype, device=device)
    table = match.operand(said.index_of) if said is not None and said.index_of else None
    if table is not None:
        return torch.randint(0, table.spec.shape[0], shape, generator=generator, device=device).to(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


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
