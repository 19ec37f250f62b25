"""What a kind of hardware is to the core. Defaults are those of a processor: no streams, launches end before they return."""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..configuration import defaults
from ..errors import Cause, ContractError, Reject
from ..ir.candidate import Kernel, Launch, StepSource
from ..ir.graph import DType
from ..ir.target import Target
from ..ops.odds import Odds
from .include_folders import folders_digest
from .offer import Offer
from .reserving import Reserved
from .running import Heads, ProgramParts, Scoring

if TYPE_CHECKING:
    import torch

OwnBuild = Callable[["Backend", StepSource, Target], Kernel]  # a kernel of a backend's own, from the store or by ``Backend.build``


class Backend(Offer):
    """A kind of hardware: how sources are built, launched and timed on it. Holds loaded modules; one object per process."""

    device: ClassVar[str]  # torch device type its operands live on
    languages: ClassVar[tuple[str, ...]] = (defaults.LANGUAGE,)  # of the sources that it builds
    features: ClassVar[tuple[str, ...]] = ()
    captures: ClassVar[bool] = False  # whether ``capture`` records and ``time`` times what it recorded; then captured chains judge
    environment: ClassVar[tuple[str, ...]] = ()  # variables that its driver and compilers read; children get no others
    clock: ClassVar[bool] = True  # whether ``time`` can answer; without one, what passes is provisional and one pass per match is enough
    emulated: ClassVar[bool] = False  # kernels run far slower than on their target: validators use small cases
    side_by_side: ClassVar[bool] = False  # whether jobs run in several workers at a time, since kernels are not timed and run on the host
    window: ClassVar[int] = 24  # jobs that are with the worker at a time; their builds run ahead
    largest_match_bytes: ClassVar[int] = 0  # matches that move more, or have a larger operand, are not validated here; 0: no limit
    deadlines_s: ClassVar[Mapping[str, float]] = MappingProxyType({})  # per phase of the worker (build, load, check, time) that differ
    suffixes: ClassVar[Mapping[str, str]] = MappingProxyType({})  # of source files by language, where it is not the language's name
    binary_suffix: ClassVar[str] = ".bin"  # of binaries in bundles

    @abstractmethod
    def available(self) -> Literal[True] | Reject:
        """Whether kernels can be launched here (building may work regardless)."""

    @abstractmethod
    def can_build(self, target: Target) -> Literal[True] | Reject:
        """Whether sources can be built here for ``target``."""

    @abstractmethod
    def live_target(self) -> Target | None:
        """The device of this machine rounded to its preset, or None."""

    @abstractmethod
    def compiler(self) -> str:
        """Name and version of the compiler; part of every cache key. First asked on a thread of its own, beside a model that is loaded."""

    def include_dirs(self) -> tuple[Path, ...]:
        """Folders that every source may include from besides its own headers; their files are part of a bundle."""
        return ()

    def library_digest(self, language: str) -> str:
        """Digest of what a source of ``language`` includes besides its own headers; part of the key of all evidence.

        By default over the files below ``include_dirs()``; empty for a language that this backend does not build.
        """
        return folders_digest(self.include_dirs()) if language in self.languages else ""

    def suffix(self, language: str) -> str:
        """How the name of a source file of ``language`` ends, such as ``.cpp``; by default ``.<language>``."""
        return self.suffixes.get(language, f".{language}")

    def prepare(self) -> None:
        """Make what every build needs, such as headers that are compiled once: called in the worker as it starts, on a thread of its own.

        What it raises is ignored; ``build`` is called all the same.
        """

    def expect(self, dtype: DType, build: OwnBuild) -> None:
        """A model of this type is going to run on the current device: begin to make what its prompts need beside the programs' kernels.

        It returns at once, and what is made is made beside the caller's work; what fails is told to whoever needs it. ``build`` may be
        called from any thread, now and later: kernels that lie in the store are not built again. By default nothing.
        """

    def build_own(self, source: StepSource, target: Target) -> Kernel:
        """A kernel of the backend's own, which no search chooses: as ``expect`` was told, where it was. By default ``build``."""
        return self.build(source, target)

    @abstractmethod
    def build(self, source: StepSource, target: Target, deadline_s: float = 120.0) -> Kernel:
        """Compile ``source``. Raises BuildError."""

    @abstractmethod
    def load(self, kernel: Kernel) -> Any:
        """Load a binary into this process and return a handle for ``launch``; loading twice returns the same handle."""

    @abstractmethod
    def prepare_launch(self, handle: Any, launch: Launch, arguments: Sequence[int | float], pdl: bool) -> Callable[[int], None]:
        """Resolve one launch with its argument values (addresses, scalars) into ``run(stream)``, cheap to call repeatedly.

        The value of an argument of the kind TILES is the address of its operand.
        """

    def prepare_moving(self, handle: Any, launch: Launch, arguments: Sequence[int | float], pdl: bool,
                       places: Sequence[int]) -> "Callable[..., None] | None":
        """As ``prepare_launch``, for a launch whose arguments number ``places`` are other addresses at every run.

        ``run(stream, *addresses)`` takes them in the order of ``places`` and costs hardly more than a launch that stays; what it enqueued
        before keeps its own. None, as by default: not offered, and a launch is prepared for every set of addresses.
        """
        return None

    def prepare_runs(self, source: StepSource, arguments: "Sequence[Sequence[Sequence[int | float]]]"
                     ) -> tuple[Callable[[int], None], ...] | None:
        """Each launch of ``source`` for several runs in one, as ``prepare_launch`` does for one run, or None: not served.

        ``arguments[i][r]`` are the values of launch i in run r; those that are no addresses are the same in all runs. The runs do not
        depend on each other, and have workspaces of their own; variables of a source's own would be shared, so there is no such launch of
        one with any. What they need is built now. They may begin while what was enqueued before still runs, and wait for it before they
        read anything of it, as launches with ``pdl`` do; what a hint says is complete (docs/decisions/0007) they read before.
        """
        return None

    @abstractmethod
    def time(self, run: Callable[[int], None], *, repetitions: int, runs_per_repetition: int) -> "tuple[float, ...] | Reject":
        """Microseconds per run of each repetition, by device events around a captured graph where there is one; or why not."""

    def stream(self) -> int:
        """The handle of torch's current stream, as ``run`` takes it; 0 where there are no streams."""
        return 0

    def synchronize(self) -> None:
        """Wait until everything that was launched has ended; raises what a kernel did wrong."""

    def capture(self, run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1, owner: object = None) -> "Callable[[], None] | Reject":
        """Record ``runs`` runs and return what replays them on the current stream, or why they cannot be recorded.

        The one way in which anything is captured: what is timed, what a chain is judged by, and what serves. ``run`` enqueues on
        the current stream; ``warm_ups`` calls of it come first, and what they raise passes. Recordings of one ``owner`` share a
        stream and memory, so they are replayed one after another, and live as long as what was returned. Without an owner a
        recording shares nothing: one that is measured and dropped. After a Reject the device is usable. By default there is no way.
        """
        return Reject(f"the backend {self.name} records no graphs")

    def reserve(self, nbytes: Sequence[int]) -> Reserved | Reject:
        """Addresses for ranges of so many bytes on the current device, none of them held yet, or why there is no such thing here.

        Each range begins at a multiple of 256 bytes at least. By default there is no way, and whoever asks allocates all at once.
        """
        return Reject(f"the backend {self.name} reserves no addresses")

    def attend(self, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", *, causal: bool,
               scale: float) -> "tuple[torch.Tensor, torch.Tensor] | None":
        """Attention of rows ``q`` [1, H, T, D] over ``k`` and ``v`` [1, KV, L, ..] in a library of the device, or None: not served.

        Returns [1, H, T, Dv] and fp32 of H * T elements in that order: the logarithm of the sum of the exponentials of the scaled
        scores, by which parts over several ranges of keys are merged. ``causal``: T equals L, and row t sees keys 0 .. t. It is
        called while a graph is captured too, behind calls of the same shapes.
        """
        return None

    def attend_cached(self, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", out: "torch.Tensor", *, scale: float,
                      scoring: Scoring | None = None) -> bool:
        """Attention of a chunk's rows ``q`` [1, H, T, D] over all that is cached, ``k`` and ``v`` [1, KV, L, ..], to ``out`` [1, H, T, Dv].

        The last T of the L rows are the chunk's own: row t sees keys 0 .. L - T + t. ``scoring`` is given where scores are more than
        scaled. Asked before ``attend`` is for parts of the keys. False: not served, and nothing was written. It is called while a graph is
        captured too, behind calls of the same shapes.
        """
        return False

    def any_length(self) -> AbstractContextManager[None]:
        """A block around the framework's own model, whose calls have new lengths each time: no library is asked in it that prepares itself
        for each of them. By default whatever the framework asks is asked. Blocks of several threads may overlap.
        """
        return nullcontext()

    def draw(self, logits: "torch.Tensor", odds: Odds, clocks: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor] | None":
        """The token that rings first, or None: not served.

        ``clocks`` fp32 [V] are exponential, and the token is the first index of the largest of probability / clock, where the
        probabilities are ``odds`` of ``logits`` [V]. Returns it, i64 [1], and bool [1]: whether the probabilities are no numbers. It is
        called while a graph is captured too, behind calls of the same shapes and odds.
        """
        return None

    def merge(self, parts: "list[tuple[torch.Tensor, torch.Tensor]]", out: "torch.Tensor") -> bool:
        """Write what ``attend`` returned for several ranges of keys, as attention over all of them, to ``out`` [1, H, T, Dv], rounded once.

        False: not served, and the framework merges.
        """
        return False

    def place(self, heads: Sequence[Heads]) -> bool:
        """Norm and turn the queries, keys and values of a prompt chunk and write them where they belong, in the framework's roundings.

        False: not served, and the framework does it, operator by operator; what was written to their rows by then is written again.
        It may be captured behind calls of the same shapes.
        """
        return False

    def body(self, *ops: str) -> "Callable[..., Any] | None":
        """What computes an operator of prompt chunks, and of steps of several rows, in one launch, in the framework's roundings, or None:
        nothing does.

        ``ops``: one operator (``agentcompile.rms_norm.default``), whose arguments it takes; or two, of which the second takes two
        tensors in any order and is the first one's only reader: then the first one's argument, the second one's other, and what else
        the first one takes, by name (``approximate`` of ``aten.gelu.default``). It returns a new tensor, or None where it does not
        serve these arguments, and may be captured behind calls of the same shapes. Of ``aten.add.Tensor`` and
        ``agentcompile.rms_norm.default``, ``agentcompile.layer_norm.default`` or ``aten.layer_norm.default`` others read the sum too: the
        body takes both addends and what the norm takes behind its first argument, and returns sum and norm. Of
        ``aten.linear.default``, an activation (``aten.silu.default``) and ``aten.mul.Tensor``, a product of two products of the same rows,
        it takes the rows [1, T, K], the weight of the one under the activation [I, K], the other one's, and what else the activation takes,
        by name. That of ``aten.linear.default`` alone takes ``out`` by name too: [T, N], dense, which it writes and returns then. Matrices
        and biases of products are weights in any case, which nothing writes while a program runs. Of ``aten.mul.Tensor`` and
        ``aten.sum.dim_IntList``, a sum along axes that alone reads a product of two tensors, it takes both and the axes. Bodies of
        ``agentcompile.recurrence.default`` and ``agentcompile.causal_convolution.default``, which no kernel of a search computes, run in
        steps of one row too; they return both results, which lie as the operators' do. Of one of these two and ``aten.copy_.default`` the
        body takes the operator's arguments, and by name ``into``, a dense tensor or None: it writes the state behind the call over the
        first argument, and returns the other result, ``into`` where that is given.
        """
        return None

    def time_from_host(self, run: Callable[[int], None], *, repetitions: int, runs_per_repetition: int) -> tuple[float, ...]:
        """Microseconds per run as the host sees them, launches included: for what ``time`` cannot capture."""
        times = []
        for _ in range(repetitions):
            self.synchronize()
            began = time.perf_counter()
            for _ in range(runs_per_repetition):
                run(self.stream())
            self.synchronize()
            times.append((time.perf_counter() - began) * 1e6 / runs_per_repetition)
        return tuple(times)

    def is_lost(self) -> bool:
        """Whether a kernel broke the device for this process, so that every later call would fail."""
        return False

    def cause_of(self, exc: BaseException) -> Cause | None:
        """The class of what running a kernel raised; None: as its text says."""
        return None

    def identity(self) -> str:
        """The device and its driver, with versions: what was found out on another one does not hold here."""
        return self.device

    def check(self, source: StepSource, target: Target) -> None:
        """Refuse launches beyond the limits of this kind of hardware. Raises ContractError."""

    def control(self, defect: str) -> StepSource | None:
        """The source of the standard control (``plugin.controls``) with ``defect`` planted, empty: the right one; None: there is none.

        Without it no validator that needs a control can show that it works here, so nothing passes.
        """
        return None

    def traced(self, source: StepSource, tag: str) -> StepSource | None:
        """The same step with kernels that also note when their blocks pass ``PHASES``, or None: this backend has no such kernels.

        ``tag`` sets its notes apart from those of the same source elsewhere. It is built, loaded and launched as any other.
        """
        return None

    def noted(self, handle: Any, source: StepSource) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Per launch of a traced source that was loaded as ``handle`` and has run, and per block of its grid: the time of each of
        ``PHASES`` in nanoseconds of a clock that all blocks share, 0 where it was not passed. Waits for the device."""
        raise ContractError(f"the backend {self.name} offers traced kernels and no noted(), which reads what they noted")

    def emit(self, programs: Mapping[str, ProgramParts], kernels: Mapping[str, Kernel], target: Target) -> dict[str, bytes]:
        """What a bundle offers to users without AgentCompile: content by path below the bundle's ``extension`` folder.

        ``programs`` by graph name; ``kernels`` by digest of their source, those of other backends too. Pure; by default nothing.
        """
        return {}
