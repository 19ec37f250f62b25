"""What changed about a module after its programs were bound to its parameters, so that they compute what it was and not what it is."""

import operator
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SET = "was set to something else"
_PLAIN = (bool, int, float, complex, str, tuple, type(None))
_BACKWARDS = ("_is_full_backward_hook",)
_REPLACED = "was replaced by another tensor"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@cache
def _placed() -> Any:
    """Parameters that weight stores moved: where to at last, their version then, and where they had the same values before."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def place(parameter: "torch.Tensor", data: "torch.Tensor") -> None:
    """Let ``parameter`` be the same values at another place, ``data``."""
    then, known = parameter.data_ptr(), _placed().get(parameter)
    before = known[2] if known is not None and known[:2] == (then, version_of(parameter)) else ()
    parameter.data = data
    _placed()[parameter] = data.data_ptr(), version_of(parameter), (*before, then)


class AsBound:
    """A module's parameters, parts, hooks and ``forward`` as they are now. Values written in place are no change: programs read them.

    Every request asks, so an unchanged module is seen in a few passes over all of it that Python does not interpret item by item.
    ``closely``: buffers and attributes that are plain values, the mode among them, may not be others either.
    """

    def __init__(self, module: "torch.nn.Module", closely: bool) -> None:
        from torch import strided

        slots: list[tuple[dict[str, Any], str, str, str]] = []
        hooks: list[tuple[dict[int, Any], str]] = []
        for path, part in module.named_modules():
            prefix, whole = f"{path}." if path else "", path or type(part).__name__
            slots += [(part._modules, name, prefix + name, "was replaced by another module") for name in part._modules]
            slots += [(part._parameters, name, prefix + name, _REPLACED) for name in part._parameters]
            if closely:
                slots += [(part._buffers, name, prefix + name, "was replaced by another tensor") for name in part._buffers]
                plain = (name for name, value in part.__dict__.items() if isinstance(value, _PLAIN) and name not in _BACKWARDS)
                slots += [(part.__dict__, name, prefix + name, _SET) for name in plain if name != "forward"]
            slots.append((part.__dict__, "forward", whole, "got another forward"))
            hooks += [(getattr(part, table), whole) for table in _HOOKS]
        self._owners, self._names, self._paths, self._words = map(list, zip(*slots, strict=True))
        self._values = list(map(dict.get, self._owners, self._names))
        self._parameters = [one for one, words in zip(self._values, self._words, strict=True)
                            if words is _REPLACED and one is not None and one.layout is strided]  # others lie in several places
        self._lie = [(p.data_ptr(), p.shape, p.stride(), p.dtype) for p in self._parameters]
        self._hooks, self._hooked = map(list, zip(*hooks, strict=True))
        self._counts = list(map(_count, self._hooks))
        self._is_same = self._same()

    def change(self) -> str:
        """One clause on the first change; empty: there is none."""
        return "" if self._is_same() else self._first()

    def _same(self) -> Callable[[], bool]:
        """Whether nothing at all is another thing than it was, in a function over local values: small modules ask at every call."""
        owners, names, values, parameters, lie = self._owners, self._names, self._values, self._parameters, self._lie
        hooks, count, get, is_same = self._hooks, sum(map(len, self._hooks)), dict.get, operator.is_

        def same() -> bool:
            return (all(map(is_same, map(get, owners, names), values))
                    and [(p.data_ptr(), p.shape, p.stride(), p.dtype) for p in parameters] == lie
                    and (sum(map(len, hooks)) == count if count else not any(hooks)))

        return same

    def _first(self) -> str:
        for at, (now, then) in enumerate(zip(map(dict.get, self._owners, self._names), self._values, strict=True)):
            if now is not then and not (self._words[at] is _SET and type(now) is type(then) and repr(now) == repr(then)):
                return f"{self._paths[at]} {self._words[at]}"
        for parameter, then in zip(self._parameters, self._lie, strict=True):
            now = parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype
            if now != then and (now[0] == then[0] or not _moved_by_a_store(parameter, then[0])):  # a store lays out anew what it moves
                return f"{next(p for p, v in zip(self._paths, self._values, strict=True) if v is parameter)} {_REPLACED}"
        for hooks, count, path in zip(self._hooks, self._counts, self._hooked, strict=True):
            if _count(hooks) != count:
                return f"{path} got a hook or lost one"
        return ""


def _moved_by_a_store(parameter: "torch.Tensor", then: int) -> bool:
    """Whether it lies elsewhere than at ``then`` only because it was compiled once more, with the same values since."""
    known = _placed().get(parameter)
    return known is not None and known[:2] == (parameter.data_ptr(), version_of(parameter)) and then in known[2]


def version_of(tensor: "torch.Tensor") -> int:
    return -1 if tensor.is_inference() else int(tensor._version)


def _count(hooks: dict[int, Any]) -> int:
    """Hooks, less those by which transformers itself looks at what its models compute."""
    return sum(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks.values())
