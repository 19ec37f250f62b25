"""Every class that a plugin subclasses. Objects are stateless unless their docstring says otherwise; arguments are frozen."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from ..configuration import defaults
from ..errors import Reject
from ..ir.advice import Advice, Question
from ..ir.candidate import StepSource
from ..ir.graph import Graph, GraphSet, KVSpec, Workload
from ..ir.plan import Needs, Origin, Schedule, ScheduleSpace
from ..ir.region import Match
from ..ir.target import Target
from ..ir.verdict import Case, Trial, Verdict
from .backend import Backend as Backend
from .match_kind import MatchKind
from .offer import Offer as Offer
from .reserving import Reserved
from .running import KVState, RunnableProgram, SessionState

if TYPE_CHECKING:  # heavy; nothing here is structured by cattrs
    import torch

    from ..ops.reference import Bounded


class RegionRule(Offer):
    """Proposes matches in a graph (stage analyze).

    ``kinds`` are what its matches are: a match of a kind that no installed rule offers is refused.
    """

    kinds: ClassVar[tuple[MatchKind, ...]] = ()

    @abstractmethod
    def find(self, graph: Graph, target: Target) -> Iterable[Match]:
        """Return the matches this rule sees in one region's graph; they may overlap and nest.

        The core refuses matches that are not convex, hide an output that others read, or write undeclared state.
        """


class TemplateFamily(Offer):
    """Kernels that differ only in a schedule, generated from a template in some language. Every method is pure.

    It is asked for targets that run its ``language`` and have all capabilities of ``features`` only; what single sources
    need beyond that, they declare.
    """

    language: ClassVar[str] = defaults.LANGUAGE
    features: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """Say whether this family can lower ``match`` for ``target``."""

    @abstractmethod
    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Return every legal schedule, best guess first, at most 256. Called only after ``accepts``."""

    @abstractmethod
    def lower(self, match: Match, schedule: Schedule, target: Target) -> StepSource:
        """Return the source of one schedule of ``space``."""

    def needs(self, match: Match, schedule: Schedule, target: Target) -> Needs:
        """What the family expects a schedule of ``space`` to need, before it is built: the planner tells how risky that is."""
        return Needs()


class Implementation(Offer):
    """Hand-written or third-party code for a match: a callable instead of generated source.

    It is validated, timed and judged like a kernel, and bundled by its qualified name, version and schedule: raise ``version``
    whenever what it computes or its schedules change. ``capturable``: whether a captured graph may hold it. One that asks the
    device for anything (a length, a shape) or that allocates outside of torch is not; captured programs are cut there.
    """

    origin: ClassVar[Origin]  # HANDWRITTEN or THIRD_PARTY
    capturable: ClassVar[bool] = True  # whether a captured graph may hold a run

    @abstractmethod
    def accepts(self, match: Match, target: Target) -> Literal[True] | Reject:
        """Say whether this implementation can serve ``match`` on ``target``, its packages included."""

    @abstractmethod
    def space(self, match: Match, target: Target) -> ScheduleSpace:
        """Return its schedules, best guess first; one empty schedule if it has no choices."""

    @abstractmethod
    def bind(self, match: Match, schedule: Schedule, target: Target) -> Callable[..., None]:
        """Return ``run(**operands)``: torch tensors by operand name, outputs written in place, on the current stream.

        Called once per match of a program; ``run`` then serves every instance of it (every layer), with other tensors each time.
        """


class Advisor(Offer):
    """Gives advice on a space (stage advise). May keep a connection; must not keep answers."""

    @abstractmethod
    def advise(self, question: Question) -> Advice:
        """Answer one question within its budget; raise anything on failure (it is recorded, the run goes on)."""


class TrialResult(Protocol):
    """What one run left behind, by operand name of the match; tensors are on the backend's device.

    ``inputs`` are as they were before the run (states too); ``outputs`` is every operand that may be written, after it.
    """

    inputs: "dict[str, torch.Tensor]"
    outputs: "dict[str, torch.Tensor]"
    guards_intact: bool  # nothing was written outside of a buffer
    inputs_unchanged: bool  # states aside
    workspaces_restored: bool  # those declared zeroed are zero again
    detail: str  # which buffers were damaged


