"""Runs one source on made-up operands under guard: the ``TrialRun`` that validators get."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define
from torch import Tensor

from ..errors import ContractError
from ..ir import serial
from ..ir.candidate import Workspace
from ..ir.graph import DType, TensorSpec
from ..ir.region import Access, Operand, Role
from ..ir.source_check import argument_values
from ..ir.verdict import Case, Trial
from ..ops.reference import Bounded, oracle
from ..ops.reference.second_opinion import Disagreement, disagreement
from ..plugin.interfaces import Backend
from ..plugin.match_kind import MatchKind, plain_kind
from ..runtime.executables import BoundCall
from .memory import Guarded, Unchanged, guarded
from .operands import graph_values, make_inputs, split_values

OUTPUT_GUARD = 0xA5
VECTOR_BYTES = 16
FULL = 0  # depth of the reference: every reduction in full
ORACLE_BYTES = 1 << 30  # references kept, so that the candidates of one match share them


class Oracles:
    """References by graph, case and reduction depth; the oldest are dropped beyond 1 GiB.

    Values do not depend on the depth, so the second opinion on them is asked for once per graph and case.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Case, int], dict[str, Bounded]] = {}
        self._opinions: dict[tuple[str, Case], str] = {}

    def opinion(self, key: tuple[str, Case], ask: Callable[[], str]) -> str:
        """What the framework has against the reference under ``key`` (empty: nothing), asked for if it is not known."""
        if key not in self._opinions:
            self._opinions[key] = ask()
        return self._opinions[key]

    def get(self, key: tuple[str, Case, int], make: Callable[[], dict[str, Bounded]]) -> dict[str, Bounded]:
        """The reference under ``key``, made if it is not there."""
        if key not in self._kept:
            made = make()
            while self._kept and _nbytes(self._kept) + _nbytes({key: made}) > ORACLE_BYTES:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = made
        return self._kept[key]


def _nbytes(kept: dict[tuple[str, Case, int], dict[str, Bounded]]) -> int:
    return sum(16 * bound.value.numel() for values in kept.values() for bound in values.values())


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


class Buffers:
    """Guarded buffers of all operands and workspaces of a trial; ``shift_bytes`` moves them to other addresses.

    ``misaligned``: operands begin at odd multiples of what the runtime promises (``promised_alignment``).
    """

    def __init__(self, trial: Trial, device: str, poison: float = float("nan"), shift_bytes: int = 0, misaligned: bool = False) -> None:
        self.trial, self.device = trial, device
        self.operands: dict[str, Guarded] = {}
        self.workspaces: dict[str, Guarded] = {}
        for operand in trial.match.operands:
            written = operand.access is not Access.READ
            shift = shift_bytes + (promised_alignment(operand) if misaligned else 0)
            self.operands[operand.name] = guarded(operand.spec, device, OUTPUT_GUARD if written else 0xFF, shift)
            if operand.role is Role.OUTPUT:
                fill(self.operands[operand.name].tensor, poison)
        for workspace in trial.source.workspaces:
            self.workspaces[workspace.name] = _workspace(workspace, device)

    def tensors(self, *roles: Role) -> dict[str, Tensor]:
        """Operand tensors with one of ``roles`` (none given: all)."""
        return {o.name: self.operands[o.name].tensor for o in self.trial.match.operands if not roles or o.role in roles}

    @property
    def addresses(self) -> dict[str, int]:
        """Addresses of operands and workspaces by name."""
        return {name: buffer.address for name, buffer in (*self.operands.items(), *self.workspaces.items())}

    def damaged(self) -> list[str]:
        """Names of the buffers whose guard bands were written."""
        return [name for name, buffer in (*self.operands.items(), *self.workspaces.items()) if not buffer.intact]


def promised_alignment(operand: Operand) -> int:
    """Bytes that the address of an operand is a multiple of: 16; activations lie side by side, so less where they are ragged."""
    ragged = operand.role in (Role.INPUT, Role.OUTPUT) and operand.spec.nbytes % VECTOR_BYTES
    return operand.spec.dtype.bytes if ragged else VECTOR_BYTES


def fill(tensor: Tensor, poison: float) -> None:
    """Fill with a poison: as it is in floats, as an integer far out of range in integers."""
    if tensor.is_floating_point():
        tensor.fill_(poison)
    else:
        tensor.fill_(-77 if poison != poison else int(poison) - 1000)


