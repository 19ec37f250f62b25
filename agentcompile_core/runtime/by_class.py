"""What is found out about a class once, as long as the class is there: every request asks it of the same few."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


def by_class(find: Callable[[type], T]) -> Callable[[type], T]:
    """``find``, whose answer for a class is kept; no answer is None."""
    known: WeakKeyDictionary[type, T] = WeakKeyDictionary()

    @wraps(find)
    def found(kind: type) -> T:
        answer = known.get(kind)
        if answer is None:
            answer = known[kind] = find(kind)
        return answer

    return found
