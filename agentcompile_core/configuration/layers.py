"""Defaults, the user's file, the project's, the environment, then flags: the later ones win, and each value knows its origin."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from ..errors import UsageError
from . import files
from .values import CACHE_NAMES, NAMES, CacheLimits, Config, Sections, checked, read, unknown

PREFIX = "AGENTCOMPILE_"
CACHE_VARIABLES = {"AGENTCOMPILE_CACHE_DIR": "folder", "AGENTCOMPILE_CACHE_MAX_BYTES": "max_bytes"}
SECTION = "plugin"
DEFAULT = "default"


@frozen(kw_only=True)
class Effective:
    """The configuration that holds, and for every value that is not a default where it comes from (by dotted key)."""

    config: Config
    origins: tuple[tuple[str, str], ...]

    def origin(self, key: str) -> str:
        """Where the value of ``key`` comes from."""
        return dict(self.origins).get(key, DEFAULT)

    def rows(self) -> list[tuple[str, Any, str]]:
        """Every value: dotted key, value, origin."""
        plain = {name: getattr(self.config, name) for name in NAMES}
        plain |= {f"cache.{name}": value for name, value in asdict(self.config.cache).items()}
        for section, items in self.config.plugins:
            plain |= {f"{SECTION}.{section}.{name}": value for name, value in items}
        return [(key, value, self.origin(key)) for key, value in plain.items()]


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
    layers = [*_files(environment, folder or Path.cwd()), *_environment(environment)]
    layers += [(key, value, "argument") for key, value in (flags or {}).items() if value is not None]
    config, origins = base or Config(), {}
    for key, value, where in layers:
        config = _with(config, key, value, where)
        origins[key] = where
    return Effective(config=config, origins=tuple(origins.items()))


def _files(environ: dict[str, str], folder: Path) -> list[tuple[str, Any, str]]:
    found = []
    user = files.user_file(environ)
    if user is not None:
        found.append(files.read(user, of_project=False, must_exist=files.ENVIRONMENT in environ))
    project = files.project_file(folder)
    if project is not None and project != user:
        found.append(files.read(project, of_project=True))
    return [(key, value, file.label) for file in found for key, value in file.values.items()]


def _environment(environ: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    """``AGENTCOMPILE_ADVISOR`` and its like; settings of a plugin as ``AGENTCOMPILE_<PLUGIN>__<SETTING>``."""
    found: list[tuple[str, Any, str]] = []
    for variable in sorted(environ):
        rest, text = variable.removeprefix(PREFIX), environ[variable]
        if variable in CACHE_VARIABLES and text:
            name = CACHE_VARIABLES[variable]
            found.append((f"cache.{name}", read(CacheLimits, name, text, variable), variable))
        elif variable.startswith(PREFIX) and rest.lower() in NAMES:
            found.append((rest.lower(), read(Config, rest.lower(), text, variable), variable))
        elif variable.startswith(PREFIX) and "__" in rest:
            section, _, name = rest.lower().partition("__")
            found.append((f"{SECTION}.{section}.{name}", text, variable))
    return found


def _with(config: Config, key: str, value: Any, where: str) -> Config:
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
