"""The one book of what went wrong: every failure once, with how often it was seen, from loading plugins to the last stage."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from attrs import evolve

from ..errors import Failure, bounded

_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|0x[0-9a-fA-F]+|\d+")  # what differs from subject to subject


class Failures(Sequence[Failure]):
    """Failures in order of their first appearance.

    Those of one plugin, stage and cause whose messages differ in numbers and quoted names only are one failure with a
    ``count``. Messages are kept whole up to 2,000 characters.
    """

    def __init__(self, given: Iterable[Failure] = ()) -> None:
        self._kept: dict[tuple[str, ...], Failure] = {}
        for failure in given:
            self.add(failure)

    def add(self, failure: Failure) -> tuple[Failure, bool]:
        """Record a failure; returns it as kept (with its count), and whether it is the first of its kind."""
        failure = evolve(failure, message=bounded(failure.message))
        key = (failure.stage.value, failure.cause.value, failure.plugin, _VARIABLE.sub("#", failure.message))
        before = self._kept.get(key)
        self._kept[key] = failure if before is None else evolve(before, count=before.count + failure.count)
        return self._kept[key], before is None

    def copy(self) -> "Failures":
        """A book that starts with the same entries and grows on its own."""
        return Failures(self)

    @overload
    def __getitem__(self, index: int) -> Failure: ...
    @overload
    def __getitem__(self, index: slice) -> list[Failure]: ...
    def __getitem__(self, index: int | slice) -> Failure | list[Failure]:
        return list(self._kept.values())[index]

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Failure]:
        return iter(list(self._kept.values()))

    def __repr__(self) -> str:
        return f"Failures({list(self)!r})"


def document(failures: Iterable[Failure]) -> list[dict[str, Any]]:
    """Failures as plain types, for ``--json`` and bundles; tracebacks, which hold paths of this machine, stay here."""
    return [{"stage": f.stage.value, "cause": f.cause.value, "plugin": f.plugin, "distribution": f.distribution, "subject": f.subject,
             "message": f.message, "count": f.count} for f in failures]
