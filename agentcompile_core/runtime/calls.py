"""The shape of a module's call: which tensors lie where in its arguments and in what it returns, as data.

A tree is JSON: ``{"tensor": i}``, ``{"value": x}`` for None, numbers and text, ``{"tuple": [...]}``, ``{"list": [...]}``,
``{"dict": [[key, tree], ...]}``, and ``{"class": name, "context": ..., "items": [...]}`` for what torch's pytrees know.
"""

import inspect
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import repeat
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attrs import frozen

from ..errors import UsageError

if TYPE_CHECKING:
    import torch

_SIGNATURES: WeakKeyDictionary[Any, tuple[Any, bool, inspect.Signature]] = WeakKeyDictionary()
_SEEN: dict[str, type] = {}  # classes met while capturing in this process, also those that no module holds by name


class Shapeless(ValueError):
    """A value that cannot be written as a tree."""


def _signature(forward: Any) -> inspect.Signature:
    """``inspect.signature``, which takes longer than many a call, once per plain function with these defaults."""
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, FunctionType) or function.__dict__ or function.__kwdefaults__:  # what it wraps, what can change within
        return inspect.signature(forward)
    known = _SIGNATURES.get(function)
    if known is None or known[0] is not function.__defaults__ or known[1] is not (function is not forward):
        known = _SIGNATURES[function] = (function.__defaults__, function is not forward, inspect.signature(forward))
    return known[2]


