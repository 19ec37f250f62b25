"""Which programs a session holds, all of them or all but chunks for which there is no memory; and which one makes a step."""

import gc
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

from ..ir.graph import GraphKind
from .device import release_cache
from .program import Program


def chunk_sizes(programs: Mapping[str, Program]) -> tuple[int, ...]:
    """The sizes of prompt chunks among ``programs``, in tokens, smallest first."""
    return tuple(sorted({program.graph.tokens for program in programs.values() if program.graph.kind is GraphKind.PREFILL}))


def capture_each(capture: Callable[[str], None], programs: dict[str, Program], *made: dict[str, Any]) -> tuple[int, ...]:
    """``capture`` every program, by name; the sizes of chunks that were left out for lack of memory.

    The largest first: what their captures have left is large enough for those that follow. What is left out is gone from ``programs``
    and from what was ``made`` of them.

    Raises:
        torch.OutOfMemoryError: there is not enough for the smallest chunk, or for a step.
    """
    import torch

    left_out: list[int] = []
    for name in sorted(programs, key=lambda name: (-programs[name].graph.tokens, name)):
        if name not in programs:
            continue
        graph = programs[name].graph
        try:
            capture(name)
        except torch.OutOfMemoryError:
            if graph.kind is not GraphKind.PREFILL or graph.tokens == chunk_sizes(programs)[0]:
                raise
            gone = [one for one, program in programs.items() if program.graph.kind is graph.kind and program.graph.tokens == graph.tokens]
            for one in gone:
                del programs[one]
                for each in made:
                    each.pop(one, None)
            gc.collect()  # circles may hold memory of the device
            release_cache()
            left_out.append(graph.tokens)
    return tuple(left_out)


class DecodePrograms:
    """The decode programs of a session, each for the steps from its first position to that of the next."""

    def __init__(self, programs: Mapping[str, Program], capacity: int) -> None:
        found = sorted((program.start, name) for name, program in programs.items() if program.graph.name == "decode")
        self._starts, self.names = [start for start, _ in found], [name for _, name in found]
        self._capacity = capacity

    def at(self, position: int) -> str:
        """Name of the program whose step reads the token at ``position``."""
        return self.names[bisect_right(self._starts, position) - 1]

    def end(self, position: int) -> int:
        """The first position behind ``position`` that another program serves, or none."""
        index = bisect_right(self._starts, position)
        return self._starts[index] if index < len(self._starts) else self._capacity
