"""Runs one schedule of the gemv family on the CPU, and says what it should have computed."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import torch
from agentcompile_templates_cuda_gemv import GemvFamily
from agentcompile_validator_emulation.engine import Mode, build
from agentcompile_validator_emulation.module import Access, Buffer, EmulatedModule, LaunchOptions

from agentcompile_core.plugin_api import ArgumentKind, DType, KernelArgument, Match, PointwiseKind, Role, Schedule, StepSource, Target

TORCH = {DType.F16: torch.float16, DType.BF16: torch.bfloat16, DType.F32: torch.float32}
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
TINY = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134, torch.float32: 2.0**-149}
NORM_EPS = 1e-6
FUNCTIONS = {
    PointwiseKind.SILU: torch.nn.functional.silu,
    PointwiseKind.GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@lru_cache(maxsize=64)
def _module(code: str, headers: tuple[tuple[str, str], ...], entry: str) -> EmulatedModule:
    return EmulatedModule(build(code, dict(headers), (entry,), Mode.CHECKED), checked=True)


def run(match: Match, schedule: Schedule, target: Target, tensors: dict[str, torch.Tensor],
        options: LaunchOptions | None = None) -> torch.Tensor:
    """The result of the kernel; races, bounds, reads before the dependency wait and unwritten outputs raise."""
    source = GemvFamily().lower(match, schedule, target)
    return run_source(source, match, tensors, options)


def run_source(source: StepSource, match: Match, tensors: dict[str, torch.Tensor], options: LaunchOptions | None) -> torch.Tensor:
    """As ``run``, of a source that was lowered before."""
    launch = source.launches[0]
    out = torch.full((match.integer("n"),), float("nan"), dtype=TORCH[match.need("out").spec.dtype])
    counters = {w.name: torch.zeros(w.nbytes, dtype=torch.uint8) for w in source.workspaces}
    arguments = [_argument(argument, {**tensors, **counters, "out": out}) for argument in launch.arguments]
    module = _module(source.code, source.headers, launch.entry)
    options = options or LaunchOptions(lazy_copies=True, programmatic_launch=launch.pdl)
    module.launch(launch.entry, launch.grid, launch.block, arguments, launch.shared_bytes, options)
    assert not any(counter.any() for counter in counters.values()), "tickets start from zero again"
    return out


def _argument(argument: KernelArgument, tensors: dict[str, torch.Tensor]) -> Buffer | ctypes.c_int | ctypes.c_float:
    if argument.kind is ArgumentKind.I32:
        return ctypes.c_int(int(argument.value))
    if argument.kind is ArgumentKind.F32:
        return ctypes.c_float(argument.value)
    if not argument.operand:
        return Buffer(name=argument.name, address=0, nbytes=0)
    tensor = tensors[argument.operand]
    access = {Role.OUTPUT: Access.WRITE, Role.WORKSPACE: Access.READ_WRITE}.get(argument.role, Access.READ)
    return Buffer(name=argument.name, address=tensor.data_ptr(), nbytes=tensor.numel() * tensor.element_size(), access=access,
                  written_by_the_chain=argument.role is not Role.WEIGHT)


def draw(match: Match, seed: int, *, scale: float = 1.0, integers: bool = False, offset: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of a match. ``offset`` elements shift x off its 16-byte alignment; weights have unit-variance rows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for operand in match.operands:
        if operand.role is Role.OUTPUT:
            continue
        count, dtype = operand.spec.numel, TORCH[operand.spec.dtype]
        if integers:
            values = torch.randint(0, 4, (count,), generator=generator).double() - 1.5
            values = values.sign() * values.abs().ceil()
        else:
            values = torch.randn(count, generator=generator, dtype=torch.float64) * scale
            if operand.name == "weight":
                values *= match.integer("k") ** -0.5
        shift = offset if operand.name == "x" else 0
        storage = torch.zeros(count + shift + 64, dtype=dtype)
        start = shift + (-storage.data_ptr() % 16) // storage.element_size()
        tensors[operand.name] = storage[start:start + count].copy_(values)
    return tensors


def normalized(match: Match, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """x as the dot products see it, in fp64 from fp32 statistics, and the error that rounding it may carry."""
    x, kind = tensors["x"].double(), match.text("norm", "none")
    if kind == "none":
        return x, torch.zeros_like(x)
    unit = UNIT[tensors["x"].dtype]
    weight = tensors["norm_weight"].double() if "norm_weight" in tensors else torch.ones_like(x)
    if kind == "layer":
        bias = tensors["norm_bias"].double() if "norm_bias" in tensors else torch.zeros_like(x)
        y = (x - x.mean()) / torch.sqrt(x.var(correction=0) + NORM_EPS) * weight
        return y + bias, unit * (y + bias).abs() + 2.0**-20 * (y.abs() + bias.abs() + weight.abs() * x.abs().max())
    y = x / torch.sqrt(x.square().mean() + NORM_EPS)
    y = y * (1.0 + weight) if kind == "rms_one_plus" else y * weight
    return y, (unit if kind == "rms_one_plus" else 2.01 * unit) * y.abs() + 2.0**-20 * y.abs() + TINY[tensors["x"].dtype]


def check(match: Match, tensors: dict[str, torch.Tensor], out: torch.Tensor, depth: int) -> float:
    """Largest share of the error budget that any element uses; at most 1 is right.

    The budget of one dot product of declared reduction depth, plus four standard deviations of what the rounded norm may
    add; the epilogue multiplies it by its own sensitivity.
    """
    n, k, pair = match.integer("n"), match.integer("k"), match.integer("pair", 1)
    row, row_error = normalized(match, tensors)
    weight = tensors["weight"].double().view(pair, n, k)
    sums = weight @ row
    errors = 4 * torch.sqrt(weight.square() @ row_error.square()) + 2 * math.sqrt(depth) * 2.0**-24 * (weight.abs() @ row.abs())
    aux = [tensors[name].double() for name in ("aux0", "aux1") if name in tensors]
    if pair == 2:
        function = FUNCTIONS[match.epilogue.operations[0].kind]
        gate = function(sums[0])
        reference = gate * sums[1]
        error = 1.2 * errors[0] * sums[1].abs() + (gate.abs() + 1.2 * errors[0]) * errors[1] + 2.0**-20 * reference.abs()
        magnitude = reference.abs()
    else:
        reference = sums[0] + sum(aux)
        magnitude = sums[0].abs() + sum(a.abs() for a in aux)
        error = errors[0]
    budget = 1.001 * UNIT[out.dtype] * reference.abs() + TINY[out.dtype] + error + 2.0**-22 * magnitude
    return float(((out.double() - reference).abs() / budget).max())
