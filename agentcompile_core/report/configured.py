"""What is configured, as text and as plain types: every value, and where it comes from."""

from typing import Any

from ..configuration import Effective
from ..configuration.layers import SECTION
from ..plugin import settings
from ..plugin.catalog import Catalog
from .tables import table


def config_document(effective: Effective, catalog: Catalog) -> list[dict[str, Any]]:
    """Every value of the core and of every installed plugin: ``key`` (dotted), ``value``, ``origin``."""
    core = [(key, value, origin) for key, value, origin in effective.rows() if not key.startswith(f"{SECTION}.")]
    plugins = [(one.key, one.value, one.origin) for one in settings.rows(effective, catalog)]
    return [{"key": key, "value": _plain(value), "origin": origin} for key, value, origin in (*core, *plugins)]


def config_text(effective: Effective, catalog: Catalog) -> str:
    """The same as a table."""
    rows = [(row["key"], _shown(row["value"]), row["origin"]) for row in config_document(effective, catalog)]
    return table(rows, ("setting", "value", "from"))


def files_document(effective: Effective) -> list[dict[str, Any]]:
    """The files that are looked at, weakest first: ``path``, ``of`` (user or project), ``exists``."""
    return [{"path": file.label, "of": "project" if file.of_project else "user", "exists": file.path.is_file()} for file in effective.files]


def files_text(effective: Effective) -> str:
    """A line per file."""
    lines = [f"{row['of']}: {row['path']}" + ("" if row["exists"] else " (not there)") for row in files_document(effective)]
    return "\n".join(lines) or "no file is read: AGENTCOMPILE_CONFIG is empty, and no project's file is found from here upwards"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return f"{value:g}" if isinstance(value, float) else "-" if value in ("", None) else str(value)