class TrialRun(Protocol):
    """What a validator may do with a trial: run one case in this process and look at everything it touched."""

    backend: "Backend"

    def run(self, case: Case, poison: float) -> TrialResult:
        """Make the inputs of ``case``, fill outputs with ``poison``, run once at new addresses, synchronize."""

    def inputs(self, case: Case, device: str) -> "dict[str, torch.Tensor]":
        """The operands of ``case`` that are not outputs, by operand name, as ``run`` makes them, on another device."""

    def expected(self, case: Case, inputs: "dict[str, torch.Tensor]") -> "Mapping[str, Bounded]":
        """Reference and error budget by value name for the ``inputs`` that a run of ``case`` had; kept for the next call."""

    def values(self, outputs: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """The same tensors by value name instead of operand name."""


class Validator(Offer):
    """Checks a candidate, inside the worker process."""

    scope: ClassVar[Literal["candidate", "winner"]] = "candidate"  # winner: only what is about to be used
    unasked: ClassVar[bool] = False  # winner: may be asked without being named, where kernels are measured and time is left
    deadline_s: ClassVar[float] = 0.0  # of one check of a winner, in seconds; 0: that of the backend

    def available(self) -> Literal[True] | Reject:
        """Whether what it needs is on this machine; asked where a user asks for it by an option of its own."""
        return True

    @abstractmethod
    def applies(self, trial: Trial) -> bool:
        """Whether this validator has anything to say of ``trial``."""

    @abstractmethod
    def controls(self, backend: Backend) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
        """Known good and known bad trials for ``backend``, at least one of each: a validator that misjudges one of them is broken."""

    @abstractmethod
    def check(self, trial: Trial, run: TrialRun) -> Verdict:
        """Run the cases of ``trial`` and judge them."""


class Frontend(Offer):
    """Turns something a user names into graphs (stage capture). ``options`` names what ``load`` takes beyond the core's own options.

    ``runs_files``: whether ``load`` may run a file of the user's, in whose folder Python looks for modules meanwhile.
    """

    options: ClassVar[tuple[str, ...]] = ()
    runs_files: ClassVar[bool] = True

    @abstractmethod
    def accepts(self, what: object) -> bool:
        """Whether this frontend understands ``what`` (an identifier, a path, a live module). Cheap, imports nothing heavy."""

    @abstractmethod
    def load(self, what: object, options: dict[str, Any]) -> "LoadedModel":
        """Open it: the module, its tokenizer if it has one. Raises UsageError with one clear sentence."""

    @abstractmethod
    def capture(self, loaded: "LoadedModel", workload: Workload) -> GraphSet:
        """Export its graphs. Every node has the one form that ``schema.canonical`` gives it; others are refused."""


class LoadedModel:
    """A model as a frontend opened it. ``module`` may live on the meta device (no weights: capture and planning only)."""

    def __init__(self, *, module: "torch.nn.Module", name: str, tokenizer: Any = None, path: Path | None = None,
                 notes: tuple[str, ...] = ()) -> None:
        self.module = module
        self.name = name
        self.tokenizer = tokenizer
        self.path = path
        self.notes = notes  # sentences that whoever runs the model must read

    @property
    def has_weights(self) -> bool:
        """Whether the parameters hold data."""
        return all(not p.is_meta for p in self.module.parameters())


class RuntimeIntegration(Offer):
    """One of the roles that enter the graph, resolved before capture by name."""

    role: ClassVar[Literal["kv_cache", "decode"]]


class KVCacheRuntime(RuntimeIntegration):
    """Allocates the KV cache."""

    role = "kv_cache"

    @abstractmethod
    def allocate(self, kv: KVSpec, device: str) -> KVState:
        """Allocate K and V of all layers at their final size; layers may have heads of their own (``KVSpec.others``)."""

    def allocate_growing(self, kv: KVSpec, device: str, reserve: Callable[[Sequence[int]], Reserved | Reject]) -> KVState:
        """As ``allocate``, of a cache that may be a GrowingKVState in addresses that ``reserve`` gives (``Backend.reserve``).

        It is asked in place of ``allocate`` where a backend owns the device. By default ``allocate`` answers.
        """
        return self.allocate(kv, device)


class DecodeRuntime(RuntimeIntegration):
    """Runs decode steps. ``needs_capture``: it is asked only where a backend captures on the device (``SessionState.capture``).

    ``several_steps``: ``prepare`` takes ``steps``, and several steps at once cost less than one after the other. Without it no ``steps``
    is ever given, so that ``prepare`` need not know the argument.
    """

    role = "decode"
    needs_capture: ClassVar[bool] = False
    several_steps: ClassVar[bool] = False

    @abstractmethod
    def available(self, device: str) -> Literal[True] | Reject:
        """Whether this runtime works with programs on ``device``."""

    @abstractmethod
    def prepare(self, bound: RunnableProgram, session: SessionState, steps: int = 1) -> Callable[[], None]:
        """Return ``step()``: enqueue one run of the bound program, or ``steps`` of them, one behind the other and each as if it were alone.

        Where what is returned has a method ``opening``, that makes one run without the closing pieces of the program: of a prompt
        chunk behind which others come. May capture; must leave the session's state as it was. Where nothing was captured that should
        be, ``reason`` of what is returned says why, a text: several steps are then made one by one. It is asked for several steps of a
        program only behind one step of it. The session owns what is returned, which keeps it by a weak reference at most: in a
        circle both would hold memory of the device when the model is gone.
        """
