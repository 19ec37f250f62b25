"""Rotary frequencies that depend on how long a sequence is (LongRoPE)."""

import math
from collections.abc import Mapping, Sequence

from attrs import field, frozen

from ..errors import VerificationError


@frozen(kw_only=True)
class Frequencies:
    """What a buffer of frequencies holds, by how long a sequence is: up to ``limit`` positions ``near``, beyond them ``far``.

    All positions of a sequence are turned by the same ones. ``rereads``: one that grows beyond the limit is read again from its first
    token; else what is cached stays as it was turned.
    """

    source: str  # qualified name of the buffer
    limit: int
    near: tuple[float, ...] = field(repr=False)
    far: tuple[float, ...] = field(repr=False)
    rereads: bool

    @property
    def changes(self) -> bool:
        """Whether there are others beyond the limit; else it is the model's own, beyond which nothing is compiled."""
        return self.near != self.far


def near_of(several: Sequence[Frequencies]) -> int:
    """Positions of the longest sequence that is turned by the ``near`` ones of all; 0: there are no others."""
    return min((one.limit for one in several if one.changes), default=0)


def unlike(several: Sequence[Frequencies], others: Sequence[Frequencies]) -> str:
    """One clause on how two models turn long sequences otherwise; empty: alike, but for the last bits of what devices compute."""
    def facts(one: Frequencies) -> tuple[object, ...]:
        return one.source, one.limit, one.rereads, len(one.near), len(one.far)

    if list(map(facts, several)) != list(map(facts, others)):
        return "it turns long sequences otherwise: by other limits, or other buffers"
    numbers = [(x, y) for one, other in zip(several, others, strict=True) for x, y in zip((*one.near, *one.far), (*other.near, *other.far))]
    return "" if all(math.isclose(x, y, rel_tol=1e-5) for x, y in numbers) else "it turns long sequences by other frequencies"


def verify_frequencies(several: tuple[Frequencies, ...], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """``shapes``: of the buffers that graphs read, by their names.

    Raises:
        VerificationError: a buffer is none of these, or has another shape, a number is not finite, or limits differ.
    """
    for one in several:
        if not shapes.get(one.source) == (len(one.near),) == (len(one.far),):
            raise VerificationError(f"frequencies of {one.source!r} are those of no buffer of this shape that a graph reads")
        if one.limit < 1 or (one.changes and one.limit != near_of(several)) or not all(map(math.isfinite, (*one.near, *one.far))):
            raise VerificationError(f"frequencies of {one.source!r} hold up to {one.limit} positions; one limit for all of at least 1 is "
                                    "allowed, and finite numbers")
    if len({one.source for one in several}) < len(several) or len({one.rereads for one in several}) > 1:
        raise VerificationError("frequencies of one buffer are there twice, or some are read again and others not")
