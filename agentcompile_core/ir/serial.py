"""The one converter between values and JSON, schema numbers and digests. Strict: nothing is coerced or repaired."""

import base64
import hashlib
import json
import re
import types
import typing
from typing import Any, TypeVar

import attrs
import cattrs
from cattrs.cols import is_sequence, list_structure_factory
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from cattrs.preconf.json import JsonConverter, make_converter

from ..errors import UsageError
from .graph import Argument, Ref, Symbol

SCHEMA = 1
T = TypeVar("T")
MAX_DEPTH = 64
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # to its end or that of the text
_NO_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
UNSAID = "unsaid"  # in the metadata of an attribute: its default is not written, so that keys and files from before it stay what they were


def _exact(kind: type) -> Any:
    def structure(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return structure


def _number(value: Any, _: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"expected float, got {type(value).__name__}")
    return float(value)


def _is_tuple(tp: Any) -> bool:
    return typing.get_origin(tp) is tuple


def _scalar_union(tp: Any) -> bool:
    args = typing.get_args(tp)
    union = typing.get_origin(tp) in (typing.Union, types.UnionType)
    return union and all(a in (bool, int, float, str, type(None)) for a in args)


def _structure_scalar(value: Any, tp: Any) -> Any:
    if type(value) not in typing.get_args(tp):
        names = ", ".join(a.__name__ for a in typing.get_args(tp))
        raise TypeError(f"expected one of {names}, got {type(value).__name__}")
    return value


def _structure_argument(value: Any, _: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return tuple(_structure_argument(item, None) for item in value)
    if type(value) is dict and value.keys() == {"ref"} and type(value["ref"]) is str:
        return Ref(value["ref"])
    if type(value) is dict and value.keys() == {"symbol", "name"} and all(type(v) is str for v in value.values()):
        return Symbol(value["symbol"], value["name"])
    raise TypeError(f"expected a node argument, got {type(value).__name__}")


def _unstructure_argument(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.value}
    if isinstance(value, Symbol):
        return {"symbol": value.kind, "name": value.name}
    if isinstance(value, tuple):
        return [_unstructure_argument(item) for item in value]
    return value


def _make() -> JsonConverter:
    c = make_converter(forbid_extra_keys=True, detailed_validation=True)
    for kind in (int, str, bool):
        c.register_structure_hook(kind, _exact(kind))
    c.register_structure_hook(float, _number)
    c.register_structure_hook(bytes, lambda v, _: base64.b64decode(_exact(str)(v, None), validate=True))
    c.register_unstructure_hook(bytes, lambda v: base64.b64encode(v).decode())
    c.register_structure_hook_func(_scalar_union, _structure_scalar)

    @c.register_structure_hook_factory(attrs.has)
    def _attrs(cls: type, conv: cattrs.Converter) -> Any:
        inner: Any = make_dict_structure_fn(cls, conv, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True)

        def structure(value: Any, _: Any) -> Any:
            if type(value) is not dict:
                raise TypeError(f"expected object, got {type(value).__name__}")
            return inner(value, cls)

        return structure

    @c.register_unstructure_hook_factory(lambda cls: attrs.has(cls) and any(UNSAID in a.metadata for a in attrs.fields(cls)))
    def _unsaid(cls: Any, conv: cattrs.Converter) -> Any:
        names = [attribute.name for attribute in attrs.fields(cls) if UNSAID in attribute.metadata]
        return make_dict_unstructure_fn(cls, conv, **{name: override(omit_if_default=True) for name in names})  # type: ignore[arg-type]

    @c.register_structure_hook_factory(is_sequence)
    def _sequence(tp: Any, conv: cattrs.Converter) -> Any:
        inner = list_structure_factory(tp, conv)

        def structure(value: Any, kind: Any) -> Any:
            if type(value) is not list:
                raise TypeError(f"expected array, got {type(value).__name__}")
            return inner(value, kind)

        return structure

    # Tuples are arrays in JSON; a string or an object is not one.
    @c.register_structure_hook_factory(_is_tuple)
    def _tuple(tp: Any, conv: cattrs.Converter) -> Any:
        args = typing.get_args(tp)

        def structure(value: Any, _: Any) -> Any:
            if type(value) is not list:
                raise TypeError(f"expected array, got {type(value).__name__}")
            if len(args) == 2 and args[1] is Ellipsis:
                hook = conv.get_structure_hook(args[0])
                return tuple(hook(item, args[0]) for item in value)
            if len(args) != len(value):
                raise TypeError(f"expected {len(args)} items, got {len(value)}")
            return tuple(conv.get_structure_hook(a)(item, a) for a, item in zip(args, value, strict=True))

        return structure

    c.register_structure_hook_func(lambda tp: tp is Argument or tp == Argument, _structure_argument)
    for cls in (Ref, Symbol):
        c.register_unstructure_hook(cls, _unstructure_argument)
    return c


converter = _make()


def unstructure(value: Any) -> Any:
    """``value`` as plain JSON types."""
    return converter.unstructure(value)


def structure(data: Any, cls: type[T]) -> T:
    """Plain JSON types as a ``cls``.

    Raises:
        UsageError: the data does not fit; the message lists every place.
    """
    try:
        return converter.structure(data, cls)
    except (cattrs.BaseValidationError, TypeError, ValueError, KeyError, RecursionError) as exc:
        raise UsageError(f"not a valid {cls.__name__}: {'; '.join(problems(exc)[:5])}") from exc


def problems(exc: BaseException) -> list[str]:
    """What was wrong and where, one line each, for a structuring error."""
    if isinstance(exc, cattrs.BaseValidationError):
        return [str(line) for line in cattrs.transform_error(exc, path="$")]
    return [f"{type(exc).__name__}: {exc}"]


def dumps(value: Any, indent: int | None = None) -> str:
    """Canonical JSON text of ``value``: sorted keys, no NaN."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(unstructure(value), sort_keys=True, separators=separators, indent=indent, allow_nan=False)


def loads(text: str, cls: type[T]) -> T:
    """Read a ``cls`` from JSON text, strictly: no duplicate keys, no NaN, bounded depth.

    Raises:
        UsageError: the text is not JSON or does not fit.
    """
    return structure(parse(text), cls)


def parse(text: str, max_bytes: int = 1 << 30) -> Any:
    """JSON text as plain types, refusing duplicate keys, NaN, too many bytes and too deep nesting.

    Raises:
        UsageError: any of these.
    """
    if len(text) > max_bytes:
        raise UsageError(f"JSON text of {len(text)} characters; at most {max_bytes} are read")
    if _is_deep(text):
        raise UsageError(f"JSON nested deeper than {MAX_DEPTH}")

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise UsageError("JSON object with a duplicate key")
        return found

    def no_constant(name: str) -> Any:
        raise UsageError(f"JSON with {name}")

    try:
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except (ValueError, RecursionError) as exc:  # integers of thousands of digits are a plain ValueError
        raise UsageError(f"not JSON: {exc}") from exc


def _is_deep(text: str) -> bool:
    """Whether brackets outside of strings, of either kind, are nested deeper than ``MAX_DEPTH``; of megabytes in a few milliseconds."""
    escape = text.find("\\")
    begins = len(text) if escape < 0 else text.rfind('"', 0, escape) if text.count('"', 0, escape) % 2 else 0
    bare = text[:begins] + _STRING.sub("", text[begins:])  # no string that holds an escape is left
    marks = bare.encode(errors="replace").translate(_ONE_KIND, _NO_MARKS)
    # Then two quotes side by side change nothing about what lies within strings.
    marks = _STRING.sub("", marks.replace(b'""', b"").decode()).encode()
    rest = marks
    for _ in range(MAX_DEPTH):  # the innermost level goes each time
        before, rest = rest, rest.replace(b"[]", b"")
        if len(before) - len(rest) < len(before) / 200:  # long and deep, which a walk sees sooner
            break
    if not rest:
        return False
    depth = 0  # deep, or no JSON
    for run in re.findall(rb"\[+|\]+", marks):
        depth += len(run) if run[:1] == b"[" else -len(run)
        if depth > MAX_DEPTH:
            return True
    return False


def digest(*parts: Any, length: int = 16) -> str:
    """The first ``length`` hex digits of the SHA-256 of the canonical JSON of ``parts``."""
    return hashlib.sha256(dumps(list(parts)).encode()).hexdigest()[:length]
