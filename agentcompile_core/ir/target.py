"""The hardware that code is made for, as a value: limits, and named capabilities. Plugins offer the targets that exist."""

from typing import ClassVar

from attrs import field, frozen
from attrs import validators as v

from ..configuration import defaults
from .words import words

LARGEST_NAME = 128


@frozen(kw_only=True)
class Target:
    """One kind of hardware, as a plugin offers it.

    ``backend`` names the backend that serves it, ``languages`` are those its kernels are written in, ``arch`` is the variant
    that binaries are built for: equal text, binaries that run on both. ``capabilities`` are words of an open vocabulary
    (``ir.candidate.Feature`` has the core's): a source may use those only. ``lanes`` is how many threads run in lockstep.

    A limit of 0 is unknown or does not exist. Bytes are bytes; ``memory_gbps`` is the datasheet bandwidth in 1e9 bytes per
    second. Among installed targets the one of the highest ``preference`` is compiled for where the hardware is not here.
    """

    version: ClassVar[int] = 1

    name: str
    arch: str = field(validator=(v.min_len(1), v.max_len(LARGEST_NAME)))
    backend: str = ""
    languages: tuple[str, ...] = field(default=(defaults.LANGUAGE,), converter=words)
    capabilities: tuple[str, ...] = field(default=(), converter=words)
    lanes: int = field(default=1, validator=v.ge(1))
    sm_count: int = field(default=1, validator=v.ge(1))
    l2_bytes: int = 0
    shared_bytes_per_sm: int = 0
    shared_bytes_per_block: int = 0
    registers_per_sm: int = 0
    threads_per_sm: int = 0
    memory_bytes: int = 0
    memory_gbps: float = 0.0
    preference: int = 0

    def has(self, capability: str) -> bool:
        """Whether the hardware has what is called so."""
        return capability in self.capabilities

    def floor_us(self, nbytes: int) -> float:
        """The time that ``nbytes`` need at the memory bandwidth; 0 where that is unknown."""
        return nbytes / (self.memory_gbps * 1e3) if self.memory_gbps > 0 else 0.0


# Stands where no plugin offers a target: nothing can be lowered for it, every step stays on the framework.
NO_TARGET = Target(name="no_target", arch="none", languages=())