def _workspace(workspace: Workspace, device: str) -> Guarded:
    buffer = guarded(TensorSpec(shape=(workspace.nbytes,), dtype=DType.U8), device, OUTPUT_GUARD)
    buffer.tensor.fill_(0 if workspace.zeroed else 0xFF)
    return buffer


class Execution:
    """A trial with its loaded kernel. Implements ``TrialRun``."""

    def __init__(self, trial: Trial, backend: Backend, handle: Any, bound: BoundCall | None = None,
                 oracles: Oracles | None = None, kind: MatchKind | None = None) -> None:
        self.trial, self.backend, self.handle, self.bound = trial, backend, handle, bound
        self.kind = kind or plain_kind(trial.match.kind)
        self._oracles = oracles or Oracles()
        self._digest = serial.digest(trial.graph, trial.match)
        self._runs = 0
        self._drawn: tuple[Case, dict[str, Tensor]] | None = None  # of the run before this one, for a second run of its case
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
        buffers = Buffers(self.trial, self.device, poison, shift_bytes=256 * (self._runs % 3), misaligned=case.misaligned)
        roles = (Role.INPUT, Role.WEIGHT, Role.CONSTANT, Role.STATE, Role.LENGTH)
        self._fill(case, buffers.tensors(*roles))
        states = {name: tensor.clone() for name, tensor in buffers.tensors(Role.STATE).items()}
        watched = {name: Unchanged(tensor) for name, tensor in buffers.tensors(*(r for r in roles if r is not Role.STATE)).items()}
        run = self.prepared(buffers)
        run(self.stream())
        self.synchronize()
        result = self._result(buffers, states, watched)
        if not result.inputs_unchanged:  # the reference is shared by all candidates: it must not see what this one wrote
            made = make_inputs(self.trial.match, self.kind, case, self.device)
            result.inputs.update({name: made[name] for name in watched})
        self._drawn = None if self._drawn else (case, result.inputs)
        return result

    def _fill(self, case: Case, into: dict[str, Tensor]) -> None:
        """The operands of ``case``: those of the run before where that ran the same case, else drawn."""
        if self._drawn is not None and self._drawn[0] == case:
            for name, tensor in self._drawn[1].items():
                into[name].copy_(tensor)
            return
        self._drawn = None
        make_inputs(self.trial.match, self.kind, case, self.device, into=into)

    def _result(self, buffers: Buffers, states: dict[str, Tensor], watched: dict[str, Unchanged]) -> Result:
        damaged = buffers.damaged()
        changed = [name for name, before in watched.items() if not before.holds()]
        dirty = [w.name for w in self.trial.source.workspaces if w.zeroed and bool(buffers.workspaces[w.name].tensor.any())]
        notes = [f"{what}: {', '.join(names)}" for what, names in (
            ("wrote outside", damaged), ("changed", changed), ("workspace not zero again", dirty)) if names]
        return Result(
            inputs={**{name: buffers.operands[name].tensor for name in watched}, **states},
            outputs=buffers.tensors(Role.OUTPUT, Role.STATE), guards_intact=not damaged, inputs_unchanged=not changed,
            workspaces_restored=not dirty, detail="; ".join(notes))

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
            return self._expected(case, inputs)

    def _expected(self, case: Case, inputs: dict[str, Tensor]) -> dict[str, Bounded]:
        graph = self.trial.graph
        values = graph_values(self.trial.match, graph, inputs)
        expected = self._oracles.get((self._digest, case, FULL), lambda: self._reference(values, FULL))
        seen = self._oracles.opinion((self._digest, case), lambda: disagreement(graph, values, expected))
        if seen:
            raise Disagreement(self.trial.match.id, seen)
        return expected

    def _reference(self, values: dict[str, Tensor], depth: int) -> dict[str, Bounded]:
        own = self.kind.reference(self.trial.match, self.trial.graph, values, depth)
        missing = [] if own is None else [name for name in self.trial.graph.outputs if name not in own]
        if missing:
            raise ContractError(f"the reference of kind {self.kind.name} lacks {', '.join(missing)}; it must return every output")
        return oracle(self.trial.graph, values, depth) if own is None else own

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
