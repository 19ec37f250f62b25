"""What changed about a module after its programs were bound to its parameters, so that they compute what it was and not what it is."""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@cache
def _placed() -> Any:
    """Parameters that a weight store moved: where to at last, and their version then."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def place(parameter: "torch.Tensor", data: "torch.Tensor") -> None:
    """Let ``parameter`` be the same values at another place, ``data``."""
    parameter.data = data
    _placed()[parameter] = data.data_ptr(), _version(parameter)


class AsBound:
    """A module's parameters, parts, hooks and ``forward`` as they are now. Values written in place are no change: programs read them."""

    def __init__(self, module: "torch.nn.Module") -> None:
        self._parameters: list[tuple[dict[str, Any], str, Any, int, str]] = []
        self._parts: list[tuple[dict[str, Any], str, Any, str]] = []
        self._calls: list[tuple[dict[str, Any], Any, str]] = []
        self._hooks: list[tuple[dict[int, Any], int, str]] = []
        for path, part in module.named_modules():
            prefix = f"{path}." if path else ""
            for name, parameter in part._parameters.items():
                place = parameter.data_ptr() if parameter is not None else 0
                self._parameters.append((part._parameters, name, parameter, place, prefix + name))
            self._parts += [(part._modules, name, inner, prefix + name) for name, inner in part._modules.items()]
            self._calls.append((part.__dict__, part.__dict__.get("forward"), path or type(part).__name__))
            self._hooks += [(hooks, _count(hooks), path or type(part).__name__) for hooks in (getattr(part, name) for name in _HOOKS)]

    def change(self) -> str:
        """One clause on the first change; empty: there is none."""
        for parts, name, part, path in self._parts:
            if parts.get(name) is not part:
                return f"{path} was replaced by another module"
        for parameters, name, parameter, place, path in self._parameters:
            found = parameters.get(name)
            if found is not parameter or (found is not None and found.data_ptr() != place and not _moved_by_a_store(found)):
                return f"the parameter {path} was replaced by another tensor"
        for attributes, forward, path in self._calls:
            if attributes.get("forward") is not forward:
                return f"{path} got another forward"
        for hooks, count, path in self._hooks:
            if len(hooks) != count and _count(hooks) != count:
                return f"a hook was set on {path} or taken from it"
        return ""


def _moved_by_a_store(parameter: "torch.Tensor") -> bool:
    """Whether it lies elsewhere only because it was compiled once more, with the same values since."""
    return bool(_placed().get(parameter) == (parameter.data_ptr(), _version(parameter)))


def _version(tensor: "torch.Tensor") -> int:
    return -1 if tensor.is_inference() else int(tensor._version)


def _count(hooks: dict[int, Any]) -> int:
    """Hooks, less those by which transformers itself looks at what its models compute."""
    return sum(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in hooks.values())
