"""Tables of text."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """Columns padded to their widest cell; numbers to the right."""
    cells = [[" ".join(str(c).splitlines()) for c in row] for row in rows]
    widths = [max(len(h), *(len(r[i]) for r in cells)) if cells else len(h) for i, h in enumerate(head)]
    right = [bool(rows) and all(isinstance(r[i], int | float) for r in rows) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)).rstrip()

    return "\n".join([line(list(head)), line(["-" * w for w in widths]), *(line(r) for r in cells)])
