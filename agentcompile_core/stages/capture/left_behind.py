"""What a forward leaves behind: in the attributes and buffers of modules and in random generators; taken back after a trace or a trial."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...runtime.device import forked_rng
from ...runtime.unregistered import is_of_all
from .holders import Holders, give_back
from .storages import storage_of
from .unsupported import Unsupported

_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})
# Traces and trials exchange parts of torch and of the model that they look at, for every thread of the process.
ALONE = threading.RLock()


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[list[str]]:
    """Give every module the attributes and parts back that it had; the list names attributes that hold another tensor at the end.

    A trace would leave tensors without data behind, and exchanges parts where the model does (BigBird). What tensors hold is not looked at.
    """
    before = _structure(model)
    had = {path: attributes for path, (_, attributes, _, _) in before.items()}
    left: list[str] = []
    try:
        yield left
    finally:
        left += [f"{path}.{name}" for path, part in model.named_modules() for name, value in _attributes(part).items()
                 if isinstance(value, Tensor) and value is not had.get(path, {}).get(name)]
        _put_back(before)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Random generators, buffers, attributes and parts are afterwards what they were, and what attributes lead to (``Holders``).

    Attributes are the same objects again, and tensors among them hold what they held. Python's and numpy's generators count, too.
    """
    noted = Noted(module)
    with forked_rng({t.device for t in module.parameters()}):
        try:
            yield
        finally:
            noted.put_back()


class Noted:
    """What a module holds now, and generators of Python and numpy; ``put_back`` gives it back, as often as it is asked to."""

    def __init__(self, module: nn.Module) -> None:
        self._before, self._holders = _structure(module), Holders()
        self._held = {id(value): (value, _content(value))
                      for _, attributes, buffers, _ in self._before.values() for value in (*attributes.values(), *buffers.values())}
        registered = (*module.parameters(), *module.buffers())
        self._of_tensors = [(vars(tensor), dict(vars(tensor))) for tensor in registered]
        self._holders.look_at((value for _, attributes, _, _ in self._before.values() for name, value in attributes.items()
                               if not is_of_all(name) and not isinstance(value, Tensor)), known=(*module.modules(), *registered))
        self._drawn, self._drawn_by_numpy = random.getstate(), numpy.random.get_state()

    def put_back(self) -> None:
        """The module holds again what it held."""
        random.setstate(self._drawn)
        numpy.random.set_state(self._drawn_by_numpy)
        _put_back(self._before)
        for value, content in self._held.values():
            _refill(value, content)
        for attributes, then in self._of_tensors:
            give_back(attributes, then)
        self._holders.put_back()


_Structure = dict[str, tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]]


def _structure(module: nn.Module) -> _Structure:
    """By its path each part of ``module`` with its attributes, buffers and own parts."""
    return {path: (part, _attributes(part), dict(part._buffers), dict(part._modules)) for path, part in module.named_modules()
            if not isinstance(part, torch.jit.ScriptModule)}  # whose attributes lie in C++


def _put_back(before: _Structure) -> None:
    for part, attributes, buffers, inner in before.values():
        for name in _attributes(part).keys() - attributes.keys():
            del vars(part)[name]
        vars(part).update(attributes)
        for now, then in ((part._buffers, buffers), (part._modules, inner)):
            now.clear()
            now.update(then)


class ParametersKept(TorchDispatchMode):
    """Within it nothing is written to the parameters of ``module``, which are too large to be copied for a trial."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._kept = {storage_of(p) for p in module.parameters()} - {None}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run ``func``.

        Raises:
            Unsupported: it would write to a parameter.
        """
        kwargs = kwargs or {}
        if any(storage_of(t) in self._kept for t in written_by(func, args, kwargs)):
            raise Unsupported("it writes to its own parameters")
        return func(*args, **kwargs)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call of an operator writes to."""
    for index, argument in enumerate(func._schema.arguments if hasattr(func, "_schema") else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (t for t in pytree.tree_leaves(given) if isinstance(t, Tensor))


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in _STRUCTURE}


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if type(value) in (list, dict, set) else None


def _refill(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        with torch.no_grad(), suppress(RuntimeError):  # of one that nothing can be written to, nothing was
            if not value.is_meta and value.layout is torch.strided and value.shape == content.shape and not torch.equal(value, content):
                value.copy_(content)
    elif isinstance(value, list) and content is not None:
        value[:] = content
    elif isinstance(value, (dict, set)) and content is not None:
        value.clear()
        value.update(content)
