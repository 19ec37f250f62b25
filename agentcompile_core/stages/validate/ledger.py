"""The ledger of stage validate: what is known of each match while candidates are evaluated."""

import time
from collections.abc import Iterable

from attrs import evolve

from ...context import Context
from ...errors import Cause
from ...ir.baseline import FRAMEWORK, baseline_step
from ...ir.candidate import Kernel
from ...ir.plan import Step
from ...ir.record import TuningRecord
from ...ir.region import Region
from ...ir.search_log import Reason, Untried
from ...ir.verdict import Verdict
from ...plugin.events import CandidateFinished
from ...plugin.interfaces import Backend
from ...worker import Evaluation
from . import final_checks
from .entries import Entry, Place

_NOT_KEPT = (Cause.UNAVAILABLE, Cause.EXCEPTION)  # failures of the moment rather than of the candidate
_TOLD = (Cause.EXCEPTION, Cause.CRASH, Cause.MEMORY_FAULT, Cause.MISALIGNED, Cause.TIMEOUT, Cause.UNAVAILABLE)


class Ledger:
    """Records, baselines and best times so far; on a backend without a clock also the nodes that are served already.

    ``newcomers`` are implementations that took no part in earlier searches of their region: without a clock they are
    tried until one of their schedules passes, even where a rival serves the nodes.
    """

    def __init__(self, backend: Backend, ctx: Context) -> None:
        self._backend, self._ctx = backend, ctx
        self.newcomers: frozenset[tuple[str, str]] = frozenset()
        self.records: list[TuningRecord] = []
        self.kernels: dict[str, Kernel] = {}  # of what passed, by digest of the source
        self.cached: set[tuple[str, Step]] = set()
        self.untried: list[Untried] = []
        self.baselines: dict[Place, TuningRecord] = {}
        self.best_us: dict[Place, float] = {}
        self.seconds: dict[Place, float] = {}  # that the last candidate of each match took
        self.hopeless = False  # the worker does not start, or a validator cannot judge
        self._covered: dict[str, set[str]] = {}
        self._proven: set[tuple[Place, str]] = set()
        self._known: set[str] = set()  # keys of records
        self._order = 0
        self._taken_at: float | None = None

    def recall(self, earlier: Iterable[TuningRecord], regions: Iterable[Region]) -> None:
        """Take up what earlier rounds found: the best times, and where nothing is timed the nodes that are settled."""
        known = {region.signature: region for region in regions}
        for record in earlier:
            if record.signature not in known or record.step.implementation == FRAMEWORK:
                continue
            if record.usable and record.measurement is not None:
                self._timed((record.signature, record.step.match_id), record.measurement.us)
            elif record.passed and not self._backend.clock:
                self._settle(record.signature, known[record.signature].match_by_id[record.step.match_id].nodes)

    def recall_baseline(self, entry: Entry) -> None:
        """Take the framework's time of the entry's match from the store."""
        known = self._ctx.store.record(entry.baseline_key)
        if known is not None and entry.place not in self.baselines:
            self.baselines[entry.place] = evolve(known, signature=entry.candidate.signature, step=baseline_step(entry.place[1]))

    def recall_record(self, entry: Entry, record: TuningRecord) -> None:
        """Take the entry's record from the store, under the names and ranks of this run."""
        step = entry.candidate.step
        self.cached.add((entry.candidate.signature, step))
        self._add(evolve(record, signature=entry.candidate.signature, step=step, advisor=entry.advisor, advisor_rank=entry.rank), entry)

    def share(self, entry: Entry, other: Entry) -> None:
        """Record and store for ``entry`` what was found out about ``other``, its twin in another region: the times of both of them too."""
        found = next(record for record in reversed(self.records) if record.key == other.key)
        step, signature = entry.candidate.step, entry.candidate.signature
        self._order += 1
        record = evolve(found, key=entry.key, signature=signature, step=step, source_digest=entry.candidate.source.digest,
                        advisor=entry.advisor, advisor_rank=entry.rank, order=self._order)
        if record.failure not in _NOT_KEPT:
            self._ctx.store.put_record(record)
        baseline = self.baselines.get(other.place)
        if baseline is not None and entry.place not in self.baselines:
            self.baselines[entry.place] = evolve(baseline, key=entry.baseline_key, signature=signature, step=baseline_step(step.match_id))
            self._ctx.store.put_record(self.baselines[entry.place])
        self.cached.add((signature, step))
        self._add(record, entry)

    def knows(self, entry: Entry) -> bool:
        """Whether the entry has a record."""
        return entry.key in self._known

    def is_settled(self, entry: Entry) -> bool:
        """Whether nothing is to be learnt any more from an entry: one of its nodes is served, nothing is timed, and it is no newcomer."""
        served = not entry.nodes.isdisjoint(self._covered.get(entry.candidate.signature, ()))
        newcomer = entry.server in self.newcomers and (entry.place, entry.candidate.step.implementation) not in self._proven
        return served and not newcomer

    def take(self, entry: Entry, evaluation: Evaluation) -> TuningRecord:
        """Record, store and announce what the worker found out about an entry."""
        record = self._record(entry, evaluation)
        now = time.monotonic()  # from one result to the next, since a hang and a failed build cost the search as well
        self.seconds[entry.place] = evaluation.seconds if self._taken_at is None else now - self._taken_at
        self._taken_at = now
        store = self._ctx.store
        if isinstance(evaluation.kernel, Kernel):
            store.put_kernel(entry.kernel_key, evaluation.kernel)
            if record.passed:
                self.kernels[evaluation.kernel.digest] = evaluation.kernel
        if record.failure not in _NOT_KEPT:
            store.put_record(record)
        if evaluation.baseline is not None and entry.place not in self.baselines:
            self.baselines[entry.place] = TuningRecord(
                key=entry.baseline_key, signature=record.signature, step=baseline_step(record.step.match_id), source_digest="",
                verdict=None, measurement=evaluation.baseline)
            store.put_record(self.baselines[entry.place])
        if record.failure in _TOLD:
            self._ctx.fail(final_checks.failure_of(record))
        self._add(record, entry)
        self.hopeless = record.failure is Cause.UNAVAILABLE and not (record.verdict and record.verdict.passed)
        return record

    @property
    def lost(self) -> tuple[str, ...]:
        """The keys of what failed without its fault, as far as anybody knows."""
        return tuple(record.key for record in self.records if record.failure in _NOT_KEPT and not record.passed)

    def leave(self, entries: Iterable[Entry], reason: Reason) -> None:
        """Note why the entries that have no record were not evaluated; those that a rival settled say so."""
        done = {(r.signature, r.step) for r in self.records}
        for entry in entries:
            if (entry.candidate.signature, entry.candidate.step) not in done:
                self.untried.append(entry.untried(Reason.SETTLED if self.is_settled(entry) else reason))

    def _record(self, entry: Entry, evaluation: Evaluation) -> TuningRecord:
        self._order += 1
        extra = {} if evaluation.kernel is None else {"resources": evaluation.kernel.resources}
        return TuningRecord(
            key=entry.key, signature=entry.candidate.signature, step=entry.candidate.step, source_digest=entry.candidate.source.digest,
            verdict=_decisive(evaluation.verdicts), measurement=evaluation.measurement, failure=evaluation.failure,
            message=evaluation.message, advisor=entry.advisor, advisor_rank=entry.rank, order=self._order,
            built=evaluation.kernel is not None or evaluation.bound, **extra)

    def _add(self, record: TuningRecord, entry: Entry) -> None:
        self.records.append(record)
        self._known.add(record.key)
        if record.usable and record.measurement is not None:
            self._timed(entry.place, record.measurement.us)
        elif record.passed and not self._backend.clock:
            self._proven.add((entry.place, record.step.implementation))
            self._settle(entry.candidate.signature, entry.nodes)
        baseline = self.baselines.get(entry.place)
        us = baseline.measurement.us if baseline is not None and baseline.measurement is not None else 0.0
        place = (entry.candidate.signature, record.step)
        self._ctx.emit(CandidateFinished(record=record, cached=place in self.cached, baseline_us=us,
                                         seconds=0.0 if place in self.cached else self.seconds.get(entry.place, 0.0)))

    def _timed(self, place: Place, us: float) -> None:
        self.best_us[place] = min(us, self.best_us.get(place, us))

    def _settle(self, signature: str, nodes: Iterable[str]) -> None:
        """Without a clock one valid step is enough; remember its nodes if they are disjoint from those before."""
        covered = self._covered.setdefault(signature, set())
        if covered.isdisjoint(nodes):
            covered.update(nodes)


def _decisive(verdicts: tuple[Verdict, ...]) -> Verdict | None:
    """The first failed verdict, else the first one."""
    return next((v for v in verdicts if not v.passed), verdicts[0] if verdicts else None)
