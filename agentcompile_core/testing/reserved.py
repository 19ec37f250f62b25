"""What every reservation of addresses must do: grow in place, keep what was written, read as zeros where nothing is held."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import Reject
from ..plugin.reserving import Reserved
from .demands import demand, demand_answer
from .reserving import ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch

SIZES = (5 << 20, 1000, (1 << 20) + 3)  # bytes: several pieces of most devices, less than one, and no whole number of anything
TURNS: tuple[tuple[bool, tuple[int, ...]], ...] = (  # what is held, and what is given back (True)
    (False, (1, 0, 0)), (False, (3 << 20, 10, 1 << 20)), (False, (1 << 20, 1000, 0)), (True, (1 << 20, 1000, 0)), (False, (2 << 20, 0, 1)),
    (True, (0, 0, 0)), (False, tuple(8 * size for size in SIZES)))


def demand_grows(found: Reserved, sizes: Sequence[int] = SIZES, turns: Sequence[tuple[bool, tuple[int, ...]]] = TURNS) -> None:
    """Everything that ``Reserved`` says, over ranges of ``sizes`` of which nothing is held.

    Raises:
        AssertionError: something is not so.
    """
    demand(len(found.tensors) == len(sizes), f"reserve() returned {len(found.tensors)} tensors for {len(sizes)} ranges")
    for tensor, size in zip(found.tensors, sizes, strict=True):
        said = str(tensor.dtype), tuple(tensor.shape), tensor.data_ptr() % ALIGNMENT_BYTES
        demand(said == ("torch.uint8", (size,), 0), f"a range of {size} bytes is a tensor of (dtype, shape, address modulo 256) {said}")
    demand(tuple(found.held) == (0,) * len(sizes), f"held is {tuple(found.held)} at the beginning; nothing is")
    addresses = [tensor.data_ptr() for tensor in found.tensors]
    wanted = [tensor.clone().zero_() for tensor in found.tensors]
    _demand_contents(found, wanted, "nothing was held")
    for number, (back, counts) in enumerate(turns):
        before = tuple(found.held)
        if back:
            found.give_back(counts)
        else:
            answer = found.hold(counts)
            demand_answer(answer, "hold()")
            if isinstance(answer, Reject):
                demand(tuple(found.held) == before, f"hold() refused, and held changed from {before} to {tuple(found.held)}")
                _demand_contents(found, wanted, "hold() refused")
                return
        where = f"after {'give_back' if back else 'hold'}({counts})"
        _demand_held(before, tuple(found.held), counts, sizes, back, where)
        demand([tensor.data_ptr() for tensor in found.tensors] == addresses, f"{where} the ranges lie elsewhere")
        for one, count in zip(wanted, found.held, strict=True):
            one[count:] = 0
        _demand_contents(found, wanted, where)
        for index, (one, tensor, count) in enumerate(zip(wanted, found.tensors, found.held, strict=True)):
            one[:count] = 1 + (7 * number + index) % 250
            tensor[:count] = one[:count]
        _demand_contents(found, wanted, f"{where} and writing to what is held")


def _demand_held(before: tuple[int, ...], held: tuple[int, ...], counts: Sequence[int], sizes: Sequence[int], back: bool,
                 where: str) -> None:
    for had, has, count, size in zip(before, held, counts, sizes, strict=True):
        if back:
            demand(min(had, count) <= has <= had, f"{where} {has} bytes of a range are held of which {had} were; {count} were to stay")
        else:
            demand(max(had, min(count, size)) <= has <= size,
                   f"{where} {has} bytes of a range of {size} are held; {had} were, and what is held stays held")


def _demand_contents(found: Reserved, wanted: "Sequence[torch.Tensor]", where: str) -> None:
    for index, (tensor, one) in enumerate(zip(found.tensors, wanted, strict=True)):
        differs = (tensor != one).nonzero()
        if len(differs):
            place = int(differs[0])
            raise AssertionError(f"{where} byte {place} of range {index} is {int(tensor[place])}, expected {int(one[place])}; "
                                 "contents stay, what is new or not held reads as zero")
