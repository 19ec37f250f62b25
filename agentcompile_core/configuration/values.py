"""What can be configured, with its default; and how one value is checked against its type."""

import types
import typing
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import attrs
from attrs import Factory, frozen

from ..errors import UsageError
from . import defaults

Scalar = bool | int | float | str
Sections = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]  # plugin or offer name, then its settings by name


@frozen(kw_only=True)
class CacheLimits:
    """Where kernels, timings and captures are kept, and how much of them. An empty folder is the platform's for caches."""

    folder: str = ""
    max_bytes: int = 20 << 30


@frozen(kw_only=True)
class Config:
    """The choices of one compilation; everything is by name. Unknown names are refused where they are resolved.

    ``budget_s`` is the whole search: advice, building, checking, timing, the validators of winners and the chain. Of it 0.3
    are kept for the chain (where a device can time one) and 0.1 for validators of winners (where some are named), so that
    150 s leave 90 s for candidates on a GPU. Capture, planning and binding are not part of it. ``plugins`` holds the
    settings of plugins, by the name of the plugin (its entry point) or of one of its offers.
    """

    advisor: str = "heuristic"
    validators: tuple[str, ...] = defaults.VALIDATORS
    target: str = ""  # empty: the hardware here, else the default of ``api``
    device: str = ""  # empty: an accelerator where there is one, else cpu
    backend: str = ""  # empty: the one that serves the target, else an emulator of its language
    kv_cache: str = ""  # empty: the best one installed
    decode: str = ""  # empty: the best one installed that works on the device
    origins: tuple[str, ...] = ("generated", "handwritten", "third_party")
    budget_s: float = 150.0
    budget_plans: int = 400
    rounds: int = 2
    margin: float = 0.01  # a candidate must beat its baseline by this share beyond the noise
    seed: int = 0
    cache: CacheLimits = Factory(CacheLimits)
    plugins: Sections = ()

    def settings(self, *names: str) -> dict[str, Any]:
        """The settings of the sections called ``names``, later names over earlier ones."""
        found: dict[str, Any] = {}
        for section, items in self.plugins:
            if section in names:
                found |= dict(items)
        return found


NAMES = tuple(f.name for f in attrs.fields(Config) if f.name not in ("cache", "plugins"))
CACHE_NAMES = tuple(f.name for f in attrs.fields(CacheLimits))


def unknown(key: str, known: Iterable[str], where: str) -> UsageError:
    """The refusal of a key that nobody knows, with the names closest to it."""
    close = get_close_matches(key, list(known), n=2)
    hint = f"; did you mean {' or '.join(close)}?" if close else f"; known: {', '.join(sorted(known))}"
    return UsageError(f"{where} sets {key!r}, which does not exist{hint}")


def checked(cls: type, name: str, value: Any, where: str) -> Any:
    """``value`` as field ``name`` of ``cls`` takes it: lists become tuples, whole numbers become floats where a float is meant.

    Raises:
        UsageError: it is of another type; the message says which one is meant.
    """
    kind = typing.get_type_hints(cls)[name]
    found = _fitting(kind, value)
    if found is None and not _takes_none(kind, value):
        raise UsageError(f"{where} sets {name} to {value!r}; expected {_said(kind)}")
    return found


def read(cls: type, name: str, text: str, where: str) -> Any:
    """The text of an environment variable as field ``name`` of ``cls`` takes it: numbers, true or false, lists by commas.

    Raises:
        UsageError: the text is none of that type.
    """
    kind = typing.get_type_hints(cls)[name]
    if typing.get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    for one in (kind, *typing.get_args(kind)):
        if one is bool and text.lower() in ("1", "0", "true", "false"):
            return text.lower() in ("1", "true")
        if one in (int, float):
            try:
                return one(text)
            except ValueError:
                continue
    if str in (kind, *typing.get_args(kind)):
        return text
    raise UsageError(f"{where} is {text!r}; expected {_said(kind)}")


def _fitting(kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next((found for one in typing.get_args(kind) if (found := _fitting(one, value)) is not None), None)
    if typing.get_origin(kind) is tuple:
        items = [_fitting(typing.get_args(kind)[0], item) for item in value] if isinstance(value, list | tuple) else [None]
        return None if None in items else tuple(items)
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind else None


def _takes_none(kind: Any, value: Any) -> bool:
    return value is None and type(None) in typing.get_args(kind)


def _said(kind: Any) -> str:
    words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "nothing"}
    if typing.get_origin(kind) is tuple:
        return f"a list, each {_said(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_said(one) for one in typing.get_args(kind) if one is not type(None))
    return words.get(kind, getattr(kind, "__name__", str(kind)))
