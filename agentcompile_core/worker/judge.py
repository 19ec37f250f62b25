"""The chain's judge, inside the worker: the shortened decode step on synthetic weights, captured and timed, A against B.

Steps are swept by their share of the time, then neighbours that came close alone are changed together. A challenger replaces the
incumbent only if the lower bound of their paired ratio is beyond the margin, and only if it still computes what its first run did: after
it was timed, on poisoned buffers. Order and seeds are fixed.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attrs import evolve, field, frozen

from ..errors import AgentCompileError
from ..ir import serial
from ..ir.candidate import Kernel
from ..ir.decisions import ChainTrial
from ..ir.graph import Graph, ValueKind
from ..ir.plan import Step
from ..ir.region import Region
from ..ir.selection import SelectedStep, Selection
from ..ir.target import Target
from ..plugin.catalog import Catalog
from ..plugin.interfaces import Backend
from ..runtime.binder import bind
from ..runtime.executables import BoundCall, Executables, bind_call, call_key
from ..runtime.make_program import make_program
from ..runtime.program import Program, framework_program
from ..runtime.weights import WeightStore
from .captured import CapturedVariant, States, Variant, replays_of
from .neighbours import NEAR, replacements
from .synthetic import Synthetic

PAIRS = 7


@frozen(kw_only=True)
class Alternative:
    """Another way to do one step of one region: what would be selected instead (None: the framework)."""

    signature: str
    match_id: str
    selected: SelectedStep | None

    def __str__(self) -> str:
        return str(self.selected.step) if self.selected else f"framework on {self.match_id}"


@frozen(kw_only=True)
class ChainQuestion:
    """What the chain is asked: which of ``alternatives`` to take in place of what ``selections`` hold."""

    graph: Graph
    regions: tuple[Region, ...]
    selections: tuple[Selection, ...]
    alternatives: tuple[Alternative, ...]
    target: Target
    backend: str
    position: int
    margin: float
    budget_s: float
    with_framework: bool = True  # whether the step on the framework is timed as well
    kernels: tuple[Kernel, ...] = field(default=(), repr=False)  # of the sources in it, as they were validated


@frozen(kw_only=True)
class ChainAnswer:
    """The selections that won, what the shortened step takes with them and on the framework alone, in microseconds.

    ``refused``: of each step that was not taken since the whole step was wrong with it, region, match, the step in words, and why.
    ``trials``: everything that was tried, in order; who makes it again from ``question.selections`` gets ``selections``.
    """

    selections: tuple[Selection, ...]
    us: float
    first_us: float
    framework_us: float
    tried: int
    accepted: int
    refused: tuple[tuple[str, str, str, str], ...] = ()
    trials: tuple[ChainTrial, ...] = ()


def judge(argument: Any, state: Any, phase: Callable[[str], None]) -> Any:
    """Worker entry: a ChainQuestion as JSON in, a ChainAnswer as JSON out."""
    question = serial.structure(argument, ChainQuestion)
    with torch.inference_mode():  # timed as sessions run: what stays outside of graphs writes to tensors that were made here
        return serial.unstructure(_Chain(question, state.backend(question.backend), state.catalog, phase).sweep())


class _Chain:
    def __init__(self, question: ChainQuestion, backend: Backend, catalog: Catalog, phase: Callable[[str], None]) -> None:
        self.q, self.backend, self.catalog, self.phase = question, backend, catalog, phase
        self.kernels: dict[str, Kernel] = {kernel.digest: kernel for kernel in question.kernels}
        self.calls: dict[str, BoundCall] = {}
        make = Synthetic(question, catalog.kinds, backend.device)
        self.weights = WeightStore.from_tensors(make.tensors((ValueKind.WEIGHT, ValueKind.CONSTANT), by_source=True), backend.device)
        self.states = States(make.tensors((ValueKind.STATE,), by_source=True), question.position, replays_of(_floor_us(question)))
        self.inputs = make.tensors((ValueKind.INPUT,), by_source=False)
        self.tried = self.accepted = 0
        self.refused: list[tuple[str, str, str, str]] = []
        self.trials: list[ChainTrial] = []
        self.ratios: dict[tuple[str, Step], float] = {}  # of each alternative over what was held when it was tried last

    def captured(self, selections: tuple[Selection, ...]) -> Variant:
        """The step under these selections."""
        return self._capture(make_program(self.q.graph, self.q.regions, {s.signature: s for s in selections}))

    def _capture(self, program: Program) -> Variant:
        for source in program.sources:
            if source.digest not in self.kernels:  # the store has dropped it since
                self.kernels[source.digest] = self.backend.build(source, self.q.target)
        self._bind_calls(program)
        executables = Executables(device=self.backend.device, backend=self.backend, kernels=self.kernels, calls=self.calls)
        bound = bind(program, self.weights, self.states.tensors, self.inputs, executables)
        return CapturedVariant(bound, self.states, self.backend)

    def _bind_calls(self, program: Program) -> None:
        for segment in program.segments:
            if segment.is_call and segment.step is not None and segment.match is not None:
                key = call_key(segment.step, segment.version, segment.match)
                if key not in self.calls:
                    self.calls[key] = bind_call(segment.step, segment.match, self.catalog, self.q.target, segment.version)

    def sweep(self) -> ChainAnswer:
        """Try every alternative in turn and, while that helps, those that came close once more, within the budget."""
        deadline = time.monotonic() + self.q.budget_s
        incumbent = self.q.selections
        best = self.captured(incumbent)
        first_us = statistics.median(best.sample_us() for _ in range(PAIRS))
        incumbent, best = self._sound(incumbent, best)
        for again in (False, True):
            before = self.accepted
            for alternative in self.q.alternatives:
                if time.monotonic() > deadline:
                    break
                if _holds(incumbent, alternative) or (again and not self._came_close(alternative)):
                    continue
                challenger = _replaced(incumbent, alternative)
                captured = self._try(challenger, best, alternative)
                if captured is not None:
                    incumbent, best = challenger, captured
            if self.accepted == before:
                break
        incumbent, best = self._two_at_a_time(incumbent, best, deadline)
        us = statistics.median(best.sample_us() for _ in range(PAIRS))
        sound, best = self._sound(incumbent, best)
        if sound is not incumbent:
            incumbent, us = sound, statistics.median(best.sample_us() for _ in range(PAIRS))
        framework_us = self._framework_us() if self.q.with_framework else 0.0
        return ChainAnswer(selections=incumbent, us=us, first_us=first_us, framework_us=framework_us, tried=self.tried,
                           accepted=self.accepted, refused=tuple(self.refused), trials=tuple(self.trials))

    def _came_close(self, alternative: Alternative) -> bool:
        """Whether what else has been replaced since may make up for what it lost by; not where it lost much, or was wrong."""
        if alternative.selected is None:
            return True
        ratio = self.ratios.get((alternative.signature, alternative.selected.step))
        return ratio is None or 0.0 < ratio < NEAR

    def _two_at_a_time(self, incumbent: tuple[Selection, ...], best: Variant, deadline: float) -> tuple[tuple[Selection, ...], Variant]:
        """What is left of the time goes to neighbours changed together; see ``neighbours``."""
        options = {(a.signature, a.selected.step): a for a in self.q.alternatives if a.selected is not None}
        for one, other in replacements(incumbent, self.q.regions, self.ratios):
            first, second = options[one], options[other]
            if time.monotonic() > deadline:
                break
            if _holds(incumbent, first) or _holds(incumbent, second):
                continue
            challenger = _replaced(_replaced(incumbent, first), second)
            captured = self._try(challenger, best, first, second)
            if captured is not None:
                incumbent, best = challenger, captured
        return incumbent, best

    def _sound(self, incumbent: tuple[Selection, ...], best: Variant) -> tuple[tuple[Selection, ...], Variant]:
        """The incumbent if it still does its work, else without the step that does not; without any if that is not one alone."""
        why = best.wrong()
        if not why:
            return incumbent, best
        removals = [Alternative(signature=s.signature, match_id=x.step.match_id, selected=None) for s in incumbent for x in s.steps]
        for removal in removals:
            self.phase(f"without {removal.match_id}")
            challenger = _replaced(incumbent, removal)
            captured = self._captured_or_none(challenger)
            if captured is None or _fails_when_timed(captured):
                continue
            step = next(x for s in incumbent if s.signature == removal.signature for x in s.steps if x.step.match_id == removal.match_id)
            self._take_out(removal.signature, step, why)
            return challenger, captured
        for selection in incumbent:
            for step in selection.steps:
                self._take_out(selection.signature, step, why)
        nothing = tuple(evolve(s, steps=()) for s in incumbent)
        return nothing, self.captured(nothing)

    def _take_out(self, signature: str, step: SelectedStep, why: str) -> None:
        self._refuse(signature, step, why)
        self.trials.append(ChainTrial(signature=signature, match_id=step.step.match_id, step=None, refused=why, taken=True))

    def _refuse(self, signature: str, step: SelectedStep, why: str) -> None:
        self.refused.append((signature, step.step.match_id, str(step.step), f"after it was timed inside the captured chain, {why}"))

    def _captured_or_none(self, selections: tuple[Selection, ...]) -> Variant | None:
        try:
            return self.captured(selections)
        except AgentCompileError:
            return None
        except Exception:  # an implementation may raise anything
            if self.backend.is_lost():  # which ends this worker
                raise
            return None

    def _framework_us(self) -> float:
        self.phase("framework")
        try:
            framework = self._capture(framework_program(self.q.graph))
        except Exception:
            if self.backend.is_lost():
                raise
            return 0.0  # what cannot be captured is no bar for what can
        return statistics.median(framework.sample_us() for _ in range(3))

    def _try(self, challenger: tuple[Selection, ...], best: Variant, what: Alternative, *beside: Alternative) -> Variant | None:
        self.phase(" with ".join(map(str, (what, *beside))))
        self.tried += not beside
        captured = self._captured_or_none(challenger)
        ratio, why = (0.0, "") if captured is None else self._compared(captured, best)
        if why and what.selected is not None and not beside:
            self._refuse(what.signature, what.selected, why)
        taken = bool(ratio) and not why and ratio < 1.0 - self.q.margin
        step = what.selected.step if what.selected is not None else None
        self.trials.append(ChainTrial(signature=what.signature, match_id=what.match_id, ratio=ratio, refused=why, taken=taken, step=step,
                                      beside=tuple((a.signature, a.selected.step) for a in beside if a.selected is not None)))
        if step is not None and not beside:
            self.ratios[what.signature, step] = 0.0 if why else ratio
        self.accepted += taken
        return captured if taken else None

    def _compared(self, captured: Variant, best: Variant) -> tuple[float, str]:
        """The upper bound of the paired ratio, and what is wrong with a challenger that would win by it."""
        quick = captured.sample_us() / best.sample_us()
        if quick > 1.01:
            return quick, ""
        ratios = []
        for pair in range(PAIRS):
            samples = (captured.sample_us(), best.sample_us()) if pair % 2 else tuple(reversed((best.sample_us(), captured.sample_us())))
            ratios.append(samples[0] / samples[1])
            if lower_bound(ratios) > 1.0 - self.q.margin:
                break  # more pairs would not make it win
        ratio = upper_bound(ratios)
        return ratio, captured.wrong() if ratio < 1.0 - self.q.margin else ""


def _fails_when_timed(captured: Variant) -> str:
    captured.sample_us()
    return captured.wrong()


def _floor_us(question: ChainQuestion) -> float:
    weights = {value.source: value.spec.nbytes for value in question.graph.values if value.kind is ValueKind.WEIGHT}
    return question.target.floor_us(sum(weights.values()))


def upper_bound(ratios: list[float]) -> float:
    """Upper end of the 95 % confidence interval of the mean of paired ratios (normal approximation with t for few pairs)."""
    return statistics.mean(ratios) + _half_width(ratios)


def lower_bound(ratios: list[float]) -> float:
    """Its lower end."""
    return statistics.mean(ratios) - _half_width(ratios)


def _half_width(ratios: list[float]) -> float:
    if len(ratios) < 2:
        return math.inf
    t = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(ratios), 2.0)
    return t * statistics.stdev(ratios) / math.sqrt(len(ratios))


def _holds(selections: tuple[Selection, ...], alternative: Alternative) -> bool:
    """Whether the alternative is what is selected already (or would remove a step that is gone)."""
    steps = [
        s for sel in selections if sel.signature == alternative.signature for s in sel.steps if s.step.match_id == alternative.match_id
    ]
    if alternative.selected is None:
        return not steps
    return any(s.step == alternative.selected.step for s in steps)


def _replaced(selections: tuple[Selection, ...], alternative: Alternative) -> tuple[Selection, ...]:
    def steps(selection: Selection) -> tuple[SelectedStep, ...]:
        others = [s for s in selection.steps if s.step.match_id != alternative.match_id]
        return (*others, alternative.selected) if alternative.selected else tuple(others)

    return tuple(evolve(s, steps=steps(s)) if s.signature == alternative.signature else s for s in selections)
