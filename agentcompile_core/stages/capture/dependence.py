"""What a plain module's result depends on besides its arguments and its tensors: a graph knows nothing of it, so the module itself runs.

A trace sees one path of the Python code, once. Whether that path is always taken is tried here, by calls of the module that must
agree with one another: the same call twice, with arguments that lie otherwise in memory, with the keys of dicts in another order.
While it runs it is watched for clocks, random numbers of Python and numpy, files and the environment.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...ir.extents import span
from ...ops.agreement import disagreement
from ...plugin import thread_exceptions
from ...plugin.interfaces import LoadedModel
from ...runtime import calls
from ...runtime.device import forked_rng
from ...runtime.installed_packages import is_installed, is_standard_file
from . import libraries
from .comparison import SEED, Arguments, given_to, has_data, random_inputs, tensors_among
from .evaluating import evaluating
from .identity import identity
from .left_behind import ParametersKept, undisturbed
from .object_digest import ITERATOR

REMEMBERS = "what it returns depends on what it was called with before"
GROSS = 1e-2  # relative rms: more than another order of summation makes of other strides
_OUTSIDE = frozenset({"time", "random", "_random", "datetime", "_datetime", "posix", "nt", "_io", "_socket", "select"})
_ENVIRONMENT = frozenset({"__getitem__", "getenv", "getenvb"})  # of os, in Python
_HARMLESS = frozenset({"fspath"})


def training_matters(loaded: LoadedModel) -> str:
    """One clause on what a plain module in training mode does beside what it does in evaluation mode; empty: nothing, or it is in that.

    A graph is one of evaluation mode.
    """
    module = loaded.module
    if not is_in_training(loaded):
        return ""
    given = given_to(loaded)
    with torch.no_grad():
        try:
            with undisturbed(module), evaluating(module):
                wanted = [*answer(module, given), *_states(module)]
        except Exception:  # it cannot be called so in either mode; whoever captures it says why
            return ""
        try:
            with undisturbed(module):
                found = [*answer(module, given), *_states(module)]
        except Exception as exc:
            return f"it is in training mode, in which it raises {type(exc).__name__}; call its eval() first"
    return "it is in training mode, in which it does something else; call its eval() first" if apart(found, wanted) else ""


def is_in_training(loaded: LoadedModel) -> bool:
    """Whether it is a plain module that can be called and a part of it is in training mode."""
    return hasattr(loaded, "example_inputs") and has_data(loaded) and any(part.training for part in loaded.module.modules())


def dependence(loaded: LoadedModel) -> str:
    """One clause on what else the results of a plain module depend on; empty where nothing was found. The module is left as it was."""
    if not hasattr(loaded, "example_inputs") or not has_data(loaded):
        return ""
    with torch.no_grad(), evaluating(loaded.module), forked_rng({t.device for t in loaded.module.parameters()}):
        return _seen(loaded) or _remembers(loaded)


def _seen(loaded: LoadedModel) -> str:
    module = loaded.module
    with undisturbed(module):
        for given in (random_inputs(given_to(loaded)), given_to(loaded)):
            drawn = repr(numpy.random.get_state())
            try:
                with _watched() as seen:
                    answer(module, given)
            except Exception:  # random numbers need not be what the module takes
                continue
            if repr(numpy.random.get_state()) != drawn:  # its generators are not seen being called
                seen.append("its forward draws random numbers of numpy")
            return seen[0] if seen else _depends(loaded, given)
    return ""


def _remembers(loaded: LoadedModel) -> str:
    """One clause on a module that answers the same call otherwise where another one came before it, from the state that it has now."""
    module, given = loaded.module, given_to(loaded)
    def last_of(*calls: Arguments) -> list[Any]:
        with undisturbed(module):
            return [answer(module, one) for one in calls][-1]

    return REMEMBERS if is_another_behind(given, last_of) else ""


def is_another_behind(given: Arguments, last_of: Callable[..., list[Any]]) -> bool:
    """Whether the result of the last of some calls, from one state, is another one behind a call with other arguments.

    Random ones, and zeros, since what a call leaves may say no more than on which side of something its numbers lie.
    """
    alone: list[Any] | None = None
    for others in ((turned(random_inputs(given)), random_inputs(given), turned(given)), (_zeros(given),)):
        for other in others:
            with suppress(Exception):  # other numbers need not be what the module takes
                behind = last_of(other, given)
                alone = alone or last_of(given)
                if apart(behind, alone):
                    return True
                break
    return False


def _zeros(given: Arguments) -> Arguments:
    zeros: Arguments = pytree.tree_map_only(Tensor, lambda tensor: tensor * 0 if tensor.is_floating_point() else tensor, given)
    return zeros


def turned(given: Arguments) -> Arguments:
    """The same arguments with other whole numbers, of which each is one that the module takes where it takes 0 or 1."""
    others: Arguments = pytree.tree_map_only(Tensor, _other_numbers, given)
    return others


def _other_numbers(tensor: Tensor) -> Tensor:
    """Whole numbers in the reverse order; where that is the same, another first one."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided or not tensor.numel():
        return tensor
    other = tensor.flip(tuple(range(tensor.dim())))
    if torch.equal(other, tensor):
        other = tensor.clone()
        first = other.view(-1)[:1] if other.is_contiguous() else other[(0,) * other.dim()]
        first.copy_(first == 0)
    return other


