"""Progress of long work on standard error: a line per stage, counts and time left while candidates are evaluated."""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ..errors import UsageError, visible
from ..plugin.events import (
    AdviceGiven,
    CandidateFinished,
    Captured,
    ChainProgress,
    Event,
    FailureRecorded,
    ModelLoaded,
    Preparing,
    SearchStarted,
    Skipped,
    StageFinished,
    StageStarted,
    Warned,
    WinnerRefused,
    WorkloadChosen,
)

INTERRUPTED = threading.Event()  # Ctrl-C came: a library that swallows it while it is imported does not keep it from us
EVERY_S = 10.0  # between two lines about candidates where nobody can see a line change
LIVE_S = 0.1  # between two changes of the line on a terminal
SILENT = ("load", "capture", "install")  # stages that may take minutes and say nothing before they end
COLUMNS = 160  # of the changing line; what stays is never cut


class Progress:
    """An observer for ``compile``; also writes the log of evaluations."""

    def __init__(self, quiet: bool = False, log: str | None = None, stream: TextIO | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._quiet, self._clock, self._began = quiet, clock, clock()
        self._live = not quiet and self._stream.isatty()
        self._search = _Search(0, 0, 0.0, self._began)
        self.evaluated = 0  # candidates evaluated in this run
        self.warned = False
        self._said = float("-inf")
        self._shown: dict[type[Event], Callable[[Any], None]] = {
            CandidateFinished: self._candidate, SearchStarted: self._begin, StageFinished: self._finished, Captured: self._captured,
            AdviceGiven: self._advice, FailureRecorded: self._failed, Warned: self._warned,
            WorkloadChosen: lambda e: self._say(f"workload: batch 1, context {e.max_context}, {e.dtype}, prompts in chunks of "
                                                f"{list(e.chunks)}"),
            ModelLoaded: lambda e: self._say(f"model {e.name}: loaded in {e.seconds:.1f} s"),
            StageStarted: lambda e: self._say(f"{e.stage} ...", transient=e.stage not in SILENT),
            ChainProgress: lambda e: self._now_and_then(f"chain: {e.what}"),
            Preparing: lambda e: self._say(f"preparing {e.graph}", transient=True),
            Skipped: lambda e: self._say(f"note: {e.subject}: {e.message}"),
            WinnerRefused: lambda e: self._say(f"note: {e.step} was refused: {e.message}"),
        }
        try:
            self._log = Path(log).open("a") if log else None  # noqa: SIM115  it lives as long as the run
        except OSError as exc:
            raise UsageError(f"cannot write the log {log}: {exc.strerror}; name a file in a folder that exists") from exc

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if INTERRUPTED.is_set():
            raise KeyboardInterrupt
        shown = self._shown.get(type(event))
        if shown is not None:
            shown(event)

    def _begin(self, event: SearchStarted) -> None:
        self._search = _Search(event.total, event.cached, event.left_s, self._clock())
        if event.total:
            self._say(f"validate: {event.total} candidates, {event.cached} of them in the cache; at most {event.left_s:.0f} s")
            self._said = self._clock()

    def _candidate(self, event: CandidateFinished) -> None:
        if self._log is not None:
            self._log.write(json.dumps(candidate_document(event), sort_keys=True) + "\n")
            self._log.flush()
        search, record = self._search, event.record
        self.evaluated += not event.cached
        search.count(event)
        us = f" {record.measurement.us:.2f} us" if record.measurement else ""
        verdict = record.verdict.outcome.value if record.verdict else record.failure.value if record.failure else "none"
        last = f"; {record.step.implementation} on {record.step.match_id}: {verdict}{us}" if self._live else ""
        self._now_and_then(search.text(self._clock()) + last)

    def _finished(self, event: StageFinished) -> None:
        counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in event.facts.items())
        self._say(f"{event.stage}: {event.seconds:.1f} s" + (f", {counts}" if counts else ""))

    def _captured(self, event: Captured) -> None:
        reason = f"; {event.eager_reason}" if event.eager_reason else ""
        self._say(f"capture: {event.seconds:.1f} s, {event.graphs} graphs{reason}")

    def _advice(self, event: AdviceGiven) -> None:
        refused = f"{len(event.refused)} items refused ({', '.join(event.refused[:3])})" if event.refused else ""
        if refused or event.error:
            self._say(f"advice for {event.region}: {'; '.join(part for part in (refused, event.error) if part)}")

    def _failed(self, event: FailureRecorded) -> None:
        if event.first:
            self._say(f"note: {event.failure}")

    def _warned(self, event: Warned) -> None:
        self.warned = True
        self._say(f"warning: {event.message}")

    def _now_and_then(self, text: str) -> None:
        now = self._clock()
        if now - self._said >= (LIVE_S if self._live else EVERY_S):
            self._said = now
            self._say(text, transient=self._live)

    def _say(self, text: str, transient: bool = False) -> None:
        if self._quiet or (transient and not self._live):
            return
        head = visible(f"[{self._clock() - self._began:6.1f} s] {text}")
        self._stream.write(("\r\033[K" if self._live else "") + (head[:COLUMNS] if transient else head + "\n"))
        self._stream.flush()


class _Search:
    """Counts of one round of evaluation."""

    def __init__(self, total: int, cached: int, left_s: float, began: float) -> None:
        self.total, self.cached, self.began, self.stop_at = total, cached, began, began + left_s
        self.done = self.fresh = self.passed = self.failed = 0

    def count(self, event: CandidateFinished) -> None:
        """Take one candidate into account."""
        record = event.record
        passed = record.passed
        self.done += 1
        self.fresh += not event.cached
        self.passed += passed
        self.failed += not passed

    def eta_s(self, now: float) -> float:
        """Seconds until all are evaluated at the pace so far, or until time runs out, whichever is first."""
        until_end = max(0.0, self.stop_at - now)
        if not self.fresh:
            return until_end
        return min(until_end, (now - self.began) / self.fresh * max(0, self.total - self.done))

    def text(self, now: float) -> str:
        """One line of progress."""
        return (f"validate: {self.done} of {self.total} candidates, {self.passed} passed, {self.failed} failed, about "
                f"{self.eta_s(now):.0f} s left")


def candidate_document(event: CandidateFinished) -> dict[str, Any]:
    """One evaluated candidate as plain types: a line of the log."""
    record = event.record
    measured = record.measurement
    return {
        "signature": record.signature, "match": record.step.match_id, "implementation": record.step.implementation,
        "schedule": dict(record.step.schedule.items), "verdict": record.verdict.outcome.value if record.verdict else "none",
        "us": measured.us if measured else None, "floor_us": measured.floor_us if measured else None,
        "baseline_us": event.baseline_us or None, "failure": record.failure.value if record.failure else None,
        "message": record.message, "advisor": record.advisor, "rank": record.advisor_rank, "order": record.order, "cached": event.cached,
        "seconds": event.seconds,
    }
