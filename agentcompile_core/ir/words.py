"""Open vocabularies: labels, input families and kinds are words; the core has constants for its own, plugins bring theirs."""

import re
from collections.abc import Iterable

_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")


def is_word(text: object) -> bool:
    """Whether ``text`` is lower_snake_case of at most 64 characters."""
    return isinstance(text, str) and _WORD.match(text) is not None


def word(text: str) -> str:
    """``text`` as a plain string.

    Raises:
        ValueError: it is not lower_snake_case of at most 64 characters.
    """
    if not is_word(text):
        raise ValueError(f"{text!r} is no word of a vocabulary; use lower_snake_case, at most 64 characters")
    return str.__str__(text)


def words(given: Iterable[str]) -> tuple[str, ...]:
    """``word`` of each."""
    return tuple(word(text) for text in given)


def optional_word(text: str | None) -> str | None:
    """``word``, or None as it is."""
    return None if text is None else word(text)
