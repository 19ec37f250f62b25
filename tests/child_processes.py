"""Which processes another one has started, as Linux tells it."""

import contextlib
from pathlib import Path


def children(process: int | str = "self") -> set[int]:
    """Those that ``process`` started and that still run."""
    found: set[int] = set()
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found
