"""The test that every implementation passes: subclass, give matches, run pytest.

    class TestMine(ImplementationConformance):
        implementation = MyImplementation()
        cases = (linear_case(n=48, k=64),)
        rejected = (norm_case(columns=64),)
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve
from torch.utils._python_dispatch import TorchDispatchMode

from ..ir.plan import Origin
from ..ir.region import Match
from ..ir.target import Target
from ..ir.verdict import Case as InputCase
from ..ir.verdict import Trial
from ..plugin.interfaces import Backend, Implementation
from ..plugin.match_kind import MatchKind
from ..runtime.executables import BoundCall
from ..worker.execution import Execution
from .demands import Case, catalog_of, demand, demand_accepts, demand_identity, sampled, space_of
from .doubles import FakeBackend, fake_trial
from .tried import call_trial, misjudged, run_call, what_raised

UNKNOWN_KIND = "no_such_kind"
# What makes the host wait for the device, so that no captured graph can hold it.
ASKS_THE_DEVICE = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::unique", "aten::equal",
                   "aten::_unique2", "aten::unique_dim", "aten::bincount", "aten::repeat_interleave.Tensor")


class ImplementationConformance:
    """Subclass as ``class Test...``: ``implementation``, ``cases`` it serves, cases ``rejected`` by it (a rule's package makes them).

    ``samples`` schedules of each case are bound and run on CPU tensors, and on the accelerator where there is one.
    """

    implementation: ClassVar[Implementation]
    cases: ClassVar[Sequence[Case]]
    rejected: ClassVar[Sequence[Case]] = ()
    target: ClassVar[Target] = fake_trial("honest").target
    samples: ClassVar[int] = 3

    def test_identity(self) -> None:
        """It is an Implementation with a name, a version, an origin and a word on capture, and there is something to try it on."""
        offered = self.implementation
        demand_identity(offered, Implementation)
        origin = getattr(offered, "origin", None)
        demand(origin in (Origin.HANDWRITTEN, Origin.THIRD_PARTY), f"origin is {origin!r}; use Origin.HANDWRITTEN or Origin.THIRD_PARTY")
        demand(type(offered.capturable) is bool, f"capturable is {offered.capturable!r}; use True or False")
        demand(len(self.cases) > 0, "cases is empty; give at least one match that the implementation serves")

    def test_accepts_and_explains(self) -> None:
        """It answers True for its cases, and a Reject with a reason for the others and for kinds it has never heard of."""
        served = [match for match, _ in self.cases]
        strange = evolve(served[0], kind=UNKNOWN_KIND)
        demand_accepts(self.implementation, served, (*(match for match, _ in self.rejected), strange), self.target)

    def test_space_is_bounded_and_repeatable(self) -> None:
        """Every space has 1 to 256 different points inside its own parameters, in the same order each time it is asked for."""
        for match, _ in self.cases:
            first, second = (space_of(self.implementation, match, self.target) for _ in range(2))
            demand(first == second, f"{match.id}: space() gave another answer the second time; it must depend on its arguments alone")

    def test_results_on_the_cpu(self) -> None:
        """Right within the error budget, every output written in place, inputs untouched, equal on other tensors."""
        self._run_on(FakeBackend())

    def test_results_on_the_device(self) -> None:
        """The same on the accelerator of this machine."""
        if not torch.accelerator.is_available():
            pytest.skip("torch sees no accelerator")
        self._run_on(_OnDevice())

    def test_capturable_is_true_of_it(self) -> None:
        """Where it says that a captured graph may hold it, it asks the device for nothing."""
        if not self.implementation.capturable:
            return
        backend = FakeBackend()
        for where, trial, kind, bound in self._bound():
            with _Watch() as watch:
                run_call(trial, BoundCall(run=_watched(bound.run, watch)), kind, backend).run(trial.cases[0], 0.0)
            asked = ", ".join(sorted(watch.asked))
            demand(not asked, f"{where}: capturable is True, but a run asks the device for a value ({asked})")

    # ----

    def _run_on(self, backend: Backend) -> None:
        for where, trial, kind, bound in self._bound():
            run = run_call(trial, bound, kind, backend)
            for case in trial.cases:
                found: list[str] = []
                raised = what_raised(partial(_judge_into, found, run, case))
                why = f"run() raised {raised}" if raised else found[0]
                demand(not why, f"{where} on {backend.device} [{case.family} {case.position}]: {why}")

    def _bound(self) -> Iterator[tuple[str, Trial, MatchKind, BoundCall]]:
        kinds = catalog_of(self.implementation).kinds
        for match, graph in self.cases:
            demand(match.kind in kinds, f"{match.id}: no installed region rule offers the kind {match.kind}; install the rule that does")
            trial = call_trial(match, graph, kinds[match.kind], self.target)
            for schedule in sampled(space_of(self.implementation, match, self.target), self.samples):
                where = f"{match.id} [{schedule}]"
                run = self.implementation.bind(match, schedule, self.target)
                demand(callable(run), f"{where}: bind() returned {type(run).__name__}; it must return a callable run(**operands)")
                demand(_takes(run, match), f"{where}: run() does not take every operand of the match by name")
                yield where, trial, kinds[match.kind], BoundCall(run=run, capturable=self.implementation.capturable)


def _takes(run: Any, match: Match) -> bool:
    import inspect

    try:
        inspect.signature(run).bind(**{operand.name: None for operand in match.operands})
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


class _OnDevice(FakeBackend):
    """Callables need of a backend only to know where their operands live."""

    name = "on_device"
    device = str(torch.accelerator.current_accelerator() or "cpu")


class _Watch(TorchDispatchMode):
    """Notes the operators that make the host wait, while ``on``."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.asked = False, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on and func.name() in ASKS_THE_DEVICE:
            self.asked.add(func.name())
        return func(*args, **(kwargs or {}))


def _watched(run: Any, watch: _Watch) -> Any:
    def watched(**operands: torch.Tensor) -> None:
        watch.on = True
        try:
            run(**operands)
        finally:
            watch.on = False

    return watched


def _judge_into(found: list[str], run: Execution, case: InputCase) -> None:
    found.append(misjudged(run, case))
