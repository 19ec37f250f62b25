"""The parent's side of the worker: jobs go out ahead of time, results come back in order, a lost child costs one job."""

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any

from attrs import define, evolve

from ..errors import AgentCompileError, Cause, UsageError
from ..garbage import look_further
from ..ir import serial
from ..ir.candidate import CALLABLE, Kernel
from ..ir.target import Target
from ..processes.child import Child, ChildEnded
from ..processes.environment import child_environment
from ..processes.fork_server import ForkServer, hold, release
from .protocol import CATALOG, Evaluation, Job
from .side_by_side import AHEAD, Evaluating, side_by_side

MAX_BUILDERS = 8
WINDOW = 24  # jobs that are with the child at a time; their builds run ahead
START_S = 180.0
DEADLINES_S = {"build": 150.0, "check": 120.0, "time": 60.0, "load": 60.0}
CONTROLS_S = 120.0
MAX_STARTS_WITHOUT_RESULT = 3
_FAULTS = (signal.SIGSEGV, signal.SIGBUS)


class WorkerLost(AgentCompileError):
    """The worker died, hung or refused during a ``call``. ``cause`` says which."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


@define
class _Sent:
    index: int
    job: Any  # a Job, or None
    is_again: bool = False  # asked a second time


class Worker:
    """Evaluates jobs in a child process, which is started on first use and replaced whenever it is lost.

    Args:
        catalog: ``module:function`` that gives the child its plugins.
        deadlines_s: seconds per phase (build, load, check, time) after which the child is killed.
        memory_bytes: resident memory of the child beyond which it is killed.
        builders: threads of the child that build ahead; 0: as many as there are processors, at most 8.
        settings: those of the plugins, as ``plugin.settings.document`` says them; every child is configured so.
    """

    def __init__(self, *, catalog: str = CATALOG, deadlines_s: dict[str, float] | None = None, memory_bytes: int = 48 << 30,
                 builders: int = 0, settings: dict[str, Any] | None = None, environment: tuple[str, ...] = ()) -> None:
        self.restarts = 0
        self._catalog, self._memory_bytes, self._settings, self._environment = catalog, memory_bytes, settings, environment
        self._builders = builders or min(MAX_BUILDERS, os.cpu_count() or 1)
        self._deadlines_s = {**DEADLINES_S, **(deadlines_s or {})}
        self._server: ForkServer | None = None  # what children are forked from
        self._child: Child | None = None
        self._starting: Child | None = None
        self._others: list[Worker] = []  # further children, where jobs run side by side
        self._abandoned = False

    def start(self, backend: str = "") -> None:
        """Start the child without waiting for it, so that its imports, and what ``backend`` prepares, overlap with other work."""
        if self._child is None and self._starting is None:
            self._starting = self._new_child()
            if backend:
                self._starting.send({"id": -1, "method": "prepare", "params": backend})

    @property
    def runs(self) -> bool:
        """Whether there is a child already that would take the next job."""
        return self._child is not None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child, or the children; the next job starts another one."""
        self._end()
        for other in self._others:
            other.close()
        self._release_server()

    def _release_server(self) -> None:
        if self._server is not None:
            release(self._server)
            self._server = None

    def _new_child(self) -> Child:
        look_further()  # something is searched for: that takes long, and makes much garbage
        if self._server is not None and self._server.ended:
            self._release_server()
        self._server = self._server or hold((sys.executable, "-m", __package__ or ""), child_environment(self._environment))
        return Child(self._server, self._catalog, self._builders, self._memory_bytes, self._settings)

    def _end(self) -> None:
        for child in (self._child, self._starting):
            if child is not None:
                child.kill()
        self._child = self._starting = None

    def _abandon(self) -> None:
        """End the child, and let whoever waits for it on another thread give up."""
        self._abandoned = True
        self._end()

    def evaluate_beside(self, jobs: Iterator[Job | None], *, stop_at: float | None = None,
                        progress: Callable[[int, str], None] = lambda index, phase: None) -> Iterator[tuple[int, Evaluation]]:
        """As ``evaluate``, in as many children as the machine has processors for, at most 4; results come as they are done.

        ``jobs`` gives None where what comes next depends on results that are still awaited.
        """
        lane = partial(self._lane, stop_at)
        return side_by_side(lane, lambda i: self._nth(i)._abandon(), jobs, stop_at, progress)

    def _lane(self, stop_at: float | None, index: int) -> Evaluating:
        return partial(self._nth(index)._one_by_one, stop_at)

    def _one_by_one(self, stop_at: float | None, jobs: Iterator[Job | None],
                    progress: Callable[[int, str], None]) -> Iterator[tuple[int, Evaluation]]:
        return self.evaluate(jobs, stop_at=stop_at, window=AHEAD, progress=progress)

    def _nth(self, index: int) -> "Worker":
        while len(self._others) < index:
            self._others.append(Worker(catalog=self._catalog, deadlines_s=self._deadlines_s, memory_bytes=self._memory_bytes, builders=1,
                                       settings=self._settings, environment=self._environment))
        return self._others[index - 1] if index else self

    def evaluate(self, jobs: Iterable[Job | None], *, stop_at: float | None = None, window: int = WINDOW,
                 progress: Callable[[int, str], None] = lambda index, phase: None) -> Iterator[tuple[int, Evaluation]]:
        """Evaluate ``jobs`` in order and yield (index, evaluation) as each is done.

        ``jobs`` is read lazily, at most ``window`` ahead of the results; None: nothing more before the next result. A crash,
        hang or lost device context ends the candidate that was running, and nothing else; one that could not be judged since the device
        was lost is asked about once more. After ``stop_at``
        (``time.monotonic``) no further result is waited for. ``progress`` hears (index, phase).
        """
        waiting = (_Sent(index, job) for index, job in enumerate(jobs))
        out: deque[_Sent] = deque()
        fruitless, self._abandoned = 0, False
        try:
            while True:
                fresh = list(takewhile(lambda sent: sent.job is not None, islice(waiting, window - len(out))))
                if not (out or fresh) or (stop_at is not None and time.monotonic() >= stop_at):
                    break
                try:
                    child = self._running(out)
                except ChildEnded as exc:
                    yield from self._give_up(chain(out, fresh, waiting), str(exc))
                    return
                for sent in fresh:
                    out.append(sent)
                    self._send(child, sent)
                result = self._await(child, out[0], out, stop_at, progress)
                if result is None:
                    break
                evaluation, lost = result
                fruitless = fruitless + 1 if lost else 0
                if lost and evaluation.failure is Cause.UNAVAILABLE and not out[0].is_again:
                    # The device was lost over the controls, before the kernel was judged: another program's fault may do that.
                    out[0].is_again = True
                    self.restarts += 1
                    self._end()
                    continue
                index = out.popleft().index
                if lost:  # before the caller sees it: one who stops here must not leave a dead child to the next call
                    self.restarts += 1
                    self._end()
                yield index, evaluation
                if lost:
                    time.sleep(0.05 * min(fruitless, 20))
        finally:
            if out:  # the child still works on what nobody waits for
                self._end()

    def _give_up(self, left: Iterable[_Sent], why: str) -> Iterator[tuple[int, Evaluation]]:
        for sent in left:
            if sent.job is not None:
                yield sent.index, Evaluation(failure=Cause.UNAVAILABLE, message=f"the worker does not start: {why}"[:2000])

    def _running(self, out: Collection[_Sent] = ()) -> Child:
        if self._abandoned:
            raise ChildEnded("nobody waits for it any more")
        if self._child is not None and not out and self._child.ended:
            self._end()  # it was lost while nothing ran (its server was killed, memory ran out): no candidate is to blame
        if self._child is not None:
            return self._child
        for attempt in range(MAX_STARTS_WITHOUT_RESULT):
            child = self._starting or self._new_child()
            self._starting = None
            try:
                message = child.receive(START_S)
                if message and "hello" in message:
                    self._child = child
                    for sent in out:
                        self._send(child, sent)
                    return child
                raise ChildEnded(str((message or {}).get("error", f"no sign of life within {START_S:g} s")))
            except ChildEnded:
                child.kill()
                if attempt == MAX_STARTS_WITHOUT_RESULT - 1:
                    raise
        raise AssertionError

    def _send(self, child: Child, sent: _Sent) -> None:
        child.send({"id": sent.index, "method": "evaluate", "params": serial.unstructure(sent.job)})

    def _await(self, child: Child, current: _Sent, out: Iterable[_Sent], stop_at: float | None,
               progress: Callable[[int, str], None]) -> tuple[Evaluation, bool] | None:
        """The evaluation of ``current`` and whether the child was lost over it; None at ``stop_at``."""
        phase, end = "build", time.monotonic() + self._deadline_s("build", current.job)
        while True:
            limit = end if stop_at is None else min(end, stop_at)
            try:
                message = child.receive(max(0.0, limit - time.monotonic()))
            except ChildEnded as exc:
                cause = Cause.MEMORY_FAULT if child.signal_number in _FAULTS else Cause.CRASH
                return self._lost(current, cause, f"during {phase}: {exc}", phase), True
            if message is None:
                if limit < end:
                    return None
                allowed_s = self._deadline_s(phase, current.job)
                return self._lost(current, Cause.TIMEOUT, f"no end of {phase} within {allowed_s:g} s; killed", phase), True
            if "kernel" in message:
                self._keep_kernel(message, out)
            if message.get("id") != current.index:
                continue
            if "phase" in message:
                phase = str(message["phase"])
                end = time.monotonic() + self._deadline_s(phase, current.job)
                progress(current.index, phase)
            elif "result" in message:
                return self._result(message, current)

    def _result(self, message: dict[str, Any], current: _Sent) -> tuple[Evaluation, bool]:
        try:
            evaluation = serial.structure(message["result"], Evaluation)
        except UsageError as exc:
            return self._lost(current, Cause.CONTRACT, str(exc)), True
        return evolve(evaluation, kernel=current.job.kernel), bool(message.get("lost"))

    @staticmethod
    def _lost(current: _Sent, cause: Cause, message: str, phase: str = "build") -> Evaluation:
        bound = current.job.trial.source.language == CALLABLE and phase not in ("build", "load")
        return Evaluation(kernel=current.job.kernel, bound=bound, failure=cause, message=message[:2000])

    @staticmethod
    def _keep_kernel(message: dict[str, Any], out: Iterable[_Sent]) -> None:
        # A kernel that is built already is not built again by the next child.
        for sent in out:
            if sent.index == message.get("id"):
                sent.job = evolve(sent.job, kernel=serial.structure(message["kernel"], Kernel))

    def _deadline_s(self, phase: str, job: Job) -> float:
        if phase.startswith(("check by ", "controls of ")) and job.check_s:
            return job.check_s
        return self._deadlines_s.get(phase.split(" ")[0], CONTROLS_S)  # a phase of a validator names it behind the word

    def prepare(self, backend: str, target: Target, validators: Iterable[str]) -> None:
        """Wait until the child runs, ``backend`` is ready in it and ``validators`` have judged their controls; no wait where they have.

        A child that is lost over it is replaced at the next job, which then says why.
        """
        asked = {"backend": backend, "target": serial.unstructure(target), "validators": list(validators)}
        with contextlib.suppress(WorkerLost):
            self.call("agentcompile_core.worker.evaluate:prepare", asked, deadline_s=min(CONTROLS_S, self._deadlines_s["check"]))

    def call(self, function: str, argument: Any, *, deadline_s: float, progress: Callable[[str], None] = lambda phase: None) -> Any:
        """Run ``module:function`` of the core in the child with a JSON ``argument``; return its JSON result.

        ``deadline_s`` counts from the last sign of progress.

        Raises:
            WorkerLost: it raised, crashed, hung or was killed.
        """
        self._abandoned = False
        try:
            child = self._running()
        except ChildEnded as exc:
            raise WorkerLost(Cause.UNAVAILABLE, f"the worker does not start: {exc}") from exc
        child.send({"id": -1, "method": "call", "params": {"function": function, "argument": argument}})
        done = False
        try:
            while True:
                message = child.receive(deadline_s)
                if message is None:
                    raise WorkerLost(Cause.TIMEOUT, f"{function}: no progress within {deadline_s:g} s; killed")
                if message.get("id") != -1:
                    continue
                if "phase" in message:
                    progress(str(message["phase"]))
                    continue
                done = not message.get("lost")
                if "error" in message:
                    error = message["error"]
                    raise WorkerLost(Cause(error["cause"]), str(error["message"]))
                return message["result"]
        except ChildEnded as exc:
            raise WorkerLost(Cause.CRASH, f"{function}: {exc}") from exc
        finally:
            if not done:
                self.restarts += 1
                self._end()
