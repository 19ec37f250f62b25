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

    path: Path
    values: dict[str, Any]
    of_project: bool = False

    @property
    def label(self) -> str:
        """The file in messages."""
        return str(self.path)


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
    if not path.is_file():
        if must_exist:
            raise UsageError(f"{ENVIRONMENT} names {path}, which is no file; write it, or unset the variable")
        return File(path=path, values={}, of_project=of_project)
    table = _table(path)
    values = {key: value for key, value in _flat(table).items() if key not in PROJECT_ONLY}
    label = str(path)
    for key in (*values, *_inside(table)):
        check_no_secret(key, label)
        if of_project and _USER_ONLY.search(key):
            raise UsageError(f"{label} is a project's file and sets {key!r}, which only your own file, the environment or a flag may set")
    return File(path=path, values=values, of_project=of_project)


def is_secret(name: str) -> bool:
    """Whether a setting of this name is a key of some service."""
    return _SECRET.search(name) is not None


def check_no_secret(key: str, where: str) -> None:
    """Refuse a key of a service where configuration stands; its value is never said.

    Raises:
        UsageError: so it is.
    """
    if is_secret(key):
        raise UsageError(f"{where} sets {key!r}; keys never stand in a file or a setting: set the provider's own environment variable")


def _table(path: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} is not valid TOML ({exc}); mend it or remove it") from exc
    except OSError as exc:
        raise UsageError(f"{path} cannot be read ({exc.strerror}); mend its permissions or remove it") from exc
    if path.name != "pyproject.toml":
        return data
    tools = data.get("tool", {})
    table = tools.get("agentcompile", {}) if isinstance(tools, dict) else {}
    if not isinstance(table, dict):
        raise UsageError(f"{path} sets tool.agentcompile to a {type(table).__name__}; write a section [tool.agentcompile]")
    return table


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _inside(value: Any, prefix: str = "") -> list[str]:
    """Names of tables that stand in lists, where no setting is: they are looked through for keys."""
    if isinstance(value, dict):
        return [name for key, inner in value.items() for name in _inside(inner, f"{prefix}{key}.")]
    if isinstance(value, list):
        tables = [item for item in value if isinstance(item, dict)]
        return [f"{prefix}{key}" for table in tables for key in table] + [n for item in value for n in _inside(item, prefix)]
    return []
