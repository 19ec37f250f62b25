"""The queue of stage validate: one entry per candidate that is worth evaluating, in the order in which they are."""

from collections.abc import Iterable

from attrs import evolve, field, frozen

from ...context import Context
from ...errors import StageName
from ...ir.advice import OrderedPlan
from ...ir.candidate import CALLABLE, Candidate
from ...ir.region import Match, Role
from ...ir.search_log import Reason, Untried
from ...ir.verdict import Case, Trial
from ...plugin.events import Skipped
from ...plugin.interfaces import Backend
from ...store import keys
from ...worker import Job
from . import final_checks
from .computation import computation_of, twin_of
from .input_cases import cases_for

Place = tuple[str, str]  # signature, match id


@frozen(kw_only=True)
class Entry:
    """One candidate with everything that its record needs."""

    candidate: Candidate
    trial: Trial = field(repr=False)
    key: str
    kernel_key: str
    baseline_key: str
    rank: int
    advisor: str
    primary: bool  # part of the planner's favourite cover
    nodes: frozenset[str]
    weight: int  # bytes per run of the program, for the order of evaluation
    twin: str = field(repr=False)  # equal where one evaluation speaks for both; see twins

    @property
    def place(self) -> Place:
        """The match that it serves."""
        return self.candidate.signature, self.candidate.step.match_id

    @property
    def server(self) -> tuple[str, str]:
        """Region and implementation, as searches remember them."""
        return self.candidate.signature, self.candidate.step.implementation

    def is_rival_of(self, other: "Entry") -> bool:
        """Whether the two serve a node in common."""
        return self.candidate.signature == other.candidate.signature and not self.nodes.isdisjoint(other.nodes)

    def untried(self, reason: Reason) -> Untried:
        """This candidate as one that was not evaluated."""
        return Untried(signature=self.candidate.signature, step=self.candidate.step, reason=reason)


class Queue:
    """Entries by turns, which is the order where nothing is timed: the first schedules of the favourite cover's matches, then of the
    others, then everyone's second ones.

    Matches that move most bytes come first, so that an early end finds every match served. ``untried`` holds the
    candidates that are in no entry.
    """

    def __init__(self, ordered: tuple[OrderedPlan, ...], backend: Backend, ctx: Context) -> None:
        self._ctx, self._backend = ctx, backend
        self._ordered = {one.signature: one for one in ordered}
        self._ranks = {(one.signature, step): rank for one in ordered for step, rank in zip(one.steps, one.ranks, strict=True)}
        self._trials: dict[Place, Trial | None] = {}
        self._computations: dict[Place, str] = {}
        self._baseline_keys: dict[Place, str] = {}
        self.where = environment(backend, ctx)
        self.untried: list[Untried] = []

    def entries(self, candidates: Iterable[Candidate]) -> list[Entry]:
        """The entries of ``candidates``, in order of evaluation; equal sources for one match are one entry."""
        queues: dict[Place, list[Entry]] = {}
        seen: set[str] = set()
        for candidate in candidates:
            place = (candidate.signature, candidate.step.match_id)
            kind = candidate.step.match_id.partition(":")[0]  # whose plugin is asked for positions and inputs
            entry = self._ctx.catalog.guard(lambda c=candidate, p=place: self._made(c, p), stage=StageName.VALIDATE,  # type: ignore[misc]
                                            plugin=f"match kind {kind}", subject=f"cases of {candidate.step}")
            if not isinstance(entry, Entry):
                self._leave_out(candidate, entry or Reason.NO_JUDGE)
                continue
            if entry.key in seen:  # another schedule lowers to the same source and launches: one evaluation, one record
                self._leave_out(candidate, Reason.SAME_SOURCE)
                continue
            seen.add(entry.key)
            queues.setdefault(place, []).append(entry)
        return by_turns(list(queues.values()))

    def _made(self, candidate: Candidate, place: Place) -> "Entry | Reason":
        trial = self._trial(candidate, place)
        return Reason.TOO_LARGE if trial is None else self._entry(candidate, trial)

    def entry_of(self, candidate: Candidate) -> Entry | None:
        """The entry of one candidate; None where nothing of this queue is about it, or it is too large for the backend."""
        if candidate.signature not in self._ordered:
            return None
        trial = self._trial(candidate, (candidate.signature, candidate.step.match_id))
        return None if trial is None else self._entry(candidate, trial)

    def _cases(self, candidate: Candidate, match: Match) -> tuple[Case, ...]:
        ordered = self._ordered[candidate.signature]
        return input_cases(candidate, match, ordered, self._backend, self._ctx)

    def _leave_out(self, candidate: Candidate, reason: Reason) -> None:
        self.untried.append(Untried(signature=candidate.signature, step=candidate.step, reason=reason))

    def _trial(self, candidate: Candidate, place: Place) -> Trial | None:
        if place not in self._trials:
            ordered = self._ordered[place[0]]
            match = ordered.plan.region.match_by_id[place[1]]
            limit = self._backend.largest_match_bytes
            if limit and largest_bytes(match) > limit:
                self._ctx.emit(Skipped(subject=match.id, message=f"more than {limit >> 20} MiB are too much for {self._backend.name}"))
                self._trials[place] = None
            else:
                self._trials[place] = trial_of(candidate, match, ordered, self._backend, self._ctx)
        return self._trials[place]

    def _computation(self, place: Place, trial: Trial) -> str:
        if place not in self._computations:
            self._computations[place] = computation_of(trial.match, trial.graph)
        return self._computations[place]

    def _baseline_key(self, place: Place, trial: Trial) -> str:
        if place not in self._baseline_keys:
            self._baseline_keys[place] = keys.baseline_key(trial.match, trial.graph, self.where)
        return self._baseline_keys[place]

    def _entry(self, candidate: Candidate, trial: Trial) -> Entry:
        ordered, backend, place = self._ordered[candidate.signature], self._backend, (candidate.signature, trial.match.id)
        trial = evolve(trial, source=candidate.source, cases=self._cases(candidate, trial.match))
        kind_code = keys.code_of(type(self._ctx.catalog.kind(trial.match.kind)))
        return Entry(
            candidate=candidate, trial=trial, key=keys.record_key(trial, self.where, kind_code),
            kernel_key=keys.kernel_key(candidate.source, self._ctx.target, backend),
            baseline_key=self._baseline_key(place, trial),
            rank=self._ranks.get((candidate.signature, candidate.step), -1), advisor=ordered.record.advisor,
            primary=trial.match.id in ordered.primary, nodes=frozenset(trial.match.nodes),
            weight=trial.match.bytes_moved * len(ordered.plan.region.instances),
            twin=twin_of(candidate, trial, self._computation(place, trial)))


