"""What is looked at once a kernel was timed: a kernel that is fast because it does not do its work any more is not fast.

In this order: the outputs that the timed runs left; the same inputs again in every copy, with the outputs poisoned; other inputs
at the same addresses, behind outputs that are filled with the old answer; and every buffer that no run may have touched. Where there is
no clock, all but the first of it is looked at too, in one copy and behind as many runs as there is time for.
"""

import time
from collections.abc import Callable, Iterable, Mapping

import torch
from attrs import evolve

from ..errors import Cause
from ..ir.record import Measurement
from ..ir.region import Role
from ..ir.verdict import Case, Trial
from ..ops.bits import words
from ..ops.reference import Bounded, compare
from . import timing
from .buffers import GIVEN, Buffers, fill
from .execution import Execution
from .memory import Unchanged, any_of
from .operands import make_inputs
from .timing import Rotation

POISON = -333.0  # validators use others
WARM_SPEEDUP = 8.0  # no cache that outlives a launch delivers more than eight times what the memory does
OTHER_SEED = 7919  # of a trial with a single case
MOST_RUNS = 40  # of a kernel that cannot be timed

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
    fresh = _fresh(execution, turn.copies[0].trial, turn.case)
    execution.expected(turn.case, fresh.tensors(*GIVEN))
    timed = "" if _moving(execution, fresh) else _compared(execution, turn, turn.case)
    runs = [execution.prepared(buffers) for buffers in turn.copies]
    _put_back(execution, turn.copies, fresh)
    _again(execution, turn.copies, runs)
    again = _compared(execution, turn, turn.case)
    touched = _touched(turn, fresh)
    if touched:  # what is wrong with outputs then follows from it
        return Cause.MEMORY_FAULT, f"after it was timed: {touched}"
    if timed:
        return Cause.TOLERANCE, f"the output that was timed is wrong: {timed}"
    if again:
        return Cause.TOLERANCE, f"it stopped doing its work: one more run after it was timed, on poisoned outputs, is wrong: {again}"
    behind = _behind(execution, turn.copies[0], runs[0])
    if behind:
        return Cause.TOLERANCE, behind
    runs[0](execution.stream())  # the last run before: what remembers one call only remembers this one
    wrong = _on_other_inputs(execution, turn, runs[0])
    make_inputs(turn.copies[0].trial.match, execution.kind, turn.case, execution.device, into=turn.copies[0].tensors(*GIVEN))  # as before
    return wrong


def look_untimed(execution: Execution, spare_s: float) -> Finding | None:
    """The same for a kernel that cannot be timed here: before the poisoned run there are as many others as ``spare_s`` seconds hold."""
    case, trial = execution.trial.cases[0], timing.roomy(execution.trial, execution.kind)
    fresh, buffers = _fresh(execution, trial, case), Buffers(trial, execution.device)
    buffers.fill_from(fresh)
    for name, tensor in buffers.tensors(Role.STATE).items():
        tensor.copy_(fresh.operands[name].tensor)
    execution.expected(case, fresh.tensors(*GIVEN))  # before a state moves on
    turn, run = timing.Rotation(copies=(buffers,), cold=False, case=case), execution.prepared(buffers)
    runs = 1 + _often(run, execution, spare_s)
    _put_back(execution, turn.copies, fresh)
    _again(execution, turn.copies, (run,))
    again = _compared(execution, turn, case)
    touched = _touched(turn, fresh)
    if touched:
        return Cause.MEMORY_FAULT, f"after {runs} runs at the same addresses: {touched}"
    if again:
        return Cause.TOLERANCE, f"it stopped doing its work: run {runs} at the same addresses, on poisoned outputs, is wrong: {again}"
    behind = _behind(execution, buffers, run)
    return (Cause.TOLERANCE, behind) if behind else _on_other_inputs(execution, turn, run)


def _filled(execution: Execution, buffers: Buffers, case: Case) -> dict[str, torch.Tensor]:
    """Fill what is given with the inputs of ``case``; returns copies of them."""
    made = make_inputs(buffers.trial.match, execution.kind, case, execution.device, into=buffers.tensors(*GIVEN))
    return {name: tensor.clone() for name, tensor in made.items()}


def _often(run: Callable[[int], None], execution: Execution, spare_s: float) -> int:
    """Run it again and again, ``MOST_RUNS`` times at most, while less than ``spare_s`` seconds are over; returns how often."""
    began, stream = time.monotonic(), execution.stream()
    for count in range(MOST_RUNS):
        if time.monotonic() - began >= spare_s:
            return count
        run(stream)
    return MOST_RUNS


