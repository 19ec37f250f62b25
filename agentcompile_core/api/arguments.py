"""What ``compile`` and the command line accept by name, checked before any model is opened."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ..configuration import Config, defaults
from ..errors import UsageError
from ..plugin.catalog import Catalog
from ..plugin.interfaces import DecodeRuntime, KVCacheRuntime

COMPILE = ("dtype", "max_context", "meta")
MODEL = ("random_weights", "example_inputs")
DTYPES = ("float16", "bfloat16", "float32")
ORIGINS = ("generated", "handwritten", "third_party")
FIELDS = tuple(f.name for f in attrs.fields(Config))
_TEXTS = ("advisor", "target", "device", "backend", "kv_cache", "decode")
_LISTS = ("validators", "origins")


def split(options: Mapping[str, Any], *groups: Iterable[str]) -> tuple[dict[str, Any], ...]:
    """``options`` cut into one dict per group of names, and one for the rest."""
    named = [set(group) for group in groups]
    parts = [{k: v for k, v in options.items() if k in group} for group in named]
    return (*parts, {k: v for k, v in options.items() if not any(k in group for group in named)})


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause with the names most like ``name``, or all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, 3)
    return f"did you mean {' or '.join(near)}?" if near else f"allowed: {', '.join(known)}"


def check_known(options: Mapping[str, Any], catalog: Catalog) -> None:
    """Refuse names that neither ``compile`` nor any frontend takes.

    Raises:
        UsageError: with the nearest names.
    """
    known = (*COMPILE, *MODEL, *FIELDS, *(name for frontend in catalog.frontends.values() for name in frontend.options))
    for name in options:
        if name not in known:
            raise UsageError(f"unknown option {name!r}; {nearest(name, known)}")


def configuration(base: Config | None, given: Mapping[str, Any]) -> Config:
    """``base`` (default: Config()) with fields replaced by ``given``; lists may be lists or comma-separated text.

    Raises:
        UsageError: a value is of the wrong kind or out of range.
    """
    values: dict[str, Any] = {name: _listed(name, value) if name in _LISTS else value for name, value in given.items()}
    values = {name: "" if value is None and name in _TEXTS else value for name, value in values.items()}
    config = attrs.evolve(base or Config(), **values)
    for name in _TEXTS:
        if not isinstance(getattr(config, name), str):
            raise UsageError(f"{name} is {getattr(config, name)!r}; it must be a name")
    _positive(config.budget_s, "budget_s", (int, float))
    for name in ("budget_plans", "rounds"):
        _positive(getattr(config, name), name, (int,))
    unknown = [origin for origin in config.origins if origin not in ORIGINS]
    if unknown:
        raise UsageError(f"unknown origin {unknown[0]!r}; {nearest(unknown[0], ORIGINS)}")
    return config


def _listed(name: str, value: Any) -> tuple[str, ...]:
    items = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise UsageError(f"{name} is {value!r}; it must be a list of names")
    return tuple(items)


def _positive(value: Any, name: str, kinds: tuple[type, ...]) -> None:
    if isinstance(value, bool) or type(value) not in kinds or not value > 0:
        raise UsageError(f"{name} is {value!r}; it must be positive ({' or '.join(k.__name__ for k in kinds)}); "
                         "budget_s, budget_plans and rounds must be positive")


def check_choices(config: Config, catalog: Catalog) -> None:
    """Refuse names that no installed plugin offers.

    Raises:
        UsageError: an unknown advisor, validator, backend or runtime; the message lists what is installed.
    """
    catalog.find("agentcompile_advisors", config.advisor)
    for name in config.validators:
        if not any(v.name == name for v in catalog.validators.values()) and name not in defaults.VALIDATORS:
            catalog.find("agentcompile_validators", name)
    if config.backend:
        catalog.find("agentcompile_backends", config.backend)
    for name, kind, role in ((config.kv_cache, KVCacheRuntime, "KV cache"), (config.decode, DecodeRuntime, "decode")):
        found = sorted(r.name for r in catalog.runtimes.values() if isinstance(r, kind))
        if name and name not in found:
            raise UsageError(f"unknown {role} runtime {name!r}; installed: {', '.join(found)}")


def check_dtype(name: Any) -> None:
    """Refuse an element type that nothing is compiled for.

    Raises:
        UsageError: with those that are allowed.
    """
    if name is not None and name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; allowed: {', '.join(DTYPES)}")


def check_context(tokens: Any) -> None:
    """Refuse a context that holds nothing.

    Raises:
        UsageError: it is no integer of at least 2.
    """
    if tokens is None:
        return
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise UsageError(f"a context of {tokens!r}; it must be an integer of at least 2 tokens")
    if tokens < 2:
        raise UsageError(f"a context of {tokens}; it must hold at least 2 tokens")
