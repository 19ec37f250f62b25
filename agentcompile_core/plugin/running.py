"""What plugins see of things that live above them: programs that run, the session they run for, values of the reference."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from ..errors import Reject
from ..ir.candidate import StepSource
from ..ir.graph import Graph

if TYPE_CHECKING:
    import torch


class KVState(Protocol):
    """The KV cache of one session: per layer K and V of the shapes and the type that its KVSpec says, and as many positions.

    Tensors are contiguous, on the device that was named, begin at multiples of 16 bytes, and share no memory: with each other, or with
    those of another cache that is in use. Another one is not taken.
    One that can move its tensors counts how often it did as ``generation``: graphs captured before are refused then.
    """

    keys: "tuple[torch.Tensor, ...]"
    values: "tuple[torch.Tensor, ...]"
    capacity: int

    def reset(self) -> None:
        """Forget everything; lengths become 0. Addresses do not change."""


class GrowingKVState(KVState, Protocol):
    """A KV cache whose memory comes as requests need it, behind addresses that stay. What is not held yet reads as zeros.

    A cache without ``hold`` holds all of its capacity from the beginning.
    """

    @property
    def held(self) -> int:
        """Positions that may be written: of the first ones, at most ``capacity``."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the device's memory that K and V take now."""

    def hold(self, positions: int) -> None:
        """Make at least the first ``positions`` memory; contents stay, and new ones are zero. Called while nothing is being captured.

        Raises:
            UsageError: there is not enough memory, in one sentence; nothing has changed then.
        """

    def give_back(self, positions: int) -> None:
        """Give back what lies behind the first ``positions``, as far as it can be; its contents are lost."""


@frozen(kw_only=True)
class Heads:
    """Heads of a prompt chunk as a product made them, what happens to them, and where they go; for ``Backend.place``.

    ``rows`` is [1, H, T, D], ``out`` [1, H, S, D] with S >= T, both with any strides. ``norm``: the arguments of
    ``agentcompile.rms_norm`` behind its first one, in its order; empty: no norm. ``turn``: then those of ``agentcompile.rope``, which
    is computed in float32 and rounded once if ``wide``, else rounds where the operator does in the type of the rows.
    ``at``: the row of ``out`` that the first token's goes to, i64 [1] on the device; None: row 0.
    """

    rows: "torch.Tensor"
    out: "torch.Tensor"
    norm: tuple[Any, ...] = ()
    turn: tuple[Any, ...] = ()
    wide: bool = False
    at: "torch.Tensor | None" = None


@frozen(kw_only=True)
class Scoring:
    """What becomes of the scaled scores of attention, for ``Backend.attend_cached``.

    A row sees the last ``window`` keys alone (0: all before it). With a ``softcap`` c scores become c tanh(score / c). By ``slopes``, one
    number per query head, they fall for every row that a key lies back, behind the cap. ``sinks`` [H] are a score each that belongs to
    no key.
    """

    window: int = 0
    softcap: float = 0.0
    sinks: "torch.Tensor | None" = None
    slopes: Sequence[float] | None = None


class RunnablePiece(Protocol):
    """A part of a program, as ``RunnableProgram.pieces`` gives it."""

    @property
    def run(self) -> Callable[[], None]:
        """Enqueue it on the current stream."""

    @property
    def capturable(self) -> bool:
        """Whether a graph of the device may hold it."""

    @property
    def closing(self) -> bool:
        """Whether only the last chunk of a prompt needs it; all pieces behind such a one are closing too."""


class RunnableProgram(Protocol):
    """A program with addresses. ``environment`` holds its tensors by value name."""

    environment: "dict[str, torch.Tensor]"

    @property
    def graph(self) -> Graph:
        """What it computes."""

    @property
    def uncapturable(self) -> tuple[str, ...]:
        """Names of the segments that no graph of the device may hold."""

    def run(self) -> None:
        """Enqueue all of it on the current stream."""

    def pieces(self) -> "tuple[RunnablePiece, ...]":
        """The program in as few pieces as can be, in order: each one wholly capturable, or wholly not, and closing or not."""


class ProgramParts(Protocol):
    """A program as it is stored: segments in execution order over one graph (runtime.program.Segment), and the sources they launch."""

    @property
    def graph(self) -> Graph:
        """What it computes."""

    @property
    def segments(self) -> tuple[Any, ...]:
        """Framework nodes and steps, each with its operands."""

    @property
    def sources(self) -> tuple[StepSource, ...]:
        """Every source that a segment names by its key."""


class SessionState(Protocol):
    """What changes while a session serves: token, position and history (int64, on the device) and the KV cache."""

    ids: "torch.Tensor"
    position: "torch.Tensor"
    history: "torch.Tensor"

    @property
    def generation(self) -> int:
        """Counts what makes a captured graph void: how often the KV cache moved."""

    @property
    def kv(self) -> KVState:
        """The KV cache."""

    def capture(self, run: Callable[[], None], *, warm_ups: int = 0, runs: int = 1) -> "Callable[[], None] | Reject":
        """As ``Backend.capture`` of the backend that owns the device, this session being the owner."""
