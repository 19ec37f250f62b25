"""What can be configured, with its default; and how one value is checked against its type."""

import types
import typing
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import attrs
from attrs import Factory, field, frozen

from ..errors import UsageError
from . import defaults

Scalar = bool | int | float | str
Sections = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]  # plugin or offer name, then its settings by name


FRAMEWORK = "framework"
PREFILLS = ("live", "capacity")
STEPS_PER_GRAPH = (1, 2, 4, 8)
ORIGINS = ("generated", "handwritten", "third_party", FRAMEWORK)


def sections(given: Any) -> Sections:
    """Settings by plugin as Config keeps them, from a mapping of mappings or from what Config keeps.

    Raises:
        UsageError: it is neither.
    """
    items = given.items() if isinstance(given, Mapping) else given
    try:
        return tuple((str(name), tuple(dict(values).items())) for name, values in items)
    except (TypeError, ValueError) as exc:
        raise UsageError("plugins holds the settings of plugins: a mapping of names to mappings of settings") from exc


def _of(default: Any, doc: str, **limits: Any) -> Any:
    """A field with what its documentation says; ``positive`` numbers are over 0, ``least`` and ``choices`` are what they say."""
    return field(default=default, metadata={"doc": doc, **limits})


@frozen(kw_only=True)
class CacheLimits:
    """Where kernels, timings and captures are kept, and how much of them."""

    folder: str = _of("", "folder of kernels, timings and captures; empty: the platform's place for caches")
    max_bytes: int = _of(20 << 30, "size of kernels and captures beyond which those that were not used longest are removed", positive=True)


@frozen(kw_only=True)
class Config:
    """The choices of one compilation; everything is by name. Unknown names are refused where they are resolved.

    ``budget_s`` is the whole search: advice, building, checking, timing, the validators of winners and the chain. Of it 0.27
    are kept for the chain (where a device can time one) and 0.13 for later ranges of positions (where the cache has some), of 40 s
    and more 0.2 for either, and 0.1 for validators of winners (where some are named), so that 150 s leave 75 s for candidates on a
    GPU; of less than 21 s less is kept. Capture, planning and binding are not part of it. ``plugins`` holds the settings of plugins, by
    the name of the plugin (its entry point) or of one of its offers.
    """

    advisor: str = _of("heuristic", "who advises on the order of the search")
    validators: tuple[str, ...] = _of(defaults.VALIDATORS, "who checks candidates, and who checks winners")
    winners: tuple[str, ...] = _of(defaults.WINNERS, "who checks winners too, where kernels are measured and time is left; all: who offers")
    sanitize: bool = _of(False, "have the sanitizer judge every winner, and take none that it refuses")
    sanitizer: str = _of(defaults.SANITIZER, "the validator that sanitize asks")
    target: str = _of("", "hardware to compile for; empty: what is here, else the preferred one of what is installed")
    device: str = _of("", "torch device to run on; empty: an accelerator where there is one, else cpu")
    backend: str = _of("", "what builds and launches kernels; empty: the one that serves the target, else an emulator of its language")
    kv_cache: str = _of("", "runtime that allocates the KV cache; empty: the best one installed")
    decode: str = _of("", "runtime of decode steps; empty: the best one installed that works on the device")
    prefill: str = _of(defaults.PREFILL, choices=PREFILLS, doc="what prompt chunks attend over: live, what is cached, from Python between "
                       "captured graphs; capacity, the whole cache under a mask, all of it in one graph")
    steps_per_graph: int = _of(1, choices=STEPS_PER_GRAPH, doc="greedy decode steps that one captured graph holds: with more, tokens come "
                               "in groups, for hosts that launch slower than the device runs")
    origins: tuple[str, ...] = _of(ORIGINS, choices=ORIGINS, doc="where steps may come from; without framework, it takes only "
                                   "what nothing else can, whatever the times")
    budget_s: float = _of(150.0, "seconds of the whole search: advice, building, checking, timing, chain", positive=True)
    budget_plans: int = _of(400, "candidates to evaluate at most", positive=True)
    rounds: int = _of(2, "rounds of advice and evaluation", positive=True)
    margin: float = _of(0.01, "share of its time by which a candidate must beat its baseline beyond the noise; below 0: may lose", least=-1)
    seed: int = _of(0, "seed of the inputs that candidates are checked with")
    trust_graphs: bool = _of(False, "run graphs of bundles that are not what is captured here, compared with the model on a few inputs")
    trust_kernels: bool = _of(False, "run kernels of bundles that nobody here built, as they are")
    cache: CacheLimits = Factory(CacheLimits)
    plugins: Sections = field(default=(), converter=sections)

    @property
    def framework_competes(self) -> bool:
        """Whether a step must be faster than the framework's operators; where they are no allowed origin, they only fill gaps."""
        return FRAMEWORK in self.origins

    def settings(self, *names: str) -> dict[str, Any]:
        """The settings of the sections called ``names``, later names over earlier ones."""
        found: dict[str, Any] = {}
        for section, items in self.plugins:
            if section in names:
                found |= dict(items)
        return found


