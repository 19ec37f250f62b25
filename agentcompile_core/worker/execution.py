"""Runs one source on made-up operands under guard: the ``TrialRun`` that validators get."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define
from torch import Tensor

from ..errors import ContractError
from ..ir import serial
from ..ir.region import Role
from ..ir.source_check import argument_values
from ..ir.verdict import Case, Trial
from ..ops.bits import same_bits
from ..ops.reference import Bounded, oracle
from ..ops.reference.second_opinion import Disagreement, disagreement
from ..plugin.interfaces import Backend
from ..plugin.match_kind import MatchKind, plain_kind
from ..runtime.executables import BoundCall
from .buffers import GIVEN, READ_ONLY, Buffers, Watch
from .live_part import LivePart, live_part
from .operands import graph_values, make_inputs, split_values
from .shared_weights import SharedWeights

FULL = 0  # depth of the reference: every reduction in full
ORACLE_BYTES = 1 << 30  # references kept, so that the candidates of one match share them
HOST = "cpu"


class Oracles:
    """References by graph, case and reduction depth, the oldest dropped beyond 1 GiB, and the weights that cases share (``weights``).

    Safe to use from several threads.

    Values do not depend on the depth, so the second opinion on them is asked for once per graph and case.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an opinion is asked for while a reference is made
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reference")
        self._kept: dict[tuple[str, Case, int], dict[str, Bounded]] = {}
        self._opinions: dict[tuple[str, Case], str] = {}
        self._nbytes = 0
        self.weights = SharedWeights()

    def opinion(self, key: tuple[str, Case], ask: Callable[[], str]) -> str:
        """What the framework has against the reference under ``key`` (empty: nothing), asked for if it is not known."""
        with self._lock:
            if key not in self._opinions:
                self._opinions[key] = ask()
            return self._opinions[key]

    def get(self, key: tuple[str, Case, int], make: Callable[[], dict[str, Bounded]]) -> dict[str, Bounded]:
        """The reference under ``key``, made if it is not there."""
        with self._lock:
            if key not in self._kept:
                made = make()
                self._nbytes += _nbytes(made)
                while self._kept and self._nbytes > ORACLE_BYTES:
                    self._nbytes -= _nbytes(self._kept.pop(next(iter(self._kept))))
                self._kept[key] = made
            return self._kept[key]

    def knows(self, key: tuple[str, Case, int]) -> bool:
        """Whether the reference under ``key`` is there."""
        return key in self._kept

    def beside(self, make: Callable[[], Any]) -> "Future[Any]":
        """Do something on the thread of the references, one after the other."""
        return self._thread.submit(make)


def _nbytes(made: dict[str, Bounded]) -> int:
    return sum(16 * bound.value.numel() + (0 if bound.rest is None else bound.rest.nbytes) for bound in made.values())


