"""Classes of failures, from what compilers and devices say."""

from ..errors import Cause
from ..plugin.interfaces import Backend


def build_cause(message: str) -> Cause:
    """The class of a failed build."""
    text = message.lower()
    if "shared memory" in text or "shared data" in text:
        return Cause.SHARED_MEMORY
    if "did not finish" in text or "did not answer" in text or "timed out" in text:
        return Cause.TIMEOUT
    if "never waits" in text:
        return Cause.CONTRACT
    return Cause.REGISTERS if "too many registers" in text else Cause.COMPILE


def cause_of(exc: BaseException, backend: Backend | None = None) -> Cause:
    """The class of an exception that running a kernel raised: as its backend says, else by its text."""
    said = backend.cause_of(exc) if backend is not None else None
    if said is not None:
        return said
    text = str(exc).lower()
    if "misaligned" in text:
        return Cause.MISALIGNED
    if any(word in text for word in ("illegal memory access", "illegal address", "out of bounds", "invalid program counter")):
        return Cause.MEMORY_FAULT
    if any(word in text for word in ("launch failed", "launch failure", "illegal instruction", "device-side assert", "trap")):
        return Cause.CRASH
    if "timed out" in text or "timeout" in text:
        return Cause.TIMEOUT
    if "too many resources" in text or "out of resources" in text:
        return Cause.REGISTERS
    return Cause.EXCEPTION
