"""Values that must not be written down: those of environment variables that are called keys, tokens, secrets or passwords."""

import os
import re
from collections.abc import Mapping

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
SHORTEST = 8  # a shorter value stands in texts by chance
SHOWN = "[secret]"


def secret_values(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The values, longest first."""
    found = {value.strip() for name, value in (os.environ if environ is None else environ).items() if _NAMES.search(name)}
    return tuple(sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True))


def holds_secret(text: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether one of the values stands in ``text``."""
    return any(value in text for value in secret_values(environ))


def scrubbed(text: str, environ: Mapping[str, str] | None = None) -> str:
    """``text`` with every one of the values replaced."""
    for value in secret_values(environ):
        text = text.replace(value, SHOWN)
    return text