NAMES = tuple(f.name for f in attrs.fields(Config) if f.name not in ("cache", "plugins"))
CACHE_NAMES = tuple(f.name for f in attrs.fields(CacheLimits))


def unknown(key: str, known: Iterable[str], where: str, prefix: str = "") -> UsageError:
    """The refusal of a key that nobody knows, with the names closest to it; ``known`` are without the ``prefix`` that all share."""
    names = {name: prefix + name for name in sorted(known)}
    close = [names[name] for name in get_close_matches(key.removeprefix(prefix), list(names), n=2)]
    hint = f"; did you mean {' or '.join(close)}?" if close else f"; known: {', '.join(names.values())}"
    return UsageError(f"{where} sets {key!r}, which does not exist{hint}")


def checked(cls: type, name: str, value: Any, where: str) -> Any:
    """``value`` as field ``name`` of ``cls`` takes it: lists become tuples, whole numbers become floats where a float is meant.

    Raises:
        UsageError: it is of another type; the message says which one is meant.
    """
    kind = typing.get_type_hints(cls)[name]
    found = _fitting(kind, value)
    if found is None and not _takes_none(kind, value):
        raise UsageError(f"{where} sets {name} to {value!r}; expected {said(kind)}")
    check_limits(cls, name, found, where)
    return found


def check_limits(cls: type, name: str, value: Any, where: str = "") -> None:
    """Refuse a value of field ``name`` outside the limits that the field's metadata name.

    Raises:
        UsageError: so it is; the message says what is allowed.
    """
    limits = attrs.fields_dict(cls)[name].metadata
    items = value if isinstance(value, tuple) else (value,)
    begins = f"{where} sets {name} to {value!r}; it" if where else f"{name} is {value!r}; it"
    if limits.get("positive") and not (isinstance(value, int | float) and 0 < value < float("inf")):
        raise UsageError(f"{begins} must be positive ({said(typing.get_type_hints(cls)[name])})")
    if "least" in limits and not (isinstance(value, int | float) and limits["least"] <= value < float("inf")):
        raise UsageError(f"{begins} must be a number of at least {limits['least']}")
    for item in items if "choices" in limits else ():
        if item not in limits["choices"]:
            raise UsageError(f"{where + ': ' if where else ''}unknown {name.removesuffix('s')} {item!r}; allowed: "
                             f"{', '.join(map(str, limits['choices']))}")


def read(cls: type, name: str, text: str, where: str) -> Any:
    """The text of an environment variable as field ``name`` of ``cls`` takes it: numbers, true or false, lists by commas.

    Raises:
        UsageError: the text is none of that type.
    """
    kind = typing.get_type_hints(cls)[name]
    value = _from_text(kind, text)
    if value is None:
        raise UsageError(f"{where} is {text!r}; expected {said(kind)}")
    return checked(cls, name, value, where)


def _from_text(kind: Any, text: str) -> Any:
    """``text`` as a value of ``kind``, or None."""
    if typing.get_origin(kind) is tuple:
        items = [_from_text(typing.get_args(kind)[0], part.strip()) for part in text.split(",") if part.strip()]
        return None if None in items else tuple(items)
    for one in (kind, *typing.get_args(kind)):
        if one is bool and text.lower() in ("1", "0", "true", "false"):
            return text.lower() in ("1", "true")
        if one in (int, float):
            try:
                return one(text)
            except ValueError:
                continue
    return text if any(one in (str, Path) for one in (kind, *typing.get_args(kind))) else None


def _fitting(kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next((found for one in typing.get_args(kind) if (found := _fitting(one, value)) is not None), None)
    if typing.get_origin(kind) is tuple:
        items = [_fitting(typing.get_args(kind)[0], item) for item in value] if isinstance(value, list | tuple) else [None]
        return None if None in items else tuple(items)
    if kind is Path and isinstance(value, str | Path):
        return Path(value).expanduser()
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind else None


def _takes_none(kind: Any, value: Any) -> bool:
    return value is None and type(None) in typing.get_args(kind)


def said(kind: Any) -> str:
    """What a type is called in messages and documents."""
    words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path", type(None): "nothing"}
    if typing.get_origin(kind) is tuple:
        return f"a list, each {said(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(said(one) for one in typing.get_args(kind) if one is not type(None))
    return words.get(kind, getattr(kind, "__name__", str(kind)))
