"""Whether a module remembers its calls, asked in forks of this process: whatever it keeps, and wherever, it keeps there.

A fork holds all that the program holds: closures, globals, context variables, caches of libraries, memory that numpy or C owns. Two of
them begin alike, so what one call answers alone and behind others tells whether it remembers, and nobody has to know in which place.
Here the module has not been called then. Calls of a fork take one processor, and those of a module on an accelerator are calls of a copy.
"""

import copy
import io
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...processes.forked import ForkedCall, NothingSaid
from ...runtime.device import forked_rng
from .comparison import Arguments, random_inputs, tensors_among
from .dependence import apart, leaves_of, turned

LIMIT_S = 10.0  # for all of them
CALLS = 12  # as many as there may be
COPIED_BYTES = 1 << 30

LARGE = 1e3

_Alternatives = Sequence[Arguments]  # of which the first one counts that the module takes


def remembers(module: nn.Module, given: Arguments) -> bool | None:
    """Whether ``module`` in evaluation mode answers ``given`` otherwise behind other calls; None: forks do not tell.

    Behind random numbers, and behind zeros and large ones, since what a call leaves may say no more than on which side of something its
    numbers lie.
    """
    devices = {t.device for t in module.parameters()}
    found = _on_the_processor(module, given)
    if found is None:
        return None
    module, given = found
    with forked_rng(devices):
        numbers = (0.0, LARGE, -LARGE) if any(t.is_floating_point() for t in tensors_among(given)) else ()
        sides = [((_filled(given, number),),) for number in numbers]
        others = ((turned(random_inputs(given)), random_inputs(given), turned(given)), (random_inputs(given, 1), given))
    began = time.monotonic()

    def answers(before: Sequence[_Alternatives]) -> list[list[Any]]:
        return _answers(module, given, before, began + LIMIT_S)

    alone = answers(())
    if not alone or time.monotonic() - began > LIMIT_S / CALLS:
        return None
    for before in (others, *sides):
        behind = answers(before)
        if before is others and len(behind) < len(others):
            return None
        if any(apart(one, alone[0]) for one in behind):
            again = answers(())
            return True if again and not apart(again[0], alone[0]) else None  # it reads a clock, say
    return False


def says(question: Callable[[], bool]) -> bool:
    """What ``question`` answers in a fork; False, too, where it does not."""
    def asked() -> bytes:
        torch.set_num_threads(1)  # threads of the pool are not in a fork
        return bytes([question()])

    try:
        with ForkedCall(asked, time.monotonic() + LIMIT_S / CALLS) as fork:
            return fork.result() == b"\1"
    except NothingSaid:
        return False


def _answers(module: nn.Module, given: Arguments, before: Sequence[_Alternatives], deadline: float) -> list[list[Any]]:
    """What the module answers to ``given`` in a fork: at once where nothing is ``before``, else behind each of these calls that it takes.
    Empty: the fork does not tell."""
    try:
        with ForkedCall(lambda: _made(module, given, before), deadline) as fork:
            result = fork.result()
        found: list[list[Any]] = torch.load(io.BytesIO(result), weights_only=True) if result is not None else []
    except Exception:  # NothingSaid, and what a tensor of a class of its own is read from may raise anything
        return []
    return found


def _made(module: nn.Module, given: Arguments, before: Sequence[_Alternatives]) -> bytes:
    torch.set_num_threads(1)
    module.eval()
    drawn, drawn_by_numpy = random.getstate(), numpy.random.get_state()

    def answer(arguments: Arguments) -> list[Any]:
        random.setstate(drawn)  # what a generator draws next is looked at by other means
        numpy.random.set_state(drawn_by_numpy)
        return leaves_of(module, arguments)

    with torch.no_grad():
        found = []
        for alternatives in before or ((),):
            if any(_is_taken(answer, one) for one in alternatives) or not before:
                found.append([_sent(leaf) for leaf in answer(given)])
    written = io.BytesIO()
    torch.save(found, written)
    return written.getvalue()


def _is_taken(answer: Any, arguments: Arguments) -> bool:
    try:
        answer(arguments)
    except Exception:
        return False
    return True


def _sent(leaf: Any) -> Any:
    """What ``apart`` looks at."""
    if isinstance(leaf, Tensor):
        return leaf.detach().as_subclass(Tensor).contiguous() if leaf.layout is torch.strided else leaf.to_dense()
    return leaf if type(leaf) in (bool, int, float, str) else None


def _filled(given: Arguments, number: float) -> Arguments:
    filled: Arguments = pytree.tree_map_only(Tensor, lambda t: torch.full_like(t, number) if t.is_floating_point() else t, given)
    return filled


def _on_the_processor(module: nn.Module, given: Arguments) -> tuple[nn.Module, Arguments] | None:
    """The module and its arguments where they lie in the memory of the processor, else copies there; None: there can be none."""
    held = [value for part in module.modules() for values in (part._parameters, part._buffers, vars(part)) for value in values.values()]
    tensors = {id(value): value for value in held if isinstance(value, Tensor)}
    if all(tensor.device.type == "cpu" for tensor in (*tensors.values(), *tensors_among(given))):
        return module, given
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > COPIED_BYTES:
        return None
    try:
        there = copy.deepcopy(module, {at: _moved(tensor) for at, tensor in tensors.items()})
        return there, pytree.tree_map_only(Tensor, Tensor.cpu, given)
    except Exception:  # a module may hold what cannot be copied
        return None


def _moved(tensor: Tensor) -> Tensor:
    there = tensor.detach().cpu()
    return nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there
