"""The test that every backend passes: subclass, give one trial that is right and a source that does not compile, run pytest.

    class TestMine(BackendConformance):
        backend = MyBackend()
        trial = a_trial_of_a_trivial_kernel_in_my_language
        broken = evolve(trial.source, code="this is no source", digest="0badc0de")
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest

from ..errors import BuildError, Reject
from ..ir.candidate import Kernel, StepSource
from ..ir.region import Role
from ..ir.target import Target
from ..ir.verdict import Case, Trial
from ..ops.reference import compare
from ..plugin.interfaces import Backend
from ..runtime.moving_launches import enqueue, moving_launch
from ..worker.buffers import GIVEN, Buffers, fill
from ..worker.execution import Execution
from ..worker.operands import make_inputs
from .any_length import demand_any_length
from .demands import catalog_of, demand, demand_answer, demand_identity
from .reserved import SIZES, demand_grows
from .tried import POISONS, misjudged, what_raised

REPETITIONS = 3


class BackendConformance:
    """Subclass as ``class Test...``: ``backend``, ``trial`` (a correct kernel for it, with cases), ``broken`` (a source it must refuse).

    What this machine cannot do (build, launch) is skipped with the backend's own reason.
    """

    backend: ClassVar[Backend]
    trial: ClassVar[Trial]
    broken: ClassVar[StepSource]

    def test_identity(self) -> None:
        """It is a Backend with a name, a version, a device and languages, and answers what it is asked about itself."""
        backend = self.backend
        demand_identity(backend, Backend)
        demand(type(backend.device) is str and bool(backend.device), f"device is {backend.device!r}; name a torch device type")
        demand(len(backend.languages) > 0, "languages is empty; name at least one that it builds")
        demand_answer(backend.available(), "available()")
        demand_answer(backend.can_build(self.trial.target), f"can_build({self.trial.target.name})")
        demand(bool(backend.compiler()), "compiler() is empty; it is part of every cache key")
        live = backend.live_target()
        demand(live is None or isinstance(live, Target), f"live_target() returned {live!r}; it must return a Target or None")
        demand(all(limit > 0 for limit in backend.deadlines_s.values()), f"deadlines_s holds {dict(backend.deadlines_s)}; all must be > 0")

    def test_library_and_suffixes(self) -> None:
        """Its folders exist, their digest is stable and only of languages that it builds, names of files end in a suffix."""
        backend = self.backend
        missing = [str(folder) for folder in backend.include_dirs() if not folder.is_dir()]
        demand(not missing, f"include_dirs() names {', '.join(missing)}, which is no folder")
        for language in (*backend.languages, "no_such_language"):
            first, second = (backend.library_digest(language) for _ in range(2))
            demand(first == second, f"library_digest({language!r}) gave another answer the second time")
            suffix = backend.suffix(language)
            demand(suffix.startswith("."), f"suffix({language!r}) is {suffix!r}; it must begin with '.'")
        demand(not backend.library_digest("no_such_language"), "library_digest() names a digest for a language that it does not build")

    def test_build_returns_a_whole_kernel(self) -> None:
        """A kernel names its source, backend, architecture, compiler and the digest of its binary."""
        kernel, target = self._kernel(), self.trial.target
        said = (kernel.digest, kernel.backend, kernel.arch, kernel.compiler)
        wanted = (self.trial.source.digest, self.backend.name, target.arch, self.backend.compiler())
        demand(said == wanted, f"build() returned (digest, backend, arch, compiler) {said}, expected {wanted}")
        demand(len(kernel.binary) > 0, "build() returned an empty binary")
        demand(kernel.sha256 == hashlib.sha256(kernel.binary).hexdigest(), "sha256 of the kernel is not that of its binary")

    def test_a_broken_source_is_refused(self) -> None:
        """A source that does not compile raises BuildError with the compiler's words, and nothing else."""
        self._kernel()
        try:
            self.backend.build(self.broken, self.trial.target)
        except BuildError as exc:
            demand(bool(str(exc).strip()), "BuildError says nothing; hand on what the compiler said")
        except Exception as exc:
            raise AssertionError(f"build() raised {type(exc).__name__} for a broken source; raise BuildError") from exc
        else:
            raise AssertionError("build() compiled a source that is broken")

    def test_loading_twice_gives_the_same_handle(self) -> None:
        """A binary is loaded into a process once."""
        kernel = self._kernel(launch=True)
        first, second = self.backend.load(kernel), self.backend.load(kernel)
        demand(first is second or first == second, "load() gave another handle for the same kernel")

    def test_launches_compute(self) -> None:
        """Every case is right under guard, at several addresses, launched again and again."""
        run = self._execution()
        for case in self.trial.cases:
            why = misjudged(run, case)
            demand(not why, f"[{case.family}]: {why}")

    def test_launches_move(self) -> None:
        """Where addresses of a launch can be given at every run: one that was prepared elsewhere computes there, again and again."""
        run, places = self._execution(), [Buffers(self.trial, self.backend.device, shift_bytes=shift) for shift in (0, 256, 0)]
        names = {operand.name: operand.name for operand in self.trial.match.operands}
        launches = [moving_launch(self.backend, run.handle, launch, places[0].addresses, names, launch.pdl)
                    for launch in self.trial.source.launches]
        for case in self.trial.cases:
            for buffers in places:
                make_inputs(self.trial.match, run.kind, case, self.backend.device, into=buffers.tensors(*GIVEN))
                why = self._wrong_after(run, case, buffers, partial(enqueue, launches, buffers.tensors(), self.backend.stream))
                demand(not why, f"a launch of prepare_moving() [{case.family}]: {why}")

    def test_time_is_told_or_refused(self) -> None:
        """One positive number of microseconds per repetition where it has a clock; a Reject where it has none."""
        run = self._execution()
        timed = run.prepared(Buffers(self.trial, self.backend.device, 0.0))
        answer = self.backend.time(timed, repetitions=REPETITIONS, runs_per_repetition=2)
        if isinstance(answer, Reject):
            demand(not self.backend.clock, f"clock is True, but time() refuses: {answer.reason}")
            demand_answer(answer, "time()")
            return
        demand(self.backend.clock, "clock is False, but time() tells a time")
        demand(len(answer) == REPETITIONS, f"time() returned {len(answer)} times for {REPETITIONS} repetitions")
        demand(all(math.isfinite(us) and us > 0 for us in answer), f"time() returned {answer}; microseconds must be finite and above 0")

    def test_what_is_captured_is_replayed(self) -> None:
        """Where it captures: a replay computes, again and again, and beside another of its owner; what fails leaves the device usable."""
        if not self.backend.captures:
            answer = self.backend.capture(lambda: None, owner=self)
            demand(isinstance(answer, Reject), f"captures is False, but capture() returned {answer!r}; return a Reject")
            demand_answer(answer, "capture()")
            return
        run = self._execution()
        first, second = (self._captured(run, case) for case in (self.trial.cases[0], self.trial.cases[-1]))
        for replayed in (first, second, first):
            why = replayed()
            demand(not why, f"a replay does not compute what was captured: {why}")
        raised = what_raised(lambda: self.backend.capture(_fails, owner=self))
        demand(not self.backend.is_lost(), "a capture that failed" + (f" ({raised})" if raised else "") + " left the device unusable")
        why = first()
        demand(not why, f"after a capture that failed a replay does not compute: {why}")

    def test_what_is_reserved_grows_in_place(self) -> None:
        """Where it reserves addresses: memory comes and goes behind them, contents stay, and what is not held reads as zeros."""
        if isinstance(reason := self.backend.available(), Reject):
            pytest.skip(f"{self.backend.name}: {reason.reason}")
        answer = self.backend.reserve(SIZES)
        if isinstance(answer, Reject):
            demand_answer(answer, "reserve()")
            return
        demand_grows(answer)

    def test_the_framework_runs_at_any_length(self) -> None:
        """Blocks around the framework's own model may overlap, change no results and swallow nothing."""
        if isinstance(reason := self.backend.available(), Reject):
            pytest.skip(f"{self.backend.name}: {reason.reason}")
        demand_any_length(self.backend)

    # ----

    def _captured(self, run: Execution, case: Case) -> Callable[[], str]:
        """What replays one run of ``case`` over poisoned outputs, and says what is wrong with them."""
        backend, buffers = self.backend, Buffers(self.trial, self.backend.device)
        make_inputs(self.trial.match, run.kind, case, backend.device, into=buffers.tensors(*GIVEN))
        launched = run.prepared(buffers)
        replay = backend.capture(lambda: launched(backend.stream()), warm_ups=1, owner=self)
        if isinstance(replay, Reject):
            raise AssertionError(f"captures is True, but capture() refuses a kernel of the backend: {replay.reason}")

        return lambda: self._wrong_after(run, case, buffers, replay)

    def _wrong_after(self, run: Execution, case: Case, buffers: Buffers, computes: Callable[[], None]) -> str:
        """What is wrong with the outputs, poisoned before, behind ``computes``."""
        for tensor in buffers.tensors(Role.OUTPUT).values():
            fill(tensor, POISONS[0])
        expected = run.expected(case, buffers.tensors(*GIVEN))
        computes()
        self.backend.synchronize()
        found = {name: compare(tensor, expected[name]) for name, tensor in run.values(buffers.tensors(Role.OUTPUT)).items()}
        return next((f"{name}: {one.detail}" for name, one in found.items() if not one.ok), "")

    def _kernel(self, launch: bool = False) -> Kernel:
        answers = [self.backend.can_build(self.trial.target), *([self.backend.available()] if launch else [])]
        reasons = [answer.reason for answer in answers if isinstance(answer, Reject)]
        if reasons:
            pytest.skip(f"{self.backend.name}: {reasons[0]}")
        return self.backend.build(self.trial.source, self.trial.target)

    def _execution(self) -> Execution:
        handle = self.backend.load(self._kernel(launch=True))
        return Execution(self.trial, self.backend, handle, kind=catalog_of(self.backend).kinds.get(self.trial.match.kind))


def _fails() -> None:
    raise RuntimeError("planted: this cannot be captured")
