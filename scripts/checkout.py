"""Which commit a script measures: one answer for every results file."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit(given: str | None = None) -> str:
    """The commit of this checkout; ``given`` where there is no git here; "unknown" where nobody says."""
    if given:
        return given
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    return found.stdout.strip() or "unknown"
