"""Defaults, the user's file, the project's, the environment, then flags: the later ones win, and each value knows its origin."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from ..errors import UsageError
from . import files
from .files import File
from .values import CACHE_NAMES, NAMES, CacheLimits, Config, Sections, checked, read, unknown

PREFIX = "AGENTCOMPILE_"
CACHE_VARIABLES = {"AGENTCOMPILE_CACHE_DIR": "folder", "AGENTCOMPILE_CACHE_MAX_BYTES": "max_bytes"}
SECTION = "plugin"
DEFAULT = "default"
ARGUMENT = "argument"
Layer = tuple[str, Any, str]  # dotted key, value, origin
_LISTS = frozenset(PREFIX + name.upper() for name in NAMES if isinstance(getattr(Config(), name), tuple))


class Text(str):
    """The value of a plugin's setting as its environment variable holds it; read by type once the plugin's settings are known."""


@frozen(kw_only=True)
class Effective:
    """The configuration that holds, and for every value that is not a default where it comes from (by dotted key).

    ``files`` are those that were looked at, weakest first: the user's, the project's where there is one.
    """

    config: Config
    origins: tuple[tuple[str, str], ...] = ()
    files: tuple[File, ...] = ()

    def origin(self, key: str) -> str:
        """Where the value of ``key`` comes from."""
        return dict(self.origins).get(key, DEFAULT)

    def rows(self) -> list[Layer]:
        """Every value: dotted key, value, origin."""
        plain = {name: getattr(self.config, name) for name in NAMES}
        plain |= {f"cache.{name}": value for name, value in asdict(self.config.cache).items()}
        for section, items in self.config.plugins:
            plain |= {f"{SECTION}.{section}.{name}": value for name, value in items}
        return [(key, value, self.origin(key)) for key, value in plain.items()]

    def of_project(self) -> dict[str, str]:
        """The dotted keys that a project's file sets, whether or not something stronger wins, and which file."""
        return {key: file.label for file in self.files if file.of_project for key in file.values}


def resolve(flags: Mapping[str, Any] | None = None, *, folder: Path | None = None, environ: Mapping[str, str] | None = None,
            base: Config | None = None) -> Effective:
    """Lay the sources over each other, weakest first.

    Args:
        flags: values by dotted key that a caller named; None means that it named none.
        folder: where the project's file is looked for, upwards; the current folder by default.
        environ: the environment; that of the process by default.
        base: what the defaults are.

    Raises:
        UsageError: a source is broken, sets what does not exist or what it may not, or a value is of the wrong type.
    """
    environment = dict(os.environ if environ is None else environ)
    try:
        folder = (folder or Path.cwd()).absolute()
    except FileNotFoundError as exc:
        raise UsageError("the current folder is gone, so no project's configuration can be looked for; change to one that exists") from exc
    found = _files(environment, folder)
    layers = [(key, _beside(file, key, value), file.label) for file in found for key, value in file.values.items()]
    layers += _environment(environment)
    layers += [(key, value, ARGUMENT) for key, value in (flags or {}).items() if value is not None]
    config, origins = base or Config(), {}
    for key, value, where in layers:
        config = with_value(config, key, value, where)
        origins[key] = where
    return Effective(config=config, origins=tuple(origins.items()), files=tuple(found))


def _files(environ: dict[str, str], folder: Path) -> list[File]:
    user, project = files.user_file(environ), files.project_file(folder)
    found = []
    if user is not None:
        found.append(files.read(user, of_project=False, must_exist=files.ENVIRONMENT in environ))
    if project is not None and project != user:
        found.append(files.read(project, of_project=True))
    return found


def _beside(file: File, key: str, value: Any) -> Any:
    """A folder that a file names is one beside that file, wherever the command runs."""
    if key == "cache.folder" and isinstance(value, str) and value:
        return str(file.path.parent / Path(value).expanduser())
    return value


def _environment(environ: Mapping[str, str]) -> list[Layer]:
    """``AGENTCOMPILE_ADVISOR`` and its like; settings of a plugin as ``AGENTCOMPILE_<PLUGIN>__<SETTING>``.

    Empty ones count as not set, but for lists.
    """
    found: list[Layer] = []
    for variable in sorted(name for name in environ if name.startswith(PREFIX) and (environ[name] or name in _LISTS)):
        rest, text = variable.removeprefix(PREFIX).lower(), environ[variable]
        if variable in CACHE_VARIABLES:
            name = CACHE_VARIABLES[variable]
            found.append((f"cache.{name}", read(CacheLimits, name, text, variable), variable))
        elif rest in NAMES:
            found.append((rest, read(Config, rest, text, variable), variable))
        elif "__" in rest:
            section, _, name = rest.partition("__")
            files.check_no_secret(name, variable)
            found.append((f"{SECTION}.{section}.{name}", Text(text), variable))
    return found


def with_value(config: Config, key: str, value: Any, where: str) -> Config:
    """``config`` with the value of one dotted key, checked unless it is a plugin's (``plugin.<name>.<setting>``).

    Raises:
        UsageError: there is no such key, or it takes no such value; ``where`` is named as the source.
    """
    head, _, rest = key.partition(".")
    if not rest and head in NAMES:
        return evolve(config, **{head: checked(Config, head, value, where)})
    if head == "cache" and rest in CACHE_NAMES:
        return evolve(config, cache=evolve(config.cache, **{rest: checked(CacheLimits, rest, value, where)}))
    section, _, name = rest.partition(".")
    if head == SECTION and section and name:
        return evolve(config, plugins=_section(config.plugins, section, name, value))
    if head == SECTION:
        raise UsageError(f"{where} sets {key!r}; settings of a plugin stand in a section of their own, [{SECTION}.NAME]")
    raise unknown(key, (*NAMES, *(f"cache.{name}" for name in CACHE_NAMES)), where)


def _section(sections: Sections, section: str, name: str, value: Any) -> Sections:
    found = {key: dict(items) for key, items in sections}
    found.setdefault(section, {})[name] = tuple(value) if isinstance(value, list) else value
    return tuple((key, tuple(items.items())) for key, items in found.items())