def canonical(module: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as ``module.forward`` gets them: by position where that is possible, defaults filled in.

    Raises:
        UsageError: they do not fit its signature.
    """
    try:
        signature = _signature(module.forward)
    except ValueError:  # of what is written in C
        return args, keywords
    try:
        bound = signature.bind(*args, **keywords)
    except TypeError as exc:
        raise UsageError(f"{type(module).__name__} cannot be called so: {exc}; its forward is {signature}") from exc
    bound.apply_defaults()
    return bound.args, bound.kwargs


def by_name(module: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same canonical call with all that has a default given by name, in the same order: how ``module`` itself is to be called.

    Wrappers of a ``forward`` that put in what was left out look for it among the names.
    """
    try:
        parameters = tuple(_signature(module.forward).parameters.values())
    except ValueError:  # of what is written in C
        return args, keywords
    named = [p.name for p in parameters[: len(args)] if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty]
    if not named or any(p.kind is p.VAR_POSITIONAL for p in parameters[: len(args)]):
        return args, keywords
    first = len(args) - len(named)
    return args[:first], {**dict(zip(named, args[first:], strict=True)), **keywords}


def names_of(module: Any) -> tuple[str, ...]:
    """Names of the positional parameters of ``module.forward``, for messages."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds)


def tree_of(value: Any, tensors: "list[torch.Tensor]", shared: bool = False) -> dict[str, Any]:
    """The tree of ``value``; its tensors are appended to ``tensors`` (``shared``: each object once).

    Raises:
        Shapeless: it holds something else than tensors, numbers, text, None and containers that torch knows.
    """
    import torch

    if isinstance(value, torch.Tensor):
        place = next((i for i, t in enumerate(tensors) if shared and t is value), len(tensors))
        if place == len(tensors):
            tensors.append(value)
        return {"tensor": place}
    if type(value) is float and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    if type(value) in (tuple, list):
        return {type(value).__name__: [tree_of(item, tensors, shared) for item in value]}
    if type(value) is dict and all(type(key) in (str, int, bool, float) for key in value):
        return {"dict": [[key, tree_of(item, tensors, shared)] for key, item in value.items()]}
    return _class_tree(value, tensors, shared)


def _class_tree(value: Any, tensors: "list[torch.Tensor]", shared: bool) -> dict[str, Any]:
    from torch.utils import _pytree as pytree

    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _is_namedtuple(kind):
        items, context = list(value), None
    elif kind in pytree.SUPPORTED_NODES:
        items, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    else:
        raise Shapeless(f"a {name}")
    try:
        if json.loads(json.dumps(context)) != context:
            raise Shapeless(f"a {name}")
    except (TypeError, ValueError) as exc:
        raise Shapeless(f"a {name}") from exc
    _SEEN[name] = kind
    return {"class": name, "context": context, "items": [tree_of(item, tensors, shared) for item in items]}


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def rebuilt(tree: dict[str, Any], tensors: "Sequence[torch.Tensor]") -> Any:
    """The value of a tree over ``tensors``.

    Raises:
        UsageError: the tree is broken, or names a class that the module's code did not bring along.
    """
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "value" in tree:
        return tree["value"]
    if "float" in tree:
        return float(tree["float"])
    for name, kind in (("tuple", tuple), ("list", list)):
        if name in tree:
            return kind(rebuilt(item, tensors) for item in tree[name])
    if "dict" in tree:
        return {key: rebuilt(item, tensors) for key, item in tree["dict"]}
    make = _maker(tree["class"])
    return make([rebuilt(item, tensors) for item in tree["items"]], tree["context"])


def _maker(name: str) -> Callable[[list[Any], Any], Any]:
    """How a class is made again. It is looked up among what is imported already; nothing is imported for it."""
    from torch import Size
    from torch.utils import _pytree as pytree

    kind = _SEEN.get(name) or _imported(name)
    if kind is Size:  # of which pytree makes a plain tuple
        return lambda items, _: Size(items)
    if kind is not None and _is_namedtuple(kind):
        return lambda items, _: kind(*items)
    if kind is None or kind not in pytree.SUPPORTED_NODES:
        raise UsageError(f"the module returns a {name}, which is not imported here; compile the module again in this program")
    return pytree.SUPPORTED_NODES[kind].unflatten_fn


def _imported(name: str) -> type | None:
    for end in range(len(name), 0, -1):
        if name[end:end + 1] in (".", "") and name[:end] in sys.modules:
            found: Any = sys.modules[name[:end]]
            for part in name[end + 1:].split("."):
                found = getattr(found, part, None)
            return found if isinstance(found, type) else None
    return None


@frozen(slots=False)
class Call:
    """The shape of a call: the arguments by position and by name, what is returned, and the names of the positional parameters."""

    args: dict[str, Any]
    keywords: dict[str, Any]
    outputs: dict[str, Any]
    names: tuple[str, ...] = ()

    @property
    def is_positional(self) -> bool:
        """Whether nothing is given by name."""
        return not self.keywords["dict"]

    @cached_property
    def takes_tensors(self) -> bool:
        """Whether tensors by position are all that is given."""
        return self.is_positional and all("tensor" in tree for tree in self.args["tuple"])

    def tensors(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> "list[torch.Tensor]":
        """The tensors among canonical arguments, in the order of the graph's inputs.

        Raises:
            UsageError: they differ from those of the capture; the message says where.
        """
        import torch

        expected = self.args["tuple"]
        if self.takes_tensors and not keywords and len(args) == len(expected) and all(map(isinstance, args, repeat(torch.Tensor))):
            return list(args)
        if len(args) != len(expected):
            raise UsageError(f"{len(args)} inputs were given; the module was compiled for {len(expected)}")
        found: list[torch.Tensor] = []
        for i, (tree, value) in enumerate(zip(expected, args, strict=True)):
            found += placed(tree, value, f"argument {self.names[i]}" if i < len(self.names) else f"argument {i}")
        return found + placed(self.keywords, keywords, "the call by name")


def read(text: str) -> Call | None:
    """The shape of a call from what ``written`` gave; None where nothing was written.

    Raises:
        UsageError: the text is no such thing.
    """
    if not text:
        return None
    try:
        found = json.loads(text)
        call = Call(found["args"], found["keywords"], found["outputs"], tuple(str(name) for name in found["names"]))
        for tree in (call.args, call.keywords, call.outputs):
            _check(tree)
        if not isinstance(call.args["tuple"], list) or not isinstance(call.keywords["dict"], list):
            raise ValueError("arguments that are none")
    except (ValueError, KeyError, TypeError, StopIteration, RecursionError) as exc:
        raise UsageError(f"the description of the module's call is damaged ({type(exc).__name__}); compile it again") from exc
    return call


def written(call: Call) -> str:
    """A call as canonical text."""
    parts = {"args": call.args, "keywords": call.keywords, "outputs": call.outputs, "names": list(call.names)}
    return json.dumps(parts, separators=(",", ":"), sort_keys=True, allow_nan=False)


def _check(tree: Any) -> None:
    kind = next(k for k in ("tensor", "value", "float", "tuple", "list", "dict", "class") if k in tree)
    if kind == "tensor" and (type(tree["tensor"]) is not int or tree["tensor"] < 0):
        raise ValueError("a tensor without its number")
    if kind == "value" and not (tree["value"] is None or type(tree["value"]) in (bool, int, float, str)):
        raise ValueError("a value that is none")
    if kind == "class" and type(tree["class"]) is not str:
        raise ValueError("a class without its name")
    for item in tree.get(kind) if kind in ("tuple", "list") else tree["items"] if kind == "class" else ():
        _check(item)
    for _, item in tree["dict"] if kind == "dict" else ():
        _check(item)


def placed(tree: dict[str, Any], value: Any, where: str) -> "list[torch.Tensor]":
    """The tensors of ``value`` in the order of ``tree``, which it must have the shape of; the rest must be equal.

    Raises:
        UsageError: something is another kind of thing than at capture, or has another value.
    """
    import torch

    if "tensor" in tree and isinstance(value, torch.Tensor):
        return [value]
    try:
        given = tree_of(value, [])
    except Shapeless as exc:
        raise UsageError(f"{where} is {exc}; the module was compiled for {described(tree)}") from exc
    if not _alike(tree, given):
        raise UsageError(f"{where} is {described(given)}; the module was compiled for {described(tree)}; compile it again for another")
    if "dict" in tree:
        return [t for key, item in tree["dict"] for t in placed(item, value[key], f"{where}[{key!r}]")]
    inner = tree.get("items", tree.get("tuple", tree.get("list", ())))
    parts = _items(value) if "class" in tree else value if inner else ()
    return [t for i, (item, part) in enumerate(zip(inner, parts, strict=True)) for t in placed(item, part, f"{where}[{i}]")]


def _alike(expected: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether two trees agree at their outermost level; the order of a dict's keys does not count."""
    if "dict" in expected and "dict" in given:
        return {(type(k), k) for k, _ in expected["dict"]} == {(type(k), k) for k, _ in given["dict"]}
    if "value" in expected and "value" in given:
        return type(expected["value"]) is type(given["value"]) and repr(expected["value"]) == repr(given["value"])  # 0.0 is not -0.0
    return expected.keys() == given.keys() and described(expected) == described(given)


def _items(value: Any) -> list[Any]:
    from torch.utils import _pytree as pytree

    return list(value) if _is_namedtuple(type(value)) else list(pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0])


def described(tree: dict[str, Any]) -> str:
    """A tree's outermost level in words."""
    if "tensor" in tree:
        return "a tensor"
    if "value" in tree or "float" in tree:
        return repr(tree["value"]) if "value" in tree else str(tree["float"])
    if "dict" in tree:
        return f"a dict with the keys {[key for key, _ in tree['dict']]}"
    if "class" in tree:
        return f"a {tree['class']} of {len(tree['items'])} ({tree['context']})"
    kind = "tuple" if "tuple" in tree else "list"
    return f"a {kind} of {len(tree[kind])}"
