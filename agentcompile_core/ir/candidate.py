"""A step made concrete: source text, launches with ordered arguments, the built kernel."""

import enum
import hashlib
from functools import cached_property

from attrs import field, frozen

from ..configuration import defaults
from . import serial
from .extents import span
from .graph import DType
from .plan import Step
from .region import Access, Role
from .serial import UNSAID
from .words import words


class Feature(enum.StrEnum):
    """The core's words for what hardware can do and a source may use. Any other lower_snake_case word is a capability too."""

    BULK_COPY = "bulk_copy"
    MBARRIER = "mbarrier"
    GRIDDEPCONTROL = "griddepcontrol"
    MMA_SYNC = "mma_sync"
    WGMMA = "wgmma"
    CLUSTER = "cluster"
    LARGE_CLUSTER = "large_cluster"  # of more than 8 blocks
    ATOMICS = "atomics"
    BF16 = "bf16"


class ArgumentKind(enum.Enum):
    """How an argument is passed."""

    POINTER = "pointer"
    I32 = "i32"
    I64 = "i64"
    F32 = "f32"
    TILES = "tiles"  # by value: what the device needs to fetch tiles of an operand; made from its address and a Tiling


@frozen(kw_only=True)
class Tiling:
    """A view of an operand, and the tile of it that one fetch by the device's copy engine brings into shared memory.

    Axes are listed from the one whose neighbours lie side by side outwards. What a tile has behind the end of an axis is zeros.
    ``swizzle`` 128 permutes the chunks of 16 bytes of each row of 128 bytes by the row's number modulo 8; 0 leaves them in order.
    """

    offset: int = 0  # elements of the operand before the view
    extents: tuple[int, ...]  # elements of the view along each axis
    steps: tuple[int, ...]  # elements from one to the next along each axis; 1 along the first
    tile: tuple[int, ...]  # elements of a tile along each axis
    swizzle: int = 0  # bytes

    @property
    def end(self) -> int:
        """Elements of the operand up to the last one of the view."""
        return self.offset + span(self.extents, self.steps)


@frozen(kw_only=True)
class KernelArgument:
    """One argument of a launch, in order.

    A pointer names its operand of the match (``operand``), or a workspace (role WORKSPACE), or nothing (``operand``
    empty and role None): then null is passed. Tiles name an operand and have its ``tiling``. A scalar has ``value``.
    """

    name: str
    kind: ArgumentKind
    role: Role | None = None
    access: Access = Access.READ
    operand: str = ""  # name of an operand or workspace
    dtype: DType | None = None  # of the elements behind a pointer
    value: int | float = 0
    tiling: Tiling | None = field(default=None, repr=False, metadata={UNSAID: True})  # keys without one are as before

    @property
    def addressed(self) -> bool:
        """Whether it is made from the address of an operand or workspace, or is null."""
        return self.kind in (ArgumentKind.POINTER, ArgumentKind.TILES)


def pointer(name: str, role: Role, dtype: DType, access: Access = Access.READ, operand: str = "") -> KernelArgument:
    """A pointer to the operand (or workspace) called ``operand``, by default called like the argument."""
    return KernelArgument(name=name, kind=ArgumentKind.POINTER, role=role, access=access, operand=operand or name, dtype=dtype)


def null(name: str) -> KernelArgument:
    """The null pointer of an operand that the match does not have."""
    return KernelArgument(name=name, kind=ArgumentKind.POINTER)


def tiles(name: str, role: Role, dtype: DType, tiling: Tiling, operand: str = "") -> KernelArgument:
    """What fetches tiles of the operand called ``operand``, by default called like the argument; it is only read."""
    return KernelArgument(name=name, kind=ArgumentKind.TILES, role=role, operand=operand or name, dtype=dtype, tiling=tiling)


def i32(name: str, value: int) -> KernelArgument:
    """A 32-bit integer by value."""
    return KernelArgument(name=name, kind=ArgumentKind.I32, value=int(value))


def i64(name: str, value: int) -> KernelArgument:
    """A 64-bit integer by value."""
    return KernelArgument(name=name, kind=ArgumentKind.I64, value=int(value))


def f32(name: str, value: float) -> KernelArgument:
    """A 32-bit float by value."""
    return KernelArgument(name=name, kind=ArgumentKind.F32, value=float(value))


@frozen(kw_only=True)
class Launch:
    """One kernel launch. ``pdl``: the source follows the PDL rules, so the launch attribute may be set."""

    entry: str  # name of the kernel in the text
    grid: tuple[int, int, int]  # blocks
    block: tuple[int, int, int]  # threads
    shared_bytes: int = 0  # dynamic shared memory
    cluster: int = 1  # blocks per cluster along x; 1: none
    pdl: bool = False
    arguments: tuple[KernelArgument, ...]  # in the order of the kernel's parameters


@frozen(kw_only=True)
class Workspace:
    """Scratch memory of one step. ``zeroed``: all zero before the first run; the kernel leaves it zero again."""

    name: str
    nbytes: int
    zeroed: bool = False


CALLABLE = "callable"  # language of a step that an Implementation binds: there is no text to build


@frozen(kw_only=True)
class StepSource:
    """The text of a step and how to launch it.

    ``code`` includes its ``headers`` (name, text) and ``<agentcompile/...>`` from the backend's include folders.
    ``features`` are the capabilities that a target must have for it. ``digest`` names the emitted entries;
    ``reduction_depth`` is the longest chain of roundings of one accumulator: per-thread length plus log2 of the threads that
    combine; 0 where nobody knows it. It is shown, and takes no part in the error budget, which the core computes.
    ``periods`` are the lengths, in positions, at which the work along a position begins anew: a tile, a tile times the
    splits. Positions around their multiples are tried; without them, the core takes the integers of schedule and launches.
    """

    language: str = defaults.LANGUAGE
    digest: str
    code: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # file names and texts
    features: tuple[str, ...] = field(default=(), converter=words)
    launches: tuple[Launch, ...]  # run one after the other
    workspaces: tuple[Workspace, ...] = ()
    reduction_depth: int = 0
    periods: tuple[int, ...] = ()

    @cached_property
    def key(self) -> str:
        """Names text and launches: sources of several shapes share one digest, and so one binary, but not their grids and values."""
        tilings = [argument.tiling for launch in self.launches for argument in launch.arguments if argument.tiling]
        launched = hashlib.sha256(repr((self.launches, self.workspaces, *tilings)).encode()).hexdigest()
        return f"{self.digest}-{launched[:16]}"

    @cached_property
    def identity(self) -> str:
        """32 hex digits of all that is said here: what stands for it in keys, several of which name one source of tens of kilobytes."""
        return serial.digest(self, length=32)


@frozen(kw_only=True)
class Candidate:
    """A step with its source."""

    signature: str  # of the region
    step: Step
    source: StepSource


@frozen(kw_only=True)
class Resources:
    """What the compiler reported of one kernel."""

    registers: int = 0  # per thread
    shared_bytes: int = 0  # static, per block
    spill_bytes: int = 0  # per thread
    local_bytes: int = 0  # per thread: arrays that are not in registers, and what is spilled


@frozen(kw_only=True)
class Kernel:
    """A built source: one binary with all its entries, for one architecture, by one backend."""

    digest: str  # of the StepSource
    backend: str
    arch: str  # the variant that its binary is for, as the target says it
    binary: bytes = field(repr=False)
    sha256: str  # of binary, in hex
    compiler: str  # name and version
    resources: Resources = Resources()
    build_s: float = 0.0
