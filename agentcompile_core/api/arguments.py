"""What ``compile`` and the command line accept by name, checked before any model is opened."""

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from ..configuration import Config, Effective, defaults, resolve
from ..configuration.layers import ARGUMENT, DEFAULT, SECTION
from ..configuration.values import NAMES, check_limits
from ..errors import Reject, UsageError
from ..plugin import settings
from ..plugin.catalog import Catalog
from ..plugin.interfaces import DecodeRuntime, KVCacheRuntime

COMPILE = ("dtype", "max_context", "meta")
MODEL = ("random_weights", "example_inputs")
DTYPES = ("float16", "bfloat16", "float32")
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
    _number(config.budget_s, "budget_s", (int, float))
    for name in ("budget_plans", "rounds"):
        _number(getattr(config, name), name, (int,))
    for name in NAMES:
        check_limits(Config, name, getattr(config, name))
    return config


def chosen(base: Config | None, given: Mapping[str, Any], catalog: Catalog) -> tuple[Config, tuple[str, ...]]:
    """The configuration of a call: ``base`` with ``given``, or without a ``base`` what ``resolved`` says; and what is not used.

    Raises:
        UsageError: see ``configuration`` and ``resolved``.
    """
    if base is not None:
        return configuration(base, given), ()
    effective, notes = resolved(given, catalog)
    return effective.config, notes


def resolved(given: Mapping[str, Any], catalog: Catalog) -> tuple[Effective, tuple[str, ...]]:
    """Files, environment and the arguments ``given`` laid over each other, sections of plugins checked; and sentences about unused ones.

    Raises:
        UsageError: a value is of the wrong kind or out of range, does not exist, or may not be set where it is.
    """
    values = {name: value for name, value in given.items() if value is not None}
    plain = configuration(None, values)
    flags = {name: getattr(plain, name) for name in values if name in NAMES}
    flags |= {f"cache.{name}": value for name, value in attrs.asdict(plain.cache).items() if "cache" in values}
    flags |= {f"{SECTION}.{section}.{name}": value for section, items in plain.plugins for name, value in items}
    return settings.prepared(resolve(flags), catalog)


def without_reference(config: Config) -> tuple[str, ...]:
    """A note where a validator that judges by default, against the reference, is not among those that are configured."""
    if not config.validators:
        return ()  # then nothing is selected that was not judged before
    left_out = [name for name in defaults.VALIDATORS if name not in {one.rpartition("/")[2] for one in config.validators}]
    judges = ", ".join(config.validators)
    return tuple(f"validators: {name} is not among those that judge ({judges}), so kernels may be selected whose results nobody compared "
                 f"with the reference; add it to validators" for name in left_out)


def _listed(name: str, value: Any) -> tuple[str, ...]:
    items = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise UsageError(f"{name} is {value!r}; it must be a list of names")
    return tuple(items)


def _number(value: Any, name: str, kinds: tuple[type, ...]) -> None:
    if isinstance(value, bool) or type(value) not in kinds or not value > 0:
        raise UsageError(f"{name} is {value!r}; it must be positive ({' or '.join(k.__name__ for k in kinds)}); "
                         "budget_s, budget_plans and rounds must be positive")


def check_choices(config: Config, catalog: Catalog, origin: Callable[[str], str] = lambda key: DEFAULT) -> None:
    """Refuse names that no installed plugin offers. ``origin`` says where the value of a key comes from.

    Raises:
        UsageError: an unknown advisor, validator, backend or runtime; the message lists what is installed.
    """
    with _naming(origin("advisor")):
        catalog.find("agentcompile_advisors", config.advisor)
    with _naming(origin("validators")):
        for name in config.validators:
            if not any(v.name == name for v in catalog.validators.values()) and name not in defaults.VALIDATORS:
                catalog.find("agentcompile_validators", name)
    with _naming(origin("backend")):
        if config.backend:
            catalog.find("agentcompile_backends", config.backend)
    for key, kind, role in (("kv_cache", KVCacheRuntime, "KV cache"), ("decode", DecodeRuntime, "decode")):
        name, found = getattr(config, key), sorted(r.name for r in catalog.runtimes.values() if isinstance(r, kind))
        with _naming(origin(key)):
            if name and name not in found:
                raise UsageError(f"unknown {role} runtime {name!r}; installed: {', '.join(found)}")


@contextlib.contextmanager
def _naming(origin: str) -> Iterator[None]:
    """Names the file or variable that a refused value stands in."""
    try:
        yield
    except UsageError as exc:
        raise UsageError(f"{exc} (from {origin})" if origin not in (DEFAULT, ARGUMENT) else str(exc)) from exc


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


def check_sanitizer(config: Config, catalog: Catalog) -> None:
    """Refuse to begin where the sanitizer is asked for and cannot work.

    Raises:
        UsageError: it is not installed, or says what it lacks here.
    """
    if not config.sanitize:
        return
    found = next((v for name, v in catalog.validators.items() if config.sanitizer in (name, v.name)), None)
    if found is None:
        raise UsageError(f"--sanitize asks the validator {config.sanitizer}, which is not installed; install the plugin of your hardware's "
                         "backend, or leave --sanitize out")
    answer = found.available()
    if isinstance(answer, Reject):
        raise UsageError(answer.reason)
