"""What is looked at once a kernel was timed: a kernel that is fast because it does not do its work any more is not fast.

In this order: the outputs that the timed runs left; the same inputs again in every copy, with the outputs poisoned; other inputs
at the same addresses, behind outputs that are filled with the old answer; and every buffer that no run may have touched.
"""

from collections.abc import Callable, Iterable

import torch
from attrs import evolve

from ..errors import Cause
from ..ir.record import Measurement
from ..ir.region import Role
from ..ir.verdict import Case
from ..ops.reference import compare
from . import timing
from .execution import Buffers, Execution, fill
from .operands import make_inputs
from .timing import Rotation

POISON = -333.0  # validators use others
GIVEN = (Role.INPUT, Role.WEIGHT, Role.CONSTANT, Role.STATE, Role.LENGTH)
READ_ONLY = (Role.INPUT, Role.WEIGHT, Role.CONSTANT)
WARM_SPEEDUP = 8.0  # no cache that outlives a launch delivers more than eight times what the memory does
OTHER_SEED = 7919  # of a trial with a single case

Finding = tuple[Cause, str]


def impossible(measured: Measurement, cold: bool) -> str:
    """Why a time cannot be true: the bytes of the match take longer, from memory or, where they fit it, from the L2. Empty: it can."""
    floor_us = measured.floor_us if cold else measured.floor_us / WARM_SPEEDUP
    if measured.us >= timing.TOO_FAST * floor_us:
        return ""
    where = "" if cold else ", even from a cache"
    return f"{measured.us:.3g} us is faster than the {floor_us:.3g} us that its bytes need{where}: a bug, not a record"


def look(execution: Execution, turn: Rotation) -> Finding | None:
    """What is wrong after the timed runs of ``turn``, with its class; None: nothing is."""
    timed = _compared(execution, turn, turn.case)
    runs = [execution.prepared(buffers) for buffers in turn.copies]
    _again(execution, turn.copies, runs)
    again = _compared(execution, turn, turn.case)
    touched = _touched(execution, turn)
    if touched:  # what is wrong with outputs then follows from it
        return Cause.MEMORY_FAULT, f"after it was timed: {touched}"
    if timed:
        return Cause.TOLERANCE, f"the output that was timed is wrong: {timed}"
    if again:
        return Cause.TOLERANCE, f"it stopped doing its work: one more run after it was timed, on poisoned outputs, is wrong: {again}"
    return _on_other_inputs(execution, turn, runs[0])


def _on_other_inputs(execution: Execution, turn: Rotation, run: Callable[[int], None]) -> Finding | None:
    """Other data where the old data was, and the old answer where the new one belongs: only work makes the new answer."""
    case, first = other_case(execution.trial.cases), turn.copies[0]
    expected = execution.expected(case, make_inputs(execution.trial.match, execution.kind, case, execution.device))
    run(execution.stream())  # the last run before: what remembers one call only remembers this one
    make_inputs(first.trial.match, execution.kind, case, execution.device, into=first.tensors(*GIVEN))
    run(execution.stream())
    execution.synchronize()
    seen = {name: compare(tensor, expected[name]) for name, tensor in execution.values(first.tensors(Role.OUTPUT)).items()}
    make_inputs(first.trial.match, execution.kind, turn.case, execution.device, into=first.tensors(*GIVEN))  # as they were
    wrong = next((f"{name}: {one.detail}" for name, one in seen.items() if not one.ok), "")
    return (Cause.TOLERANCE, f"it does not look at its inputs again: where other inputs lie at the same addresses, and the answer to the "
                             f"ones before them in its outputs, {wrong}") if wrong else None


def other_case(cases: tuple[Case, ...]) -> Case:
    """A case with other inputs than the one that is timed, one that was judged already where there is one."""
    return cases[1] if len(cases) > 1 else evolve(cases[0], seed=cases[0].seed + OTHER_SEED)


def _again(execution: Execution, copies: Iterable[Buffers], runs: Iterable[Callable[[int], None]]) -> None:
    """One more run of every copy, with poison in its outputs."""
    stream = execution.stream()
    for buffers, run in zip(copies, runs, strict=True):
        poison(buffers)
        run(stream)
    execution.synchronize()


def poison(buffers: Buffers) -> None:
    """Fill every output with what no kernel writes."""
    for tensor in buffers.tensors(Role.OUTPUT).values():
        fill(tensor, POISON)


def _compared(execution: Execution, turn: Rotation, case: Case) -> str:
    """What is wrong with the outputs of the copies: the first against the reference, the others bit for bit against it.

    States of integers have moved on with every run and are not looked at.
    """
    first = execution.values(turn.copies[0].tensors(Role.OUTPUT))
    expected = execution.expected(case, turn.copies[0].tensors(*GIVEN))
    for name, tensor in first.items():
        comparison = compare(tensor, expected[name])
        if not comparison.ok:
            return f"{name}: {comparison.detail}"
    differ: dict[str, list[torch.Tensor]] = {name: [] for name in first}
    for copy in turn.copies[1:]:
        for name, tensor in execution.values(copy.tensors(Role.OUTPUT)).items():
            differ[name].append((_words(tensor) != _words(first[name])).any())
    unequal = [name for name, flags in differ.items() if _any(flags)]
    return f"{', '.join(unequal)} differ between equal copies of the inputs" if unequal else ""


def _touched(execution: Execution, turn: Rotation) -> str:
    """Which buffers that no run may write were written, by operand; asked of the device once for all copies."""
    outside: dict[str, list[torch.Tensor]] = {}
    changed: dict[str, list[torch.Tensor]] = {}
    fresh = make_inputs(turn.copies[0].trial.match, execution.kind, turn.case, execution.device)
    for copy in turn.copies:
        for name, buffer in (*copy.operands.items(), *copy.workspaces.items()):
            outside.setdefault(name, []).extend((band != buffer.guard_byte).any() for band in buffer.bands)
        for name, tensor in copy.tensors(*READ_ONLY).items():
            changed.setdefault(name, []).append((_words(tensor) != _words(fresh[name])).any())
    notes = [f"{what}: {', '.join(names)}" for what, found in (("wrote outside", outside), ("changed", changed))
             if (names := [name for name, flags in found.items() if _any(flags)])]
    return "; ".join(notes)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, in words as wide as divide it: comparing is bound by memory."""
    flat = tensor.reshape(-1)
    wide = flat.nbytes % 8 == 0 and flat.data_ptr() % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if wide else torch.uint8)


def _any(flags: list[torch.Tensor]) -> bool:
    return bool(torch.stack(flags).any()) if flags else False
