"""What everything that a plugin offers has."""

from abc import ABC
from typing import ClassVar


class Offer(ABC):
    """Base of everything a plugin offers: a lower_snake_case name and an integer version that is part of every cache key.

    ``preference``: where several could serve and nobody is named, the highest is taken; the core's own have -1.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    preference: ClassVar[int] = 0