@define(kw_only=True, eq=False)
class Result:
    """What one run left behind, on the backend's device, by operand name.

    ``inputs`` are the operands as they were before the run; ``outputs`` every operand that may be written, afterwards.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    guards_intact: bool
    inputs_unchanged: bool
    workspaces_restored: bool
    detail: str = ""


class Execution:
    """A trial with its loaded kernel. Implements ``TrialRun``."""

    def __init__(self, trial: Trial, backend: Backend, handle: Any, bound: BoundCall | None = None,
                 oracles: Oracles | None = None, kind: MatchKind | None = None) -> None:
        self.trial, self.backend, self.handle, self.bound = trial, backend, handle, bound
        self.kind = kind or plain_kind(trial.match.kind)
        self._oracles = oracles or Oracles()
        self._digest = serial.digest(trial.graph, trial.match, backend.device)  # references lie where they were made
        self._runs = 0
        self._before: tuple[Case, Buffers, dict[str, Tensor]] | None = None  # of the first run of a case, for the second
        # Made beside the run of a kernel: the reference of its operands, and the operands of the next case.
        self._ahead: tuple[Case, dict[str, Tensor], Future[dict[str, Bounded]]] | None = None
        self._next: tuple[Case, Future[dict[str, Tensor]]] | None = None
        self._last: tuple[Case, dict[str, Tensor], Watch, dict[str, Tensor]] | None = None  # the last run, if it was a case's first
        self.fault: BaseException | None = None  # the last exception that came from here, and not from whoever asked

    @property
    def capturable(self) -> bool:
        """Whether a captured graph may hold a run."""
        return self.bound is None or self.bound.capturable

    @property
    def device(self) -> str:
        """torch device type of the operands."""
        return self.backend.device

    @contextmanager
    def _own(self) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            self.fault = exc
            raise

    def run(self, case: Case, poison: float) -> Result:
        """Make the inputs of ``case``, fill outputs with ``poison``, run once, synchronize, look at every buffer.

        Every call uses other addresses than the one before it.
        """
        with self._own():
            return self._run(case, poison)

    def _run(self, case: Case, poison: float) -> Result:
        self._runs += 1
        self._last = None
        buffers = Buffers(self.trial, self.device, poison, shift_bytes=256 * (self._runs % 3), misaligned=case.misaligned, alone=case.alone)
        before = self._before if self._before is not None and self._before[0] == case else None
        self._before = None
        if before is None:
            made = self._fill(case, buffers)
            states = {name: tensor.clone() for name, tensor in buffers.tensors(Role.STATE).items()}
        else:  # the second run of a case: the inputs of the first, which it left as they were
            _, first, states = before
            buffers.fill_from(first)
            for name, tensor in buffers.tensors(Role.STATE).items():
                tensor.copy_(states[name])
        watch = Watch(buffers, None if before is None else before[1])
        if before is None and made is not None:
            self._look_ahead(case, made)
        run = self.prepared(buffers)
        run(self.stream())
        self.synchronize()
        touched = watch.touched()
        # States are copied once more: who asks may change what it gets, and the second run needs them as they were.
        inputs = {**buffers.tensors(*READ_ONLY), **{name: tensor.clone() for name, tensor in states.items()}}
        if touched:  # the reference is shared by all candidates: it must not see what this one wrote
            made = make_inputs(self.trial.match, self.kind, case, self.device)
            inputs = {name: made[name] for name in inputs}
        elif before is None:
            self._before, self._last = (case, buffers, states), (case, dict(inputs), watch, states)
        return Result(
            inputs=inputs, outputs=buffers.tensors(Role.OUTPUT, Role.STATE), guards_intact="wrote outside" not in touched,
            inputs_unchanged="changed" not in touched, workspaces_restored="workspace not zero again" not in touched,
            detail="; ".join(f"{what}: {', '.join(names)}" for what, names in touched.items()))

    def _fill(self, case: Case, buffers: Buffers) -> dict[str, Tensor] | None:
        """Make the inputs of ``case`` in ``buffers``; where kernels run on the host, return them once more, out of every kernel's reach."""
        if self.device != HOST:
            make_inputs(self.trial.match, self.kind, case, self.device, into=buffers.tensors(*GIVEN))
            return None
        begun, self._next = self._next, None
        known = begun is not None and begun[0] == case
        made = begun[1].result() if begun and known else self._made_on_host(case)
        for name, tensor in buffers.tensors(*GIVEN).items():
            tensor.copy_(made[name])
        return made

    def _look_ahead(self, case: Case, made: dict[str, Tensor]) -> None:
        """A kernel on the host has one thread: begin with the reference beside it, and with the operands of the next case."""
        if not self._oracles.knows((self._digest, case, FULL)):
            self._ahead = case, made, self._oracles.beside(lambda: self._expected(case, made))
        cases = self.trial.cases
        number = cases.index(case) + 1 if case in cases else len(cases)
        if number < len(cases):
            following = cases[number]
            self._next = following, self._oracles.beside(lambda: self._made_on_host(following))

    def _made_on_host(self, case: Case) -> dict[str, Tensor]:
        return make_inputs(self.trial.match, self.kind, case, HOST, shared=self._oracles.weights)

    def inputs(self, case: Case, device: str) -> dict[str, Tensor]:
        """The operands of ``case`` that are not outputs, as ``run`` makes them, on another device."""
        with self._own():
            return make_inputs(self.trial.match, self.kind, case, device)

    def expected(self, case: Case, inputs: dict[str, Tensor]) -> dict[str, Bounded]:
        """Reference and error budget by value name, for the ``inputs`` of a run of ``case`` (unchanged by that run).

        The budget is the core's own: every reduction is charged in full (depth 0), whatever a source declares.

        Raises:
            Disagreement: the framework in float64 gives another answer; no kernel can be judged by this reference.
        """
        with self._own():
            ahead, self._ahead = self._ahead, None
            if ahead is None or ahead[0] != case:
                return self._expected(case, inputs)
            if all(same_bits(tensor, ahead[1][name]) for name, tensor in inputs.items()):
                return ahead[2].result()
            return self.apart(case, inputs)  # whoever asks changed them

    def apart(self, case: Case, inputs: dict[str, Tensor]) -> dict[str, Bounded]:
        """The same for ``inputs`` of which nobody knows whether they are those of ``case``. Not kept."""
        with self._own():
            live, reference = self._live_part(case), self._reference(case, inputs, inputs)
            return reference if live is None else live.completed(reference, self._graph_values(inputs))

    def may_share(self, case: Case, inputs: dict[str, Tensor]) -> bool:
        """Whether ``expected`` may keep the reference of ``inputs`` for all candidates: nobody changed them since the run of ``case``."""
        if self._oracles.knows((self._digest, case, FULL)) or (self._ahead is not None and self._ahead[0] == case):
            return True  # it is there, or ``expected`` compares them with those that it was made of
        if self._last is None or self._last[0] != case or inputs.keys() != self._last[1].keys():
            return False
        _, handed, watch, states = self._last
        same = all(tensor is handed[name] for name, tensor in inputs.items()) and not watch.touched()
        return same and all(same_bits(handed[name], tensor) for name, tensor in states.items())

    def forget_runs(self) -> None:
        """The next run makes its inputs anew: whoever asked for the one before may have changed them."""
        self._before = self._last = None

    def following(self, inputs: dict[str, Tensor]) -> dict[str, Bounded]:
        """The same for ``inputs`` that no case makes: what a run has left behind. Not kept."""
        with self._own():
            return self._reference(self.trial.cases[0], inputs, inputs)

    def _expected(self, case: Case, inputs: dict[str, Tensor]) -> dict[str, Bounded]:
        live = self._live_part(case)
        expected = self._oracles.get((self._digest, case, FULL), lambda: self._compact(case, inputs, live))
        seen = self._oracles.opinion((self._digest, case), lambda: "")  # asked for when the reference was made
        if seen:
            raise Disagreement(self.trial.match.id, seen)
        return expected if live is None else live.completed(expected, self._graph_values(inputs))

    def _compact(self, case: Case, inputs: dict[str, Tensor], live: LivePart | None) -> dict[str, Bounded]:
        """The reference of a case as it is kept, and the second opinion on it: without what can be taken from the inputs."""
        wide = {name: self._oracles.weights.widened(tensor) for name, tensor in inputs.items()}
        expected = self._reference(case, inputs, wide)
        self._oracles.opinion((self._digest, case), lambda: self._disagreement(case, wide, expected))
        return expected if live is None else live.compact(expected, self._graph_values(inputs))

    def _disagreement(self, case: Case, inputs: dict[str, Tensor], expected: dict[str, Bounded]) -> str:
        values, live = self._graph_values(inputs), self._live_part(case)
        if live is None or not all(live.has(name, expected[name]) for name in live.lengths if name in expected):
            return disagreement(self.trial.graph, values, expected)
        return disagreement(live.graph, live.narrowed(values), expected)

    def _reference(self, case: Case, inputs: dict[str, Tensor], wide: dict[str, Tensor]) -> dict[str, Bounded]:
        """Of ``inputs``, of the live part alone; ``wide`` holds the same numbers, what there is of them already in float64."""
        own = self.kind.reference(self.trial.match, self.trial.graph, self._graph_values(inputs), FULL)
        missing = [] if own is None else [name for name in self.trial.graph.outputs if name not in own]
        if missing:
            raise ContractError(f"the reference of kind {self.kind.name} lacks {', '.join(missing)}; it must return every output")
        if own is not None:
            return own
        values, live = self._graph_values(wide), self._live_part(case)
        return oracle(self.trial.graph, values, FULL) if live is None else oracle(live.graph, live.narrowed(values), FULL)

    def _live_part(self, case: Case) -> LivePart | None:
        return live_part(self.trial.match, self.trial.graph, self.kind, case)

    def _graph_values(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return graph_values(self.trial.match, self.trial.graph, tensors)

    def values(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by value name instead of operand name."""
        found: dict[str, Tensor] = {}
        for name, tensor in outputs.items():
            found.update(split_values(self.trial.match.need(name), tensor, self.trial.graph))
        return found

    def prepared(self, buffers: Buffers) -> Callable[[int], None]:
        """``run(stream)``: all launches over ``buffers``."""
        if self.bound is not None:
            return _called(self.bound, buffers.tensors())
        addresses = buffers.addresses
        runs = [self.backend.prepare_launch(self.handle, launch, argument_values(launch, addresses), launch.pdl)
                for launch in self.trial.source.launches]
        if not runs:
            raise ContractError(f"source {self.trial.source.digest} has no launches")
        if len(runs) == 1:
            return runs[0]

        def run(stream: int) -> None:
            for one in runs:
                one(stream)

        return run

    def stream(self) -> int:
        """The current stream, 0 where there are none."""
        return self.backend.stream()

    def synchronize(self) -> None:
        """Wait for the device; raises what a kernel did wrong."""
        self.backend.synchronize()


def _called(bound: BoundCall, operands: dict[str, Tensor]) -> Callable[[int], None]:
    def run(stream: int) -> None:
        with torch.no_grad():
            bound.run(**operands)

    return run
