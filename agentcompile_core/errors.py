"""What can go wrong: exceptions for a caller's mistake, records for everything that the run survives."""

import enum
import traceback

from attrs import field, frozen


class AgentCompileError(Exception):
    """Base of every error that AgentCompile raises on purpose; the command line exits with 1."""


class UsageError(AgentCompileError):
    """The caller asked for something that cannot be: what was seen, what is allowed, what to do. Exit code 2."""


class ContractError(AgentCompileError):
    """A plugin returned something that its hook does not allow."""


class VerificationError(AgentCompileError):
    """A value that crosses a stage border breaks an invariant; always a defect of ours or of a plugin."""


class BuildError(AgentCompileError):
    """A compiler refused a source or ran out of its limits."""


class StageName(enum.Enum):
    """Where something happened."""

    LOAD = "load"
    CAPTURE = "capture"
    ANALYZE = "analyze"
    PLAN = "plan"
    ADVISE = "advise"
    LOWER = "lower"
    VALIDATE = "validate"
    SELECT = "select"
    EMIT = "emit"
    INSTALL = "install"
    EVENTS = "events"


class Cause(enum.Enum):
    """The class of a failure, parsed once where it is seen, so that nobody reads message texts later."""

    IMPORT = "import"
    API = "api"
    CONTRACT = "contract"
    EXCEPTION = "exception"
    COMPILE = "compile"
    REGISTERS = "registers"
    SHARED_MEMORY = "shared_memory"
    MISALIGNED = "misaligned"
    TOLERANCE = "tolerance"
    MEMORY_FAULT = "memory_fault"
    RACE = "race"
    CRASH = "crash"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"


def visible(text: str) -> str:
    """``text`` with every character that is neither printed nor the end of a line or a tab as its escape: a plugin's words may hold
    what a terminal obeys."""
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


@frozen(kw_only=True)
class Failure:
    """One recorded fault of a plugin, toolchain or kernel: who, where, about what, and why. Data, never raised."""

    stage: StageName
    cause: Cause
    plugin: str
    subject: str = field(converter=visible)
    message: str = field(converter=visible)
    distribution: str = ""
    traceback: str = field(default="", repr=False)
    count: int = 1  # how often it was seen; ``subject`` is the first of them

    def __str__(self) -> str:
        dist = f" ({self.distribution})" if self.distribution else ""
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        return f"[{self.stage.value}/{self.cause.value}] {self.plugin}{dist} on {self.subject}{more}: {self.message}"


@frozen
class Reject:
    """A polite no with a reason. Falsy, so that ``if family.accepts(...)`` reads as expected."""

    reason: str

    def __bool__(self) -> bool:
        return False


MAX_MESSAGE = 2000  # characters of a message that are kept


def bounded(text: str, limit: int = MAX_MESSAGE) -> str:
    """``text`` whole, or its first ``limit`` characters up to the end of a line, sentence or word, with an ellipsis."""
    if len(text) <= limit:
        return text
    head = text[: limit - 4]
    ends = [head.rfind("\n"), head.rfind(". ") + 1, head.rfind(" ")]
    end = next((e for e in ends if e > limit // 2), len(head))
    return head[:end].rstrip() + " ..."


def one_line(text: str, limit: int = MAX_MESSAGE) -> str:
    """``text`` on one line, bounded, of characters that are printed."""
    return bounded(visible(" ".join(text.split())), limit)


def last_frames(exc: BaseException, limit: int = 4) -> str:
    """The innermost ``limit`` frames of an exception, as text for a Failure."""
    return "".join(traceback.format_exception(exc, limit=-limit))
