"""Names of generated text: a digest over it, and identifiers that end in that digest.

Two schedules of one family must live in one program, so what they define gets the digest of their text as a suffix. The
digest is over text alone: shapes are kernel arguments, so matches of different shapes with one schedule share one kernel.
"""

import re
from collections.abc import Iterable

from ..ir import serial


def source_digest(*texts: str, language: str) -> str:
    """16 hex digits that name a source: over its language and texts, before renaming."""
    return serial.digest("source", language, list(texts))


def rename(text: str, identifiers: Iterable[str], digest: str) -> str:
    """``text`` in which every whole identifier of ``identifiers`` ends in ``_<digest>``; parts of longer ones stay as they are."""
    names = "|".join(re.escape(name) for name in identifiers)
    return re.sub(rf"(?<!\w)({names})(?!\w)", rf"\1_{digest}", text) if names else text