def by_turns(queues: list[list[Entry]]) -> list[Entry]:
    """First schedules of the favourite cover, then of the other matches, then everyone's second schedules, and so on."""
    queues.sort(key=lambda queue: (not queue[0].primary, -queue[0].weight))
    longest = max((len(queue) for queue in queues), default=0)
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def trial_of(candidate: Candidate, match: Match, ordered: OrderedPlan, backend: Backend, ctx: Context) -> Trial:
    """What is to be judged: the match, its graph, the source and the cases, those of the risks that the advisor named among them."""
    region = ordered.plan.region
    outputs = tuple(value for o in match.operands if o.role is Role.OUTPUT for value in o.values)
    graph = region.graph.sub(match.nodes, match.id, outputs)
    return Trial(match=match, graph=graph, source=candidate.source, target=ctx.target,
                 cases=input_cases(candidate, match, ordered, backend, ctx))


def input_cases(candidate: Candidate, match: Match, ordered: OrderedPlan, backend: Backend, ctx: Context) -> tuple[Case, ...]:
    """The cases of one candidate: those of its match, of its schedule, and of the risks that the advisor named."""
    seed, risks = f"{ctx.config.seed} {ordered.plan.region.signature}", ordered.record.accepted.risks
    return cases_for(match, ctx.catalog.kind(match.kind), seed, risks, emulated=backend.emulated, source=candidate.source,
                     schedule=candidate.step.schedule)


def largest_bytes(match: Match) -> int:
    """What a match moves, or its largest operand: a lookup moves a row, but its table must be made, checked and copied like any other."""
    return max(match.bytes_moved, max((o.spec.nbytes for o in match.operands if o.role is not Role.STATE), default=0))


def environment(backend: Backend, ctx: Context) -> str:
    """Digest of everything beside the trial that a result depends on; see keys.environment."""
    return keys.environment(backend, final_checks.versions(ctx))


def job_of(entry: Entry, backend: Backend, ctx: Context) -> Job:
    """What the worker is asked about an entry; its kernel comes along where the store has it."""
    known = None if entry.candidate.source.language == CALLABLE else ctx.store.kernel(entry.kernel_key)
    return Job(trial=entry.trial, step=entry.candidate.step, backend=backend.name, validators=final_checks.candidates(ctx), kernel=known)
