"""Several workers at a time, for backends whose kernels nobody times: each job in one child, results as they come."""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from .protocol import Evaluation, Job

MOST_CHILDREN = 4
ALONE_S = 0.5  # of checking before another child is worth its start
AHEAD = 2  # jobs of one child: the next one is built while one is checked
HANDED_OVER_S = 0.1  # within which the next job follows a result
Evaluating = Callable[[Iterator[Job | None], Callable[[int, str], None]], Iterator[tuple[int, Evaluation]]]


def most_children() -> int:
    """Children that this machine has processors for."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_CHILDREN, here)


class Lane:
    """One worker on a thread of its own, which is given two jobs at a time."""

    def __init__(self, evaluate: Evaluating, done: "queue.Queue[Done]",
                 progress: Callable[[int, str], None]) -> None:
        self.under_way: deque[int] = deque()  # numbers of the jobs it has
        self.checking_since = 0.0  # time.monotonic; 0: it builds, or waits
        self._evaluate, self._done, self._progress = evaluate, done, progress
        self._inbox: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._taken = 0
        self.thread = threading.Thread(target=self._run, name="lane", daemon=True)
        self.thread.start()

    def give(self, number: int, job: Job) -> None:
        """Have job ``number`` evaluated behind those that it has."""
        self.under_way.append(number)
        self._inbox.put((number, job))

    def end(self) -> None:
        """No job will follow."""
        self._inbox.put(None)

    def _jobs(self) -> Iterator[Job | None]:
        while True:
            try:
                item = self._inbox.get(timeout=HANDED_OVER_S if self._taken else None)
            except queue.Empty:
                yield None
                continue
            if item is None:
                return
            self._taken += 1
            yield item[1]

    def _heard(self, index: int, phase: str) -> None:
        if not self.checking_since and phase.startswith("check"):
            self.checking_since = time.monotonic()
        if self.under_way:
            self._progress(self.under_way[0], phase)

    def _run(self) -> None:
        last: BaseException | None = None
        try:
            for _, evaluation in self._evaluate(self._jobs(), self._heard):
                self.checking_since = 0.0
                self._taken -= 1
                self._done.put((self, evaluation))
        except BaseException as exc:  # raised again where results are awaited
            last = exc
        self._done.put((self, last))


def side_by_side(lane: Callable[[int], Evaluating], abandon: Callable[[int], None], jobs: Iterator[Job | None], stop_at: float | None,
                 progress: Callable[[int, str], None]) -> Iterator[tuple[int, Evaluation]]:
    """Evaluate ``jobs`` in up to ``most_children()`` children and yield (index, evaluation) as each is done.

    The next child starts once a job has been checked for two seconds: kernels that are quickly checked are not worth it. ``jobs`` says
    None where the next job depends on a result that is still awaited. ``lane(i)`` is the i-th worker's way to evaluate, ``abandon(i)``
    ends its child and has it give up. No result is waited for after ``stop_at``.
    """
    done: queue.Queue[Done] = queue.Queue()
    lanes = [Lane(lane(0), done, progress)]
    numbers, left = iter(range(1 << 62)), True
    try:
        while True:
            for one in sorted(lanes, key=lambda one: len(one.under_way)):
                while left and len(one.under_way) < AHEAD and isinstance(job := next(jobs, _END), Job):
                    one.give(next(numbers), job)
                left = left and job is not _END
            if not any(one.under_way for one in lanes) or (stop_at is not None and time.monotonic() >= stop_at):
                return
            found = _next(done, stop_at)
            if found is None:
                if left and len(lanes) < most_children() and _all_check(lanes):
                    lanes.append(Lane(lane(len(lanes)), done, progress))
                continue
            one, evaluation = found
            if isinstance(evaluation, BaseException):
                raise evaluation
            if evaluation is None:  # at stop_at
                return
            yield one.under_way.popleft(), evaluation
    finally:
        for index, one in enumerate(lanes):
            one.end()
            if one.under_way:
                abandon(index)
        for one in lanes:
            one.thread.join(5.0)


_END = object()
Done = tuple[Lane, Evaluation | BaseException | None]


def _next(done: "queue.Queue[Done]",
          stop_at: float | None) -> Done | None:
    left_s = 0.2 if stop_at is None else min(0.2, max(0.0, stop_at - time.monotonic()))
    try:
        return done.get(timeout=left_s)
    except queue.Empty:
        return None


def _all_check(lanes: list[Lane]) -> bool:
    """Whether every lane has been checking for a while."""
    now = time.monotonic()
    return all(one.checking_since and now - one.checking_since > ALONE_S for one in lanes)
