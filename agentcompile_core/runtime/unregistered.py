"""Tensors and modules that lie beside what a module registers: a graph holds what they were as numbers, and no weight is read there."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    import torch

MOST_PARTS = 64
_FEW = 64
_SEEN_ANYWAY = 4096  # elements, which takes 20 us
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@frozen(eq=False)
class Same:
    """A form that is equal to that of the same object alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@cache
def _tables() -> frozenset[str]:
    """What every module of torch has."""
    return frozenset(vars(_kinds()[0]()))


def is_of_all(name: str) -> bool:
    """Whether every module of torch has an attribute of this name."""
    return name in _tables()


@cache
def _kinds() -> "tuple[type[torch.nn.Module], type[torch.Tensor]]":
    from torch import Tensor, nn

    return nn.Module, Tensor


def is_module(value: Any) -> bool:
    return isinstance(value, _kinds()[0])


def is_tensor(value: Any) -> bool:
    return isinstance(value, _kinds()[1])


def registered_by(module: "torch.nn.Module") -> frozenset[int]:
    """Addresses of all parts, parameters and buffers of a module, which are watched by themselves or read where they lie."""
    return frozenset(map(id, (*module.modules(), *module.parameters(), *module.buffers())))


def is_small(module: "torch.nn.Module") -> bool:
    """Whether a module has so few parts that it can be looked at before each request: no model that somebody keeps beside his own."""
    return sum(1 for _ in islice(module.modules(), MOST_PARTS + 1)) <= MOST_PARTS


def parts_of(module: "torch.nn.Module") -> Iterator[tuple[str, Any]]:
    """What else than its attributes a forward of a module depends on, by name: its mode, tensors, parts and hooks (as ``Same``)."""
    yield "training", module.training
    for table in (module._parameters, module._buffers, module._modules):
        yield from table.items()
    for name in _HOOKS:  # transformers looks at what modules compute by some of its own
        hooks = getattr(module, name).values()
        yield from ((name, Same(hook)) for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers."))


@contextmanager
def reading() -> Iterator[set[int]]:
    """Addresses of the tensors that operators are given within; of those that nobody else holds they say nothing.

    Functions of TorchScript and code without ``__torch_function__`` are seen where operators are dispatched, what has no operator before.
    """
    from torch.overrides import TorchFunctionMode
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[int] = set()

    class Reads(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
            seen.update(map(id, filter(is_tensor, pytree.tree_leaves((args, kwargs)))))
            return func(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
            seen.update(map(id, filter(is_tensor, pytree.tree_leaves((args, kwargs)))))
            return func(*args, **(kwargs or {}))

    with Dispatched(), Reads():
        yield seen


@cache
def _known() -> Any:
    """What ``number_of`` said, and the tensor's version then."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def number_of(tensor: "torch.Tensor") -> tuple[Any, ...]:
    """Shape, type and number of a tensor whose elements are all equal, of which 0.0 and -0.0 are two; empty: it is none.

    Of tensors that are not registered no others have a say in a graph (``stages.capture.importer``). One of up to ``_SEEN_ANYWAY`` elements
    in the memory of the processor is looked at each time, any other where it was written to or lies elsewhere: what is written through its
    ``data`` or by numpy alone nobody counts, and a look at an accelerator's waits for all that it does.
    """
    try:
        if tensor.device.type == "cpu" and tensor.numel() <= _SEEN_ANYWAY:
            return _number_of(tensor)
        version, place = -1 if tensor.is_inference() else int(tensor._version), tensor.data_ptr()
        known = _known().get(tensor)
        if known is None or known[0] != (version, place) or version < 0:
            known = _known()[tensor] = (version, place), _number_of(tensor)
    except Exception:  # a tensor without memory, or of somebody's class: whatever lies beside it is looked at nevertheless
        return ()
    found: tuple[Any, ...] = known[1]
    return found


def _number_of(tensor: "torch.Tensor") -> tuple[Any, ...]:
    """By their bits, which all types have, and numbers that are not equal to themselves."""
    import torch

    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return ()
    data = tensor.detach().resolve_conj().resolve_neg()
    parts = torch.view_as_real(data) if data.itemsize == 16 else data  # the widest type, of complex numbers, is as wide as no integer
    bits = parts.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parts.itemsize])
    first = bits[(0,) * data.dim()]
    row = bits[(0,) * (data.dim() - 1)][:_FEW] if data.dim() else bits  # tells most tensors without a look at all of them
    if not bool((row == first).all()) or not bool((bits == first).all()):
        return ()
    return tuple(data.shape), data.dtype, repr(data[(0,) * data.dim()].item())
