"""Find plugins, load each on its own. What one raises stops neither another nor the host."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any

import pluggy
from attrs import frozen

from ..errors import Cause, ContractError, Failure, StageName
from ..ir.target import Target
from . import hookspecs
from .catalog import EVENTS, NAME, OFFERS, Catalog, PluginInfo, T, log
from .interfaces import Offer, RegionRule
from .match_kind import MatchKind
from .settings import check_class

_GROUP = re.compile(r"agentcompile\.v(\d+)\Z")


# The core's own offers are plugins too, loaded first; each is a module with hookimpls.
BUILT_IN = {
    "core_frontends": "agentcompile_core.stages.capture.frontends",
    "core_runtimes": "agentcompile_core.runtime.built_in",
    "core_advisors": "agentcompile_core.stages.advise.heuristic",
}


@frozen
class _Found:
    name: str
    distribution: str
    load: Callable[[], object]


def _entry_points(catalog: Catalog) -> dict[str, list[_Found]]:
    """Installed entry points by group, those of any generation of the hook API, sorted; a distribution seen twice counts once."""
    found: dict[tuple[str, str, str], _Found] = {}
    for dist in metadata.distributions():
        try:
            points = tuple(point for point in dist.entry_points if _GROUP.match(point.group))
            label = _label(dist) if points else ""  # which costs far more to read than the points
        except Exception as exc:  # somebody's damaged installation, perhaps of no plugin at all
            _unreadable(dist, exc, catalog)
            continue
        for point in points:
            found.setdefault((point.group, point.name, point.value), _Found(point.name, label, point.load))
    groups: dict[str, list[_Found]] = {}
    for key in sorted(found):
        groups.setdefault(key[0], []).append(found[key])
    return groups


def _label(dist: metadata.Distribution) -> str:
    """Name and version, each of which would read and parse all of the metadata."""
    said = dist.metadata
    return f"{said['Name']} {said['Version']}"


def _unreadable(dist: Any, exc: Exception, catalog: Catalog) -> None:
    name = str(getattr(dist, "_path", "")) or "a distribution"
    message = f"its entry points cannot be read ({type(exc).__name__}: {exc}); install it again"
    log.info("%s: %s", name, message)
    catalog.plugins.append(PluginInfo(name=name, distribution=name, state="unreadable", message=message))


def _built_in() -> Iterator[_Found]:
    for name, path in BUILT_IN.items():
        def load(path: str = path) -> object:
            import importlib

            return importlib.import_module(path)

        yield _Found(name, "agentcompile-core", load)


class _Loader:
    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.pm = pluggy.PluginManager(hookspecs.PROJECT)
        self.pm.add_hookspecs(hookspecs)
        catalog.manager = self.pm

    def add(self, found: _Found) -> None:
        failed_before = len(self.catalog.failures)
        offers = self._load(found)
        failed = [f.message for f in self.catalog.failures[failed_before:]]
        state = "failed" if failed and not offers else "loaded"
        self.catalog.plugins.append(PluginInfo(name=found.name, distribution=found.distribution, state=state,
                                               offers=tuple(offers or ()), message="; ".join(failed)))

    def _load(self, found: _Found) -> list[str] | None:
        def guard(call: Callable[[], T], cause: Cause, subject: str) -> T | None:
            return self.catalog.guard(call, stage=StageName.LOAD, cause=cause, plugin=found.name, subject=subject,
                                      distribution=found.distribution)

        plugin = guard(found.load, Cause.IMPORT, "import")
        if plugin is None:
            return None
        needs = getattr(plugin, "AGENTCOMPILE_API", (hookspecs.API[0], 0))
        message = ""
        if type(needs) is not tuple or [type(part) for part in needs] != [int, int]:
            message = f"AGENTCOMPILE_API is {needs!r}; write the hook API it needs as two integers, such as {hookspecs.API}"
        elif needs > hookspecs.API:
            message = f"needs hook API {needs}, this core has {hookspecs.API}; upgrade agentcompile-core"
        if message:
            self.catalog.fail(Failure(stage=StageName.LOAD, cause=Cause.API, plugin=found.name, subject="hook API",
                                      distribution=found.distribution, message=message))
            return None
        if guard(lambda: self._register(plugin, found.name), Cause.CONTRACT, "hook signatures") is None:
            return None
        names: list[str] = []
        for hook, kind in OFFERS.items():
            for impl in getattr(self.pm.hook, hook).get_hookimpls():
                if impl.plugin is plugin:
                    items = guard(lambda impl=impl: list(impl.function()), Cause.EXCEPTION, hook)  # type: ignore[misc]
                    for item in items or ():
                        name = guard(lambda item=item, hook=hook, kind=kind: self._admit(hook, kind, item, found.name),  # type: ignore[misc]
                                     Cause.CONTRACT, f"{hook}: {item!r}")
                        names += [name] if name else []
        return names

    def _register(self, plugin: object, name: str) -> str:
        if "/" in name:
            raise ContractError(f"an entry point is called {name!r}; its name must not hold a slash, which qualified names do")
        if self.pm.has_plugin(name):
            other = next(info.distribution for info in self.catalog.plugins if info.name == name)
            raise ContractError(f"two plugins are called {name!r}, the other one comes from {other}; uninstall one")
        try:
            self.pm.register(plugin, name)
            known = (*OFFERS, *EVENTS)
            for attribute in dir(plugin):
                if self.pm.parse_hookimpl_opts(plugin, attribute) is not None and attribute not in known:
                    raise ContractError(f"unknown hook {attribute!r}; known: {', '.join(known)}")
        except (Exception, SystemExit):
            if self.pm.get_plugin(name) is plugin:
                self.pm.unregister(plugin)
            raise
        return name

    def _admit(self, hook: str, kind: type[Offer] | type[Target], item: Any, plugin: str) -> str:
        if not isinstance(item, kind):
            raise ContractError(f"expected {kind.__name__}, got {type(item).__name__}")
        name = getattr(item, "name", None)
        if type(name) is not str or not NAME.match(name):
            raise ContractError(f"bad name {name!r}; use lower_snake_case")
        if type(item.version) is not int or item.version < 1:
            raise ContractError(f"bad version {item.version!r} of {item.name}; use an int from 1")
        if isinstance(item, Offer):
            check_class(item)
        shelf = self.catalog.offers[hook]
        qualified = f"{plugin}/{item.name}"
        if qualified in shelf:
            raise ContractError(f"{qualified!r} is offered twice")
        if isinstance(item, RegionRule):
            self._check_kinds(item, qualified)
        shelf[qualified] = item
        return f"{kind.__name__}:{item.name}"


    def _check_kinds(self, rule: RegionRule, qualified: str) -> None:
        for kind in tuple(rule.kinds):
            if not isinstance(kind, MatchKind):
                raise ContractError(f"the kinds of {qualified} hold a {type(kind).__name__}; expected MatchKind")
            for other, offered in self.catalog.region_rules.items():
                if any(theirs.name == kind.name and theirs != kind for theirs in offered.kinds):
                    raise ContractError(f"{qualified} and {other} offer different match kinds called {kind.name!r}; rename one of them")


def load_catalog(*, only: Iterable[str] | None = None, block: Iterable[str] = (), strict: bool | None = None,
                 extra: Iterable[tuple[str, object]] = ()) -> Catalog:
    """Load the core's own plugins, the installed ones and ``extra`` (name, object) pairs.

    ``only`` and ``block`` are entry point names, of installed plugins only; the environment adds AGENTCOMPILE_PLUGINS
    (comma separated, empty: none) and AGENTCOMPILE_BLOCK_PLUGINS. ``strict`` (default: AGENTCOMPILE_STRICT=1) re-raises what a plugin
    raises and raises broken contracts; crashes of kernels and of the worker, and what compilers refuse, are recorded either way.
    """
    environment = os.environ.get("AGENTCOMPILE_PLUGINS")
    if only is None and environment is not None:
        only = _names(environment)
    allowed = None if only is None else set(only)
    blocked = {*block, *_names(os.environ.get("AGENTCOMPILE_BLOCK_PLUGINS", ""))}
    catalog = Catalog(strict=os.environ.get("AGENTCOMPILE_STRICT") == "1" if strict is None else strict)
    loader = _Loader(catalog)
    for found in _built_in():
        loader.add(found)
    groups = _entry_points(catalog)
    ours = groups.pop(hookspecs.GROUP, [])
    for found in ours:
        if found.name in blocked or (allowed is not None and found.name not in allowed):
            catalog.plugins.append(PluginInfo(name=found.name, distribution=found.distribution, state="blocked"))
        else:
            loader.add(found)
    for name in sorted((allowed or set()) - {found.name for found in ours}):
        message = "asked for, but no installed distribution offers it"
        catalog.plugins.append(PluginInfo(name=name, distribution="none", state="not installed", message=message))
    for name, plugin in extra:
        loader.add(_Found(name, "given by the caller", lambda plugin=plugin: plugin))  # type: ignore[misc]
    for group, others in groups.items():
        catalog.plugins += [_other_generation(found, int(group.rsplit(".v", 1)[1])) for found in others]
    return catalog


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _other_generation(found: _Found, api: int) -> PluginInfo:
    upgrade = found.distribution if api < hookspecs.API[0] else "agentcompile-core"
    message = f"built for hook API {api}, this core speaks {hookspecs.API[0]}; upgrade {upgrade}"
    return PluginInfo(name=found.name, distribution=found.distribution, state="other generation", message=message)