def _on_other_inputs(execution: Execution, turn: Rotation, run: Callable[[int], None]) -> Finding | None:
    """Other data where the old data was, and the old answer where the new one belongs: only work makes the new answer."""
    case, first = other_case(execution.trial.cases), turn.copies[0]
    expected = execution.expected(case, _filled(execution, first, case))
    run(execution.stream())
    execution.synchronize()
    wrong = _wrong(execution, first, expected)
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


def _moving(execution: Execution, buffers: Buffers) -> dict[str, torch.Tensor]:
    """The states that every run moves on, by operand."""
    states = buffers.tensors(Role.STATE)
    return {name: tensor for name, tensor in states.items() if (said := execution.kind.operand(name)) is not None and said.moves}


def _put_back(execution: Execution, copies: Iterable[Buffers], fresh: Buffers) -> None:
    """What runs have moved on, as it is in ``fresh``, which nothing runs on."""
    first = _moving(execution, fresh)
    for buffers in copies if first else ():
        for name, tensor in _moving(execution, buffers).items():
            tensor.copy_(first[name])


def poison(buffers: Buffers) -> None:
    """Fill every output with what no kernel writes."""
    for tensor in buffers.tensors(Role.OUTPUT).values():
        fill(tensor, POISON)


def _compared(execution: Execution, turn: Rotation, case: Case) -> str:
    """What is wrong with the results of the copies: the first against the reference, the others bit for bit against it.

    States of integers have moved on with every run and are not looked at.
    """
    first = _results(execution, turn.copies[0])
    wrong = _wrong(execution, turn.copies[0], execution.expected(case, turn.copies[0].tensors(*GIVEN)))
    if wrong:
        return wrong
    differ: dict[str, list[torch.Tensor]] = {name: [] for name in first}
    for copy in turn.copies[1:]:
        for name, tensor in _results(execution, copy).items():
            differ[name].append((words(tensor) != words(first[name])).any())
    if not any_of(flag for flags in differ.values() for flag in flags):
        return ""
    unequal = [name for name, flags in differ.items() if any_of(flags)]
    return f"{', '.join(unequal)} differ between equal copies of the inputs"


def _results(execution: Execution, buffers: Buffers) -> dict[str, torch.Tensor]:
    """Outputs, and states that every run moves on, by value name."""
    return execution.values({**buffers.tensors(Role.OUTPUT), **_moving(execution, buffers)})


def _wrong(execution: Execution, buffers: Buffers, expected: Mapping[str, Bounded]) -> str:
    """The first of the results that is not what is expected, and how; empty: none."""
    seen = ((name, compare(tensor, expected[name])) for name, tensor in _results(execution, buffers).items())
    return next((f"{name}: {one.detail}" for name, one in seen if not one.ok), "")


def _behind(execution: Execution, buffers: Buffers, run: Callable[[int], None]) -> str:
    """What is wrong with a run that goes on from the state that the one before left, as all runs do that are timed."""
    if not _moving(execution, buffers):
        return ""
    expected = execution.following({name: tensor.clone() for name, tensor in buffers.tensors(*GIVEN).items()})
    _again(execution, (buffers,), (run,))
    wrong = _wrong(execution, buffers, expected)
    return f"it works where its state was put back, and not where it left it itself: {wrong}" if wrong else ""


def _touched(turn: Rotation, fresh: Buffers) -> str:
    """Which buffers that no run may write were written, by operand: guard bands, and what is not as in ``fresh``.

    Asked of the device once for all copies.
    """
    kept = [[Unchanged(mine, its) for mine, its in zip(copy.read, fresh.read, strict=True)] for copy in turn.copies]
    flags = [flag for copy in turn.copies for flag in copy.bands_written()]
    if not any_of((*flags, *(one.changed() for arenas in kept for one in arenas))):
        return ""
    outside = dict.fromkeys(name for copy in turn.copies for name in copy.damaged())
    changed = dict.fromkeys(name for arenas in kept for one in arenas for name in one.names())
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in (("wrote outside", outside), ("changed", changed)) if names)


def _fresh(execution: Execution, trial: Trial, case: Case) -> Buffers:
    """Buffers with the inputs of ``case``, which nothing runs on."""
    made = Buffers(trial, execution.device)
    make_inputs(trial.match, execution.kind, case, execution.device, into=made.tensors(*GIVEN))
    return made
