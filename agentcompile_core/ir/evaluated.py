"""What validation found out: of one round, or of several behind each other. What select takes its evidence, sources and kernels from."""

from collections.abc import Mapping
from functools import cached_property

from attrs import evolve, field, frozen

from .candidate import Candidate, Kernel, StepSource
from .plan import Step
from .record import TuningRecord
from .search_log import Untried


@frozen(kw_only=True)
class Evaluated:
    """A record of each candidate that was evaluated and of baselines, what was built for them, and why the others were not evaluated."""

    candidates: tuple[Candidate, ...] = field(default=(), repr=False)
    records: tuple[TuningRecord, ...] = ()
    kernels: Mapping[str, Kernel] = field(factory=dict, repr=False)  # by digest of the source: what this run built and passed
    cached: frozenset[tuple[str, Step]] = frozenset()  # (signature, step) of those that the store knew
    untried: tuple[Untried, ...] = ()

    def and_then(self, later: "Evaluated") -> "Evaluated":
        """This round and the ``later`` one as one value."""
        return evolve(self, candidates=self.candidates + later.candidates, records=self.records + later.records,
                      kernels={**self.kernels, **later.kernels}, cached=self.cached | later.cached, untried=self.untried + later.untried)

    def source(self, record: TuningRecord) -> StepSource | None:
        """The source that a record judged; None if no candidate of this value has it."""
        found = self._sources.get((record.signature, record.step))
        return found if found is not None and found.digest == record.source_digest else None

    def place(self, record: TuningRecord) -> int:
        """Where the candidate of a record stands in this run's order; the store remembers records in the order of other runs."""
        return self._places.get((record.signature, record.step), len(self._places))

    @cached_property
    def _places(self) -> dict[tuple[str, Step], int]:
        return {place: index for index, place in enumerate(dict.fromkeys((c.signature, c.step) for c in self.candidates))}

    @cached_property
    def _sources(self) -> dict[tuple[str, Step], StepSource]:
        return {(c.signature, c.step): c.source for c in self.candidates}