def _depends(loaded: LoadedModel, given: Arguments) -> str:
    module = loaded.module
    wanted, before = answer(module, given), identity(loaded)
    again = answer(module, given)
    if identity(loaded).capture != before.capture or apart(again, wanted):
        return "its forward changes what it holds or refers to, beside tensors, so that its next call may return something else"
    if ITERATOR in before.unstable:
        return ITERATOR
    for change, why in ((_laid_out, "it reads its arguments as they lie in memory"),
                        (_reordered, "it depends on the order of the keys of a dict")):
        other = change(given)
        try:
            found = None if other is None else answer(module, other)
        except Exception:  # a view of what lies otherwise may not be possible
            continue
        if found is not None and apart(found, wanted, gross=change is _laid_out):
            return why
    return ""


def answer(module: nn.Module, given: Arguments) -> list[Any]:
    """``leaves_of``, where nothing is written to parameters."""
    with ParametersKept(module):
        return leaves_of(module, given)


def leaves_of(module: nn.Module, given: Arguments) -> list[Any]:
    """The leaves of what the module returns for copies of its arguments, tensors cloned."""
    def copied(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.layout is not torch.strided or tensor.is_contiguous() else _kept(tensor)

    torch.manual_seed(SEED)
    args, keywords = calls.by_name(module, *pytree.tree_map_only(Tensor, copied, given))
    leaves: list[Any] = pytree.tree_leaves(module(*args, **keywords))
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _kept(tensor: Tensor) -> Tensor:
    """A copy with the same strides; a clone keeps those only of what has no gaps."""
    if not all(tensor.stride()) or not tensor.numel():
        return tensor.clone()
    shape, strides = tensor.shape, tensor.stride()
    return torch.zeros(span(shape, strides), dtype=tensor.dtype, device=tensor.device).as_strided(shape, strides).copy_(tensor)


def apart(found: list[Any], wanted: list[Any], gross: bool = False) -> bool:
    """Whether two results differ; ``gross``: by more than rounding in another order makes of floating point numbers."""
    if len(found) != len(wanted) or any(isinstance(a, Tensor) != isinstance(b, Tensor) for a, b in zip(found, wanted, strict=True)):
        return True
    for one, other in zip(found, wanted, strict=True):
        if not isinstance(one, Tensor):
            if isinstance(one, (bool, int, float, str)) and repr(one) != repr(other):
                return True
        elif one.layout is torch.strided and disagreement([one], [other]) and not (gross and _is_rounding(one, other)):
            return True
    return False


def _is_rounding(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or not one.is_floating_point():
        return False
    wide, wanted = one.double().nan_to_num(), other.double().nan_to_num()
    return bool((wide - wanted).square().mean().sqrt() <= GROSS * wanted.square().mean().sqrt())


def _laid_out(given: Arguments) -> Arguments | None:
    """The same numbers with the axes in the reverse order in memory, and gaps; None where nothing can lie otherwise."""
    def moved(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.numel() < 2:
            return tensor
        axes = tuple(reversed(range(tensor.dim())))
        turned = tensor.permute(axes).contiguous()
        return torch.stack([turned, turned], -1)[..., 0].permute(axes)

    made: Arguments = pytree.tree_map_only(Tensor, moved, given)
    return made if any(not tensor.is_contiguous() for tensor in tensors_among(made) if tensor.layout is torch.strided) else None


def _reordered(given: Arguments) -> Arguments | None:
    """The same arguments with the keys of every dict, and what is given by name, in the reverse order; None where there is just one."""
    found = []

    def turned(value: Any) -> Any:
        if type(value) is dict:
            found.append(len(value) > 1)
            return {key: turned(item) for key, item in reversed(value.items())}
        return type(value)(map(turned, value)) if type(value) in (list, tuple) else value

    args, keywords = turned(given[0]), turned(given[1])
    return (args, keywords) if any(found) else None


def _states(module: nn.Module) -> list[Tensor]:
    """Buffers and states of torch's random generators."""
    devices = {t.device for t in module.parameters() if t.device.type not in ("cpu", "meta")}
    drawn = [torch.get_device_module(device).get_rng_state(device) for device in devices]
    return [torch.get_rng_state(), *drawn, *(buffer.clone() for buffer in module.buffers())]


@contextmanager
def _watched() -> Iterator[list[str]]:
    """The list names what code that is no library's reads from outside within the block: the first time it does."""
    seen: list[str] = []
    before: Any = sys.getprofile()

    def look(frame: FrameType, event: str, what: Any) -> None:
        if seen:
            return
        if event == "c_call":
            owner = getattr(what, "__self__", None)
            home = getattr(what, "__module__", None) or (owner if isinstance(owner, type) else type(owner)).__module__
            is_outside = (home in _OUTSIDE or home.startswith("numpy.random")) and what.__name__ not in _HARMLESS
            name, caller = f"{home.lstrip('_')}.{what.__name__}", frame
        elif event == "call" and frame.f_code.co_name in _ENVIRONMENT and frame.f_globals.get("__name__") == "os":
            is_outside, name, caller = True, "os.environ", frame
        else:
            return
        if is_outside and _asked_by_user(caller):
            seen.append(f"its forward reads from outside while it runs ({name})")

    thread_exceptions.lower_flag()  # somebody's exception may be waiting, and this thread would wait with it
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before if callable(before) else None)
        if before is not None and not callable(before):  # cProfile's, which Python cannot call: each call would raise
            with suppress(Exception):
                before.enable()


def _asked_by_user(frame: FrameType | None) -> bool:
    """Whether the first caller that is not of the standard library belongs to no library at all."""
    while frame is not None and is_standard_file(frame.f_code.co_filename):
        frame = frame.f_back
    path = frame.f_code.co_filename if frame is not None else ""
    return bool(path) and not libraries.is_library_file(path) and not is_installed(path)
