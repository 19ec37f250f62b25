"""Whether a module remembers its calls, asked in forks of this process: whatever it keeps, and wherever, it keeps there.

A fork holds all that the program holds: closures, globals, context variables, caches of libraries, memory that numpy or C owns. Two of
them begin alike, so what one call answers alone and behind others tells whether it remembers, and nobody has to know in which place.
Here the module has not been called then. Calls of a fork take one processor, and those of a module on an accelerator are calls of a copy.
"""

import copy
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...processes.forked import ForkedCall, NothingSaid
from ...runtime.device import forked_rng
from . import other_numbers
from .answer_digest import SIZE, digest
from .comparison import Arguments, tensors_among
from .dependence import leaves_of

LIMIT_S = 10.0  # for all calls of one module
ALONE_S = LIMIT_S / 12  # for the first one, as there are about so many
COPIED_BYTES = 1 << 30

_Alternatives = Sequence[Arguments]  # of which the first one counts that the module takes


def remembers(module: nn.Module, given: Arguments) -> bool | None:
    """Whether ``module`` in evaluation mode answers ``given`` otherwise behind other calls; None: forks do not tell.

    Behind random numbers, and behind such on either side of something, since what a call leaves may say no more than where its numbers lie.
    """
    devices = {t.device for t in module.parameters()}
    found = _on_the_processor(module, given)
    if found is None:
        return None
    module, given = found
    with forked_rng(devices):
        drawn, again = other_numbers.drawn(given, 0), other_numbers.drawn(given, 1)
        turned = other_numbers.backwards(drawn)
        others = ((other_numbers.beside_tensors(turned), turned, drawn, other_numbers.backwards(given)), (again, given))
        sides = [(alternatives,) for alternatives in other_numbers.sides(given)]
    began = time.monotonic()
    alone, _ = _answers(module, given, (), began + ALONE_S)
    if not alone:
        return None
    takes_others = not pytree.tree_leaves(given)
    for before in (others, *sides):
        behind, were_others = _answers(module, given, before, began + LIMIT_S)
        takes_others = takes_others or were_others
        if before is others and len(behind) < len(others):
            return None
        if any(one != alone[0] for one in behind):
            once_more, _ = _answers(module, given, (), began + LIMIT_S)
            return True if once_more == alone else None  # it reads a clock, say
    return False if takes_others else None


def told(question: Callable[[], str]) -> str | None:
    """What ``question`` answers in a fork; None: the fork does not tell."""
    def asked() -> bytes:
        _begin()
        return question().encode()

    try:
        with ForkedCall(asked, time.monotonic() + ALONE_S) as fork:
            result = fork.result()
    except NothingSaid:
        return None
    return None if result is None else result.decode()


def _answers(module: nn.Module, given: Arguments, before: Sequence[_Alternatives], deadline: float) -> tuple[list[bytes], bool]:
    """Digests of what the module answers to ``given`` in a fork: at once where nothing is ``before``, else behind each of these calls that
    it takes; and whether it took other numbers than those. Empty: the fork does not tell."""
    try:
        with ForkedCall(lambda: _made(module, given, before), deadline) as fork:
            result = fork.result()
    except NothingSaid:
        return [], False
    if result is None:
        return [], False
    return [result[at:at + SIZE] for at in range(1, len(result), SIZE)], bool(result[0])


def _made(module: nn.Module, given: Arguments, before: Sequence[_Alternatives]) -> bytes:
    _begin()
    module.eval()
    drawn, drawn_by_numpy = random.getstate(), numpy.random.get_state()

    def answer(arguments: Arguments) -> list[Any]:
        random.setstate(drawn)  # what a generator draws next is looked at by other means
        numpy.random.set_state(drawn_by_numpy)
        return leaves_of(module, arguments)

    found, were_others = list[bytes](), False
    with torch.no_grad():
        for alternatives in before or ((given,),):
            taken = next((one for one in alternatives if not before or _is_taken(answer, one)), None)
            if taken is not None:
                were_others = were_others or not other_numbers.are_same(taken, given)
                found.append(digest(answer(given)))
    return bytes([were_others]) + b"".join(found)


def _begin() -> None:
    torch.set_num_threads(1)  # threads of the pool are not in a fork
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")  # a compilation takes longer than anybody waits here


def _is_taken(answer: Callable[[Arguments], list[Any]], arguments: Arguments) -> bool:
    try:
        answer(arguments)
    except Exception:
        return False
    return True


def lie_on_the_processor(module: nn.Module, given: Arguments) -> bool:
    """Whether what a call is given lies where forks can use it."""
    return all(tensor.device.type == "cpu" for tensor in (*_tensors_of(module), *tensors_among(given)))


def _tensors_of(module: nn.Module) -> list[Tensor]:
    held = [value for part in module.modules() for values in (part._parameters, part._buffers, vars(part)) for value in values.values()]
    return list({id(value): value for value in held if isinstance(value, Tensor)}.values())


def _on_the_processor(module: nn.Module, given: Arguments) -> tuple[nn.Module, Arguments] | None:
    """The module and its arguments where they lie in the memory of the processor, else copies there; None: there can be none."""
    if lie_on_the_processor(module, given):
        return module, given
    tensors = _tensors_of(module)
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors) > COPIED_BYTES:
        return None
    try:
        there = copy.deepcopy(module, {id(tensor): _moved(tensor) for tensor in tensors})
        return there, pytree.tree_map_only(Tensor, Tensor.cpu, given)
    except Exception:  # a module may hold what cannot be copied
        return None


def _moved(tensor: Tensor) -> Tensor:
    there = tensor.detach().cpu()
    return nn.Parameter(there, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else there
