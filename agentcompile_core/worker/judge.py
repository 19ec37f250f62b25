"""The chain's judge, inside the worker: the shortened decode step on synthetic weights, captured and timed, A against B.

Steps are swept by their share of the time, then neighbours that came close alone are changed together. A challenger replaces the
incumbent only if the upper bound of their paired ratio is beyond the margin, and only if it still computes what its first run did: after
it was timed, on poisoned buffers. Order and seeds are fixed.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from ..ir import serial
from ..ir.candidate import Kernel
from ..ir.graph import ValueKind
from ..plugin.catalog import Catalog
from ..plugin.interfaces import Backend
from ..runtime.binder import bind
from ..runtime.executables import BoundCall, Executables, bind_call, call_key
from ..runtime.make_program import make_program
from ..runtime.program import Program, framework_program
from ..runtime.weights import WeightStore
from .captured import CapturedVariant, States, Variant, replays_of
from .chain_question import ChainQuestion, Selections
from .chain_search import ChainSearch
from .synthetic import Synthetic


def judge(argument: Any, state: Any, phase: Callable[[str], None]) -> Any:
    """Worker entry: a ChainQuestion as JSON in, a ChainAnswer as JSON out."""
    began = time.monotonic()  # kernels, weights and caches are made within the budget too
    question = serial.structure(argument, ChainQuestion)
    with torch.inference_mode():  # timed as sessions run: what stays outside of graphs writes to tensors that were made here
        return serial.unstructure(Judge(question, state.backend(question.backend), state.catalog, phase).sweep(began))


class Judge(ChainSearch):
    """Captures and times the variants on a device."""

    def __init__(self, question: ChainQuestion, backend: Backend, catalog: Catalog, phase: Callable[[str], None]) -> None:
        super().__init__(question, phase)
        self.backend, self.catalog = backend, catalog
        self.kernels: dict[str, Kernel] = {kernel.digest: kernel for kernel in question.kernels}
        self.calls: dict[str, BoundCall] = {}
        make = Synthetic(question, catalog.kinds, backend.device)
        self.weights = WeightStore.from_tensors(make.tensors((ValueKind.WEIGHT, ValueKind.CONSTANT), by_source=True), backend.device)
        self.states = States(make.tensors((ValueKind.STATE,), by_source=True), question.position, replays_of(_floor_us(question)))
        self.inputs = make.tensors((ValueKind.INPUT,), by_source=False)

    def captured(self, selections: Selections) -> Variant:
        """The step under these selections, captured."""
        return self._capture(make_program(self.q.graph, self.q.regions, {s.signature: s for s in selections}))

    def framework(self) -> Variant:
        """The step on the framework alone, captured."""
        return self._capture(framework_program(self.q.graph))

    def stand_at(self, position: int) -> None:
        """By the position that the states are reset to."""
        self.states.stand_at(position)

    def is_lost(self) -> bool:
        """Whether the backend says so."""
        return self.backend.is_lost()

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


def _floor_us(question: ChainQuestion) -> float:
    weights = {value.source: value.spec.nbytes for value in question.graph.values if value.kind is ValueKind.WEIGHT}
    return question.target.floor_us(sum(weights.values()))
