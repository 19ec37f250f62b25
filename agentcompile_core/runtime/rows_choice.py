"""What a user says of the steps of several rows, and is told of them: on every session, whether it has such steps or not."""

from ..errors import UsageError

WHEN = ("measured", "always", "never")


class RowsChoice:
    """``when`` batches may have steps of several rows. ``notes``: why they have none, once each."""

    def __init__(self, *notes: str) -> None:
        self._when = "measured"
        self.notes: tuple[str, ...] = notes

    @property
    def seconds(self) -> dict[tuple[int, str], tuple[float, float]]:
        """By number of rows and program of the step: of a step of all of them, and of a single row's."""
        return {}

    @property
    def when(self) -> str:
        """``measured``, the default: on an accelerator, for as many rows as they were faster for than single steps; ``always`` and
        ``never`` say it.

        Raises:
            UsageError: another word is assigned.
        """
        return self._when

    @when.setter
    def when(self, word: str) -> None:
        if word not in WHEN:
            raise UsageError(f"session.rows.when = {word!r}: allowed are {', '.join(map(repr, WHEN))}")
        self._when = word
