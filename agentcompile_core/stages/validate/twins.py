"""Candidates of several regions that are one: the same computation of other nodes, by the same source, on the same kinds of cases.

Layers that differ in their attention alone, or a first one without experts, are regions of their own, and most of their matches are equal.
What was found out of one of them holds for all.
"""

from collections.abc import Iterable

from .entries import Entry


class Twins:
    """Which of ``entries`` are one, and for which of them an answer is under way."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries: dict[str, list[Entry]] = {}
        for entry in entries:
            self._entries.setdefault(entry.twin, []).append(entry)
        self._sent: set[str] = set()

    def send(self, entry: Entry) -> None:
        """Note that ``entry`` is evaluated: the others wait for what comes of it."""
        self._sent.add(entry.twin)

    def waits(self, entry: Entry) -> bool:
        """Whether another one of them is evaluated, or was."""
        return entry.twin in self._sent

    def of(self, entry: Entry) -> list[Entry]:
        """The others."""
        return [other for other in self._entries.get(entry.twin, ()) if other is not entry]
