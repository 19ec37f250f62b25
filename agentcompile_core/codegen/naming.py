"""Names of generated text: a digest over it, and identifiers that end in that digest.

Two schedules of one family must live in one program, so what they define gets the digest of their text as a suffix. The
digest is over text alone: shapes are kernel arguments, so matches of different shapes with one schedule share one kernel.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from ..ir import serial


def source_digest(*texts: str, language: str) -> str:
    """16 hex digits that name a source: over its language and texts, before renaming."""
    return serial.digest("source", language, list(texts))


def rename(text: str, identifiers: Iterable[str], digest: str) -> str:
    """``text`` in which every whole identifier of ``identifiers`` ends in ``_<digest>``; parts of longer ones stay as they are."""
    names = tuple(name for name in identifiers if name in text)
    return _whole(names).sub(lambda found: f"{found[0]}_{digest}", text) if names else text


@lru_cache(maxsize=256)
def _whole(names: tuple[str, ...]) -> re.Pattern[str]:
    """Any of ``names``, whole. What is before a name is looked at behind it: a search for a first letter is three times as fast as one
    that looks back at every place."""
    either = "|".join(rf"{name}(?<!\w{name})" for name in map(re.escape, names))
    return re.compile(rf"(?:{either})(?!\w)")
