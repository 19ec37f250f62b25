"""The two files: one of the user, one of the project, which is trusted with less.

A project's file comes with a checkout, perhaps somebody else's: it must not redirect requests that carry a key, move
the cache, or trust anything in the user's name. Keys of services belong in no file at all.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from attrs import frozen

from ..errors import UsageError

NAME = "agentcompile.toml"
ENVIRONMENT = "AGENTCOMPILE_CONFIG"  # another file in place of the user's; empty: none
PROJECT_ONLY = frozenset({"module"})  # of [tool.agentcompile]: what a project folder is compiled from; no setting
_SECRET = re.compile(r"(^|[._])(key|token|secret|password|passwd|credentials?|authorization)$|_(key|token|secret|password)$", re.IGNORECASE)
_USER_ONLY = re.compile(r"^(cache|trust)(\.|_|$)|(^|[._])(api_base|base_url|url|endpoint|proxy|host)$", re.IGNORECASE)


@frozen(kw_only=True)
class File:
    """One file that was read: its values by dotted key, and what to call it in messages."""

    label: str
    values: dict[str, Any]


def user_file(environ: "dict[str, str]") -> Path | None:
    """The file of the user: ``AGENTCOMPILE_CONFIG`` where it is set (empty: none), else the platform's place for configuration."""
    if ENVIRONMENT in environ:
        return Path(environ[ENVIRONMENT]).expanduser() if environ[ENVIRONMENT] else None
    try:
        import platformdirs

        return Path(platformdirs.user_config_dir("agentcompile")) / NAME
    except (ImportError, RuntimeError):
        return None


def project_file(folder: Path) -> Path | None:
    """The nearest ``agentcompile.toml``, or pyproject.toml with ``[tool.agentcompile]``, from ``folder`` upwards to the checkout's root."""
    for place in (folder, *folder.parents):
        if (place / NAME).is_file():
            return place / NAME
        if (place / "pyproject.toml").is_file() and _table(place / "pyproject.toml"):
            return place / "pyproject.toml"
        if (place / ".git").exists():
            break
    return None


def read(path: Path, *, of_project: bool, must_exist: bool = False) -> File:
    """The values of one file by dotted key (``advisor``, ``cache.folder``, ``plugin.litellm.model``).

    Raises:
        UsageError: it is no TOML, holds a key of a service, or is a project's and sets what only its user may.
    """
    label = str(path)
    if not path.is_file():
        if must_exist:
            raise UsageError(f"{ENVIRONMENT} names {path}, which is no file; write it, or unset the variable")
        return File(label=label, values={})
    table = _table(path)
    values = {key: value for key, value in _flat(table).items() if key not in PROJECT_ONLY}
    for key in values:
        if _SECRET.search(key):
            raise UsageError(f"{label} sets {key!r}; keys never stand in a file: set the provider's own environment variable")
        if of_project and _USER_ONLY.search(key):
            raise UsageError(f"{label} is a project's file and sets {key!r}, which only your own file, the environment or a flag may set")
    return File(label=label, values=values)


def _table(path: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} is not valid TOML ({exc}); mend it or remove it") from exc
    except OSError as exc:
        raise UsageError(f"{path} cannot be read ({exc.strerror}); mend its permissions or remove it") from exc
    if path.name != "pyproject.toml":
        return data
    table = data.get("tool", {}).get("agentcompile", {}) if isinstance(data.get("tool", {}), dict) else {}
    return table if isinstance(table, dict) else {}


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
