"""Operands in0, in1, in2 of kernels that evaluate a pointwise expression on the way (``agentcompile/inputs.cuh``)."""

from collections.abc import Iterable

from agentcompile_core.plugin_api import DType, KernelArgument, Match, Operand, Reject, i64

from .arguments import operand_pointer
from .render import Value, c_type

MOST_INPUTS = 3
FLOATS = (DType.F16, DType.BF16, DType.F32)
FULL, REPEATS, SCALAR, ABSENT = range(4)  # as in inputs.cuh
FEW_BYTES = 12 << 20  # of all inputs of a kernel, whose loads then leave L1 alone; measured on an H200 (docs/performance.md)


def pointwise_inputs(match: Match) -> tuple[Operand, ...]:
    """in0, in1, ... as far as there are any."""
    found = (match.operand(f"in{j}") for j in range(MOST_INPUTS + 1))
    return tuple(operand for operand in found if operand is not None)


def inputs_reject(match: Match) -> Reject | None:
    """Why ``inputs.cuh`` cannot read the inputs of a match; None if it can."""
    inputs = pointwise_inputs(match)
    if not 1 <= len(inputs) <= MOST_INPUTS:
        return Reject(f"{len(inputs)} inputs; in0 to in{MOST_INPUTS - 1} are served")
    for operand in inputs:
        if operand.spec.dtype not in FLOATS:
            return Reject(f"operand {operand.name} is {operand.spec.dtype.value}; float16, bfloat16 and float32 are served")
    return None


def inputs_plan(match: Match, count: int) -> dict[str, Value]:
    """What ``struct Plan`` says of the inputs of an expression over ``count`` elements: types A0 to A2, kinds kind_0 to kind_2."""
    inputs = pointwise_inputs(match)
    types: dict[str, Value] = {f"A{j}": c_type(inputs[min(j, len(inputs) - 1)].spec.dtype) for j in range(MOST_INPUTS)}
    kinds = {f"kind_{j}": _kind(inputs[j].spec.numel, count) if j < len(inputs) else ABSENT for j in range(MOST_INPUTS)}
    return {**types, **kinds}


def are_few(inputs: Iterable[Operand]) -> bool:
    """Whether all inputs of a kernel together are so few bytes that loads which leave L1 alone are the faster ones."""
    return sum(operand.spec.nbytes for operand in inputs) <= FEW_BYTES


def inputs_arguments(match: Match) -> tuple[KernelArgument, ...]:
    """Pointers in0, in1, in2, null where the match has fewer."""
    return tuple(operand_pointer(match, f"in{j}") for j in range(MOST_INPUTS))


def inputs_periods(match: Match) -> tuple[KernelArgument, ...]:
    """Scalars period0, period1, period2: after how many elements each begins again."""
    inputs = pointwise_inputs(match)
    return tuple(i64(f"period{j}", inputs[j].spec.numel if j < len(inputs) else 1) for j in range(MOST_INPUTS))


def step_of(match: Match, *others: DType) -> int:
    """Elements that make whole 16-byte vectors of every input of more than one element, and of types ``others``."""
    sizes = [operand.spec.dtype.bytes for operand in pointwise_inputs(match) if operand.spec.numel > 1]
    return 16 // min((*sizes, *(dtype.bytes for dtype in others)), default=4)


def _kind(numel: int, count: int) -> int:
    return FULL if numel == count else SCALAR if numel == 1 else REPEATS
